"""One arm from the words of a command line, or several: measured, shown, and kept in one ledger."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from core.bench.tables import comparisons, details
from core.lab import environment, recipes, words
from core.lab.errors import TargetError, UsageError, unknown
from core.lab.hosts import ExternalHost, Host, InProcessHost, server
from core.lab.ledger import Failure, Header, Impossible, Ledger, Trial
from core.lab.targets import OpenAITarget
from core.lab.trial import Outcome, describe_errors, run_trial
from core.lab.words import Words
from core.lab.workloads import Workload, workload

KNOWN = (
    "workload", "path", "load", "goodput", "target", "warmup", "seed", "repeat", "again", "price", "gpu", "output",
)  # fmt: skip
NOT_THE_ARM = ("output", "again", "repeat", "price", "gpu")
TARGET_OPTIONS = ("model", "api", "api_key", "ignore_eos", "timeout_s")


@dataclass(frozen=True, slots=True)
class Job:
    """One arm of a sweep, checked. `identity` tells whether it has been run before."""

    name: str
    words: Words
    workload: Workload
    identity: list[str]

    @property
    def url(self) -> str:
        """Of a server that is already running; empty when the arm is ours to start."""
        return "" if self.in_process else str(self.words.lab.get("target", ""))

    @property
    def in_process(self) -> bool:
        return self.words.lab.get("target") == "engine"


def run(given: Sequence[Sequence[str]], console: Console) -> int:
    """Measures each of `given` (the words of one arm) and shows them; the exit code.

    What was measured is in the ledger even when LabError ends the sweep.
    """
    jobs = _jobs(given)
    first = jobs[0].words
    folder = words.output(first, "bench")
    repeat = words.whole(first, "repeat", 1)
    with Ledger(folder / "ledger.jsonl") as ledger:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        ledger.append(Header({"bench": [job.identity for job in jobs]}, environment.describe(), now))
        start = _first_block(jobs, ledger) if words.yes(first, "again") else 0
        bad = 0
        for block in range(start, start + repeat):
            for position, job in enumerate(random.Random(block).sample(jobs, len(jobs)) if repeat > 1 else jobs):
                bad = max(bad, _run(job, block, position, ledger, console))
        if not _show(jobs, ledger, first, console):
            return bad or UsageError.exit_code
    console.print(f"Kept in {folder}", markup=False, soft_wrap=True)
    return bad


def _jobs(given: Sequence[Sequence[str]]) -> list[Job]:
    found = [words.split(each, KNOWN) for each in given]
    common = set.intersection(*(set(each) for each in given))
    jobs = []
    for each, parsed in zip(given, found, strict=True):
        loads = words.workloads(parsed, "chat")
        if len(loads) != 1:
            raise UsageError(f"bench runs one workload at a time, not {', '.join(loads)}: sweep over them with -m.")
        name, options = next(iter(loads.items()))
        _check_target(parsed)
        words.targets(parsed)
        words.price(parsed)
        varied = [w for w in each if w not in common and not w.startswith("workload")]
        url = parsed.lab.get("target", "engine")
        label = " ".join(varied) or (parsed.recipe_name if url == "engine" else str(url))
        identity = sorted(w for w in each if w.partition("=")[0] not in NOT_THE_ARM)
        made = workload(name, options)
        made.sessions(0)
        jobs.append(Job(label, parsed, made, identity))
    return jobs


def _check_target(parsed: Words) -> None:
    url = parsed.lab.get("target")
    options = parsed.lab.get("target.", {})
    for option in options:
        if option not in TARGET_OPTIONS:
            raise unknown("option of target", option, TARGET_OPTIONS)
    if url in (None, "engine"):
        return
    if not str(url).startswith(("http://", "https://")):
        raise UsageError(f"target is a server's URL, such as http://127.0.0.1:8000, or engine, not {url!r}.")
    if parsed.recipe:
        raise UsageError(f"{parsed.recipe[0]} changes nothing on a running server: leave out target or it.")


def _first_block(jobs: Sequence[Job], ledger: Ledger) -> int:
    mine = [job.identity for job in jobs]
    return 1 + max((t.block for t in ledger.trials if t.words in mine), default=-1)


def _run(job: Job, block: int, position: int, ledger: Ledger, console: Console) -> int:
    """Runs one arm unless it is done; 0, or the exit code of what went wrong."""
    if any(t.words == job.identity and t.block == block for t in ledger.trials):
        done = f"{job.name} on {job.workload.name}: done before; again=true runs it again"
        console.print(done, markup=False, soft_wrap=True)
        return 0
    if not job.url:
        recipes.compose(job.words.recipe)
        if reasons := recipes.reasons(job.words.recipe):
            ledger.append(Impossible(job.name, job.identity, reasons))
            console.print(f"{job.name} cannot work: {'; '.join(reasons)}", style="yellow", markup=False, soft_wrap=True)
            return 0
    began = datetime.now(UTC)
    try:
        with _host(job) as host:
            started = (datetime.now(UTC) - began).total_seconds()
            outcome = _measure(job, host, block, console)
    except TargetError as error:
        seconds = (datetime.now(UTC) - began).total_seconds()
        ledger.append(Failure(job.name, job.identity, block, str(error), seconds))
        said = str(error) if job.url else f"{job.name}: {error}"
        console.print(said, style="red", markup=False, soft_wrap=True)
        return error.exit_code
    ledger.append(
        Trial(
            arm=job.name,
            words=job.identity,
            workload=job.workload.name,
            block=block,
            position=position,
            at=began.isoformat(timespec="seconds"),
            seconds=outcome.seconds,
            start_s=started,
            summary=outcome.summary,
        )
    )
    _keep_requests(ledger.path.parent / "requests.jsonl", job, block, outcome)
    if errors := describe_errors(outcome.summary):
        console.print(f"{job.name}: {errors}", style="red", markup=False, soft_wrap=True)
        return TargetError.exit_code
    return 0


@contextmanager
def _host(job: Job) -> Iterator[Host]:
    if job.in_process:
        yield InProcessHost(job.words.recipe)
        return
    if not job.url:
        with server([*job.words.recipe, "server.port=0"]) as host:
            yield host
        return
    options: dict[str, Any] = job.words.lab.get("target.", {})
    yield ExternalHost(OpenAITarget(job.url.rstrip("/").removesuffix("/v1"), **options))


def _measure(job: Job, host: Host, block: int, console: Console) -> Outcome:
    seed = words.whole(job.words, "seed", 0, least=0) + block
    total = sum(session.requests for session in job.workload.sessions(seed))
    with console.status(f"{job.name} on {job.workload.name}") as status:
        return run_trial(
            host,
            job.workload,
            seed,
            words.targets(job.words),
            warmup=words.whole(job.words, "warmup", 1, least=0),
            progress=lambda n: status.update(f"{job.name} on {job.workload.name}: {n} of {total} requests"),
        )


def _keep_requests(path: Path, job: Job, block: int, outcome: Outcome) -> None:
    """One line a request: what was seen of it, in seconds since the run began, and its latencies."""
    with path.open("ab") as file:
        for record in outcome.records:
            row = {"arm": job.name, "workload": job.workload.name, "block": block, "request": record}
            row |= record.latencies()
            file.write(msgspec.json.encode(row) + b"\n")


def _show(jobs: Sequence[Job], ledger: Ledger, first: Words, console: Console) -> bool:
    """Prints what was measured, now or before; False when nothing was."""
    mine = [job.identity for job in jobs]
    trials = [t for t in ledger.trials if t.words in mine]
    if trials:
        price = words.price(first)
        for table in [details(trials[0], price)] if len(trials) == 1 else comparisons(trials, price):
            console.print(table)
    return bool(trials)
