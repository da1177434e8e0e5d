"""The load generator: sends sessions when they are due and notes when their tokens arrive.

It runs as a process of its own (`python -m core.lab.generator`), so that nothing the engine or the study does
delays it. An open loop never waits for answers before it sends: a slow engine cannot thin out its own load
(coordinated omission). How late each request left is kept with it.

Over the pipes: a pickled `Job` comes in; JSON lines go out: `{"ready": true}` after the warm-up, then, once
the parent has written a line, `{"ended": n}` now and then, and at last one line with all records. When the engine
runs in this process, each line has its counters.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from core.lab.arrivals import Load, offsets
from core.lab.errors import LabError
from core.lab.metrics import RequestRecord
from core.lab.targets import Client, Piece, RequestFailed, Target, Usage
from core.lab.workloads import Ask, Reply, Session

PROGRESS_S = 0.25
NOT_ASKED = "not asked: an earlier answer of its session failed"
Note = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class Job:
    target: Target
    warmup: tuple[Session, ...]
    sessions: tuple[Session, ...]
    load: Load
    seed: int


class Line(msgspec.Struct):
    """One line from the generator to its parent."""

    ready: bool = False
    ended: int = 0
    counters: dict[str, float] = {}
    warmup_errors: list[str] = []
    failed: str = ""
    records: list[RequestRecord] | None = None


async def drive(client: Client, sessions: Sequence[Session], load: Load, seed: int, note: Note) -> None:
    """Runs all sessions and hands every finished request to `note`; times count from this call."""
    start = time.perf_counter()
    runs = [_SessionRun(client, number, session, start, note) for number, session in enumerate(sessions)]
    if load.process == "closed":
        waiting = iter(runs)
        await asyncio.gather(*(_one_after_another(waiting, start) for _ in range(load.concurrency)))
        return
    traced = load.process == "trace"
    due = [s.at or 0.0 for s in sessions] if traced else offsets(load, len(runs), seed).tolist()
    tasks = []
    for run, at in zip(runs, due, strict=True):
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(run.go(at)))
    await asyncio.gather(*tasks)


async def _one_after_another(waiting: Iterator[_SessionRun], start: float) -> None:
    for run in waiting:
        await run.go(time.perf_counter() - start)


class _SessionRun:
    """One session under way: keeps its answers, because later asks quote them."""

    def __init__(self, client: Client, number: int, session: Session, start: float, note: Note) -> None:
        self._client = client
        self._number = number
        self._session = session
        self._start = start
        self._note = note
        self._answers: dict[Reply, str] = {}

    async def go(self, due: float) -> None:
        for stage, asks in enumerate(self._session.stages):
            records = await asyncio.gather(*(self._ask(Reply(stage, i), a, due) for i, a in enumerate(asks)))
            due = self._now()
            if any(record.error for record in records):
                self._give_up(stage + 1, due)
                return

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _give_up(self, stage: int, at: float) -> None:
        """What quotes a failed answer cannot be asked, but it was wanted: it counts as an error."""
        for number, asks in enumerate(self._session.stages[stage:], start=stage):
            for ask in asks:
                self._note(RequestRecord(self._number, number, ask.label, at, at, at, error=NOT_ASKED))

    async def _ask(self, place: Reply, ask: Ask, due: float) -> RequestRecord:
        messages = [{"role": m.role, "content": "".join(map(self._text, m.pieces))} for m in ask.messages]
        times: list[float] = []
        parts: list[str] = []
        usage = None
        error = None
        sent = self._now()
        try:
            async for item in self._client.ask(messages, ask.max_tokens):
                if isinstance(item, Piece):
                    times.append(item.at - self._start)
                    parts.append(item.text)
                else:
                    usage = item
            if not times:
                error = "an empty answer"
        except RequestFailed as failure:
            error = str(failure)
        self._answers[place] = "".join(parts)
        usage = usage or Usage(0, len(times))
        record = RequestRecord(
            session=self._number,
            stage=place.stage,
            label=ask.label,
            due=due,
            sent=sent,
            ended=self._now(),
            token_times=tuple(times),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            error=error,
        )
        self._note(record)
        return record

    def _text(self, piece: str | Reply) -> str:
        return self._answers[piece] if isinstance(piece, Reply) else piece


def _say(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


async def _progress(client: Client, records: Sequence[RequestRecord]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        _say(Line(ended=len(records), counters=dict(client.counters())))


async def _run(job: Job) -> None:
    async with job.target.connect() as client:
        warm: list[RequestRecord] = []
        await drive(client, job.warmup, Load(), job.seed, warm.append)
        warmup_errors = [r.error for r in warm if r.error]
        _say(Line(ready=True, warmup_errors=warmup_errors, counters=dict(client.counters())))
        await asyncio.to_thread(sys.stdin.buffer.readline)
        gc.collect()
        gc.freeze()
        gc.disable()
        records: list[RequestRecord] = []
        ticker = asyncio.create_task(_progress(client, records))
        await drive(client, job.sessions, job.load, job.seed, records.append)
        ticker.cancel()
        _say(Line(ended=len(records), records=records, counters=dict(client.counters())))


def main() -> None:
    job = pickle.load(sys.stdin.buffer)
    try:
        asyncio.run(_run(job))
    except LabError as error:
        _say(Line(failed=str(error)))


if __name__ == "__main__":
    main()
