"""Conversations for prefix caches: each yields a prompt, is sent the answer's tokens, and goes on from there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.memory.blank import VOCAB
from core.engine import Engine
from core.types import Request, SamplingParams


@dataclass(frozen=True)
class Ask:
    """Prompts to be answered at the same time, each with so many tokens. A lower `priority` number matters more."""

    prompts: Sequence[Sequence[int]]
    n_tokens: int
    priority: int = 0


Session = Generator[Ask, list[list[int]], None]


def words(source: random.Random, n: int) -> list[int]:
    return source.choices(range(2, VOCAB), k=n)


def one_system_prompt(seed: int = 0, requests: int = 150) -> Iterator[Session]:
    """One instruction of 768 tokens before questions of 32 to 256; a fifth of the questions are asked again."""
    source = random.Random(seed)
    system = words(source, 768)
    asked: list[list[int]] = []

    def ask(question: list[int]) -> Session:
        yield Ask([system + question], 32)

    for _ in range(requests):
        again = asked and source.random() < 0.2
        asked.append(source.choice(asked) if again else words(source, source.randrange(32, 257)))
        yield ask(asked[-1])


def chat(seed: int = 1, conversations: int = 48, turns: int = 5) -> Iterator[Session]:
    """Conversations of five turns over one short instruction; every third is of low priority."""
    source = random.Random(seed)
    system = words(source, 64)

    def talk(number: int) -> Session:
        own = random.Random(seed * 1000 + number)
        history = [*system]
        for _ in range(turns):
            history += words(own, own.randrange(16, 129))
            (answer,) = yield Ask([history], own.randrange(16, 129), priority=number % 3 == 2)
            history += answer

    for number in range(conversations):
        yield talk(number)


def agents(seed: int = 2, tasks: int = 5, rounds: int = 3, branches: int = 8) -> Iterator[Session]:
    """Tasks of three rounds: eight branches propose from one context, each is reviewed and then scored, and the next
    round goes on from one of them."""
    source = random.Random(seed)
    system, review, score = words(source, 128), words(source, 48), words(source, 24)

    def work(number: int) -> Session:
        own = random.Random(seed * 1000 + number)
        context = system + words(own, 200)
        for _ in range(rounds):
            proposals = yield Ask([context] * branches, 64)
            reviewed = [context + proposal + review for proposal in proposals]
            reviews = yield Ask(reviewed, 48)
            scored = [prompt + answer + score for prompt, answer in zip(reviewed, reviews, strict=True)]
            yield Ask(scored, 4)
            context = context + own.choice(proposals)

    for number in range(tasks):
        yield work(number)


LOADS: dict[str, tuple[Callable[[], Iterator[Session]], int]] = {
    "one system prompt": (one_system_prompt, 12),
    "chat": (chat, 32),
    "agents": (agents, 4),
}
"""Each with how many sessions go on at once."""


def replay(path: Path, requests: int, block: int) -> Iterator[Session]:
    """A Mooncake trace (Qin et al., FAST 2025): blocks of 512 tokens with equal ids are equal prefixes. Each becomes
    `block` tokens, and lengths shrink alike."""

    def ask(line: dict) -> Session:
        tokens = [token for id in line["hash_ids"] for token in _block(id, block)]
        shrunk = max(1, line["input_length"] * block // 512)
        yield Ask([tokens[:shrunk]], max(1, line["output_length"] * block // 512))

    with path.open() as lines:
        for line in islice(lines, requests):
            yield ask(json.loads(line))


def _block(id: int, size: int) -> list[int]:
    return [2 + id % 60_000, 2 + id // 60_000, *[2] * size][:size]


def serve(engine: Engine, sessions: Iterable[Session], at_once: int) -> None:
    """Keep `at_once` sessions going, the longest silent first to speak again, until all have ended."""
    waiting = iter(sessions)
    live: dict[Session, tuple[list[list[int]], int]] = {}
    owners: dict[str, tuple[Session, int]] = {}
    count = 0

    def speak(session: Session, answers: list[list[int]] | None) -> None:
        nonlocal count
        try:
            ask = session.send(answers) if answers else next(session)
        except StopIteration:
            live.pop(session, None)
            begin()
            return
        live[session] = [[] for _ in ask.prompts], len(ask.prompts)
        for place, prompt in enumerate(ask.prompts):
            params = SamplingParams(temperature=0.0, max_tokens=ask.n_tokens)
            engine.add(Request(f"{count}", tuple(prompt), params, float(count), priority=ask.priority))
            owners[f"{count}"] = session, place
            count += 1

    def begin() -> None:
        session = next(waiting, None)
        if session is not None:
            speak(session, None)

    for _ in range(at_once):
        begin()
    while engine.has_work:
        for event in engine.step():
            session, place = owners[event.id]
            answers, open_ = live[session]
            answers[place] += event.tokens
            if event.finish_reason:
                assert event.error is None, event.error
                live[session] = answers, open_ - 1
                if open_ == 1:
                    speak(session, answers)
