"""What is asked of an engine: sessions of requests that may build on each other's answers.

A session is a list of stages; the asks of one stage are sent together, and the next stage starts when all of
them have ended. A message may quote an earlier answer (`Reply`), so conversations and branching agents are
plain data that the load generator's process can be handed.

The sizes are such that a small model on two CPU cores gets through a run in seconds, even with all parts off; give
larger ones to a larger machine: `agents.n=100 agents.shared_tokens=2048`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.lab import text, traces
from core.lab.arrivals import Count, Load, Positive
from core.lab.errors import UsageError, unknown


@dataclass(frozen=True, slots=True)
class Reply:
    """Stands for the answer to ask `index` of stage `stage` in the same session."""

    stage: int
    index: int


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    pieces: tuple[str | Reply, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. It always generates `max_tokens` (end of sequence is ignored), so arms do equal work."""

    messages: tuple[Message, ...]
    max_tokens: int
    label: str


@dataclass(frozen=True, slots=True)
class Session:
    """`at`: seconds from the start that a trace gives."""

    stages: tuple[tuple[Ask, ...], ...]
    at: float | None = None

    @property
    def requests(self) -> int:
        return sum(len(stage) for stage in self.stages)


def user(*pieces: str | Reply) -> Message:
    return Message("user", pieces)


def assistant(*pieces: str | Reply) -> Message:
    return Message("assistant", pieces)


class Workload(BaseModel, ABC):
    """A kind of load; the same seed gives the same sessions on every machine with the same Python.

    `n`: sessions in a run. `spread`: lengths vary uniformly by this share of their mean.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    n: Count = 8
    load: Load = Load()
    spread: Annotated[float, Field(ge=0, lt=1)] = 0.5

    @abstractmethod
    def sessions(self, seed: int) -> list[Session]:
        """The `n` sessions of one run."""

    def _length(self, rng: random.Random, mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))


class Chat(Workload):
    """Short in, long out, several turns."""

    name = "chat"
    n: Count = 3
    turns: Count = 2
    input_tokens: Count = 16
    output_tokens: Count = 32

    def sessions(self, seed: int) -> list[Session]:
        rng = random.Random(f"chat {seed}")
        return [self._session(rng) for _ in range(self.n)]

    def _session(self, rng: random.Random) -> Session:
        stages: list[tuple[Ask, ...]] = []
        messages: list[Message] = []
        for turn in range(self.turns):
            if turn:
                messages.append(assistant(Reply(turn - 1, 0)))
            messages.append(user("Explain this: ", text.passage(rng, self._length(rng, self.input_tokens))))
            stages.append((Ask(tuple(messages), self._length(rng, self.output_tokens), "turn"),))
        return Session(tuple(stages))


class Document(Workload):
    """Long in, short out: one question about one document."""

    name = "document"
    n: Count = 3
    input_tokens: Count = 384
    output_tokens: Count = 12

    def sessions(self, seed: int) -> list[Session]:
        rng = random.Random(f"document {seed}")
        return [self._session(rng) for _ in range(self.n)]

    def _session(self, rng: random.Random) -> Session:
        document = text.passage(rng, self._length(rng, self.input_tokens))
        question = user(document, "\n\nSum the text up in one sentence.")
        return Session(((Ask((question,), self._length(rng, self.output_tokens), "question"),),))


class Agents(Workload):
    """Branching agents: each branch proposes, is reviewed, and improves; one score closes every round.

    All agents share one system prompt, and the branches of a session share its task.
    """

    name = "agents"
    n: Count = 2
    branches: Count = 2
    rounds: Count = 1
    shared_tokens: Count = 128
    task_tokens: Count = 32
    output_tokens: Count = 16
    load: Load = Load(concurrency=2)

    def sessions(self, seed: int) -> list[Session]:
        rng = random.Random(f"agents {seed}")
        rules = "You are one of several agents. The rules:\n" + text.passage(rng, self.shared_tokens)
        system = Message("system", (rules,))
        return [self._session(rng, system) for _ in range(self.n)]

    def _session(self, rng: random.Random, system: Message) -> Session:
        task = "The task:\n" + text.passage(rng, self._length(rng, self.task_tokens), "code") + "\n\n"
        threads = [[system, user(task, f"Propose change {b + 1}.")] for b in range(self.branches)]
        stages: list[tuple[Ask, ...]] = []

        def everyone(label: str) -> None:
            stages.append(tuple(Ask(tuple(t), self._length(rng, self.output_tokens), label) for t in threads))

        for number in range(self.rounds):
            everyone("propose")
            self._answer(threads, len(stages) - 1, "Review this proposal. Name its weakest point.")
            everyone("review")
            quoted = [piece for b in range(self.branches) for piece in (Reply(len(stages) - 2, b), "\n---\n")]
            scoring = (system, user(task, "Score these proposals:\n", *quoted))
            stages.append((Ask(scoring, self._length(rng, self.output_tokens), "score"),))
            if number + 1 < self.rounds:
                self._answer(threads, len(stages) - 2, "Improve the proposal.", Reply(len(stages) - 1, 0))
        return Session(tuple(stages))

    @staticmethod
    def _answer(threads: list[list[Message]], stage: int, *then: str | Reply) -> None:
        for branch, thread in enumerate(threads):
            thread += [assistant(Reply(stage, branch)), user(*then)]


class Mixed(Workload):
    """Chats, documents and agents in turn, in a random order."""

    name = "mixed"
    chat: Chat = Chat()
    document: Document = Document()
    agents: Agents = Agents()

    def sessions(self, seed: int) -> list[Session]:
        kinds: list[Workload] = [self.chat, self.document, self.agents]
        parts = [kinds[i % 3].model_copy(update={"n": 1}) for i in range(self.n)]
        sessions = [part.sessions(seed * self.n + i)[0] for i, part in enumerate(parts)]
        random.Random(f"mixed {seed}").shuffle(sessions)
        return sessions


class Trace(Workload):
    """A workload that is read from a file; a run takes `n` entries, each seed the next ones."""

    path: Path

    def _window(self, length: int, seed: int) -> list[int]:
        if length == 0:
            raise UsageError(f"{self.path} holds no request that {self.name} can use.")
        return [(seed * self.n + i) % length for i in range(self.n)]


class ShareGPT(Trace):
    """Conversations in ShareGPT's JSON; first message as the prompt, second one's length as the output's."""

    name = "sharegpt"

    def sessions(self, seed: int) -> list[Session]:
        pairs = traces.sharegpt(self.path)
        chosen = [pairs[i] for i in self._window(len(pairs), seed)]
        return [Session(((Ask((user(p.prompt),), p.output_tokens, "prompt"),),)) for p in chosen]


class Mooncake(Trace):
    """Mooncake's JSONL: times in milliseconds, and hash ids of 512-token pages that become shared prefixes.

    `scale` shrinks prompts and answers, `time_scale` stretches the time between arrivals.
    """

    name = "mooncake"
    scale: Positive = 1.0
    time_scale: Positive = 1.0
    load: Load = Load(process="trace")

    def sessions(self, seed: int) -> list[Session]:
        entries = traces.mooncake(self.path)
        chosen = [entries[i] for i in self._window(len(entries), seed)]
        start = chosen[0].at
        return [self._session(entry, max(0.0, entry.at - start)) for entry in chosen]

    def _session(self, entry: traces.MooncakeEntry, at: float) -> Session:
        page = max(1, round(traces.MOONCAKE_PAGE * self.scale))
        pages = [text.passage(random.Random(f"page {h}"), page) for h in entry.hash_ids]
        wanted = max(1, round(entry.input_tokens * self.scale)) * text.CHARS_PER_TOKEN
        ask = Ask((user("".join(pages)[:wanted]),), max(1, round(entry.output_tokens * self.scale)), "prompt")
        return Session(((ask,),), at=at * self.time_scale)


class Prompts(Trace):
    """JSONL of objects with a `prompt` or a list of `turns`, asked one after the other."""

    name = "prompts"
    output_tokens: Count = 64

    def sessions(self, seed: int) -> list[Session]:
        conversations = traces.prompts(self.path)
        return [self._session(conversations[i]) for i in self._window(len(conversations), seed)]

    def _session(self, turns: list[str]) -> Session:
        stages: list[tuple[Ask, ...]] = []
        messages: list[Message] = []
        for number, turn in enumerate(turns):
            if number:
                messages.append(assistant(Reply(number - 1, 0)))
            messages.append(user(turn))
            stages.append((Ask(tuple(messages), self.output_tokens, "turn"),))
        return Session(tuple(stages))


WORKLOADS: Mapping[str, type[Workload]] = {
    kind.name: kind for kind in (Chat, Document, Agents, Mixed, ShareGPT, Mooncake, Prompts)
}


def workload(name: str, options: Mapping[str, Any] | None = None) -> Workload:
    """The workload called `name`; UsageError for an unknown name or option, or a value that cannot be."""
    if name not in WORKLOADS:
        raise unknown("workload", name, WORKLOADS)
    kind = WORKLOADS[name]
    for option in options or {}:
        if option not in kind.model_fields:
            raise unknown(f"option of workload {name}", option, kind.model_fields)
    try:
        made = kind(**(options or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise UsageError(f"workload {name}: {where}: {first['msg'].lower()}.") from None
    if made.load.process == "trace" and not isinstance(made, Mooncake):
        raise UsageError(f"workload {name} has no times of its own: use another load.process than trace.")
    return made
