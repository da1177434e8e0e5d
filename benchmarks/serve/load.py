"""Many callers at once, a third of whom leave early: no page lost, no request stuck, no error.

python benchmarks/serve/load.py                                    # starts a server, 64 callers for 60 s
python benchmarks/serve/load.py --url http://127.0.0.1:8000        # one that runs already
python benchmarks/serve/load.py --seconds 10 recipe=async_agents   # words of the server's command line
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

WORDS = ("time", "people", "way", "water", "day", "part", "number", "sound", "place", "year", "land", "home", "light")
PATIENCE = 120.0


@dataclass
class Tally:
    """What the callers saw. `ends` counts answers by how they ended; `gaps` are seconds between chunks."""

    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Caller:
    """Asks one thing after another until `deadline`. One that `leaves` closes its connections early."""

    def __init__(self, http: httpx.AsyncClient, model: str, number: int, deadline: float, tally: Tally) -> None:
        self._http, self._model, self._tally = http, model, tally
        self._random = random.Random(number)
        self._leaves = number % 3 == 0
        self._deadline = deadline

    async def run(self) -> None:
        while time.monotonic() < self._deadline:
            ask = self._stream if self._random.random() < 0.7 else self._whole
            try:
                await asyncio.wait_for(ask(), PATIENCE)
            except TimeoutError:
                self._tally.errors.append(f"no answer within {PATIENCE:g} s")
            except httpx.HTTPError as error:
                self._tally.errors.append(f"{type(error).__name__}: {error}")

    def _body(self, **fields: Any) -> dict[str, Any]:
        words = " ".join(self._random.choices(WORDS, k=self._random.choice((3, 10, 30, 60))))
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self._random.choice((4, 16, 48)),
            "temperature": self._random.choice((0.0, 0.8)),
            "n": self._random.choice((1, 1, 1, 2)),
            **fields,
        }

    async def _whole(self) -> None:
        call = self._http.post("/v1/chat/completions", json=self._body())
        if self._leaves:
            try:
                answer = await asyncio.wait_for(call, self._random.uniform(0.01, 0.5))
            except TimeoutError:
                self._tally.ends["left"] += 1
                return
        else:
            answer = await call
        if answer.status_code == 200:
            self._tally.ends["whole"] += 1
            self._tally.tokens += answer.json()["usage"]["completion_tokens"]
        else:
            self._refused(answer.status_code, answer.text)

    async def _stream(self) -> None:
        started = last = time.monotonic()
        chunks_wanted = self._random.randint(1, 6) if self._leaves else None
        body = self._body(stream=True, stream_options={"include_usage": True})
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                self._refused(response.status_code, (await response.aread()).decode())
                return
            count = 0
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self._tally.ends["stream"] += 1
                    return
                if not line:
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self._tally.errors.append(chunk["error"]["message"])
                    return
                self._tally.tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    now = time.monotonic()
                    (self._tally.gaps if count else self._tally.ttft).append(now - (last if count else started))
                    last, count = now, count + 1
                if count == chunks_wanted:
                    self._tally.ends["left"] += 1
                    return
        self._tally.errors.append("a stream ended without [DONE]")

    def _refused(self, status: int, text: str) -> None:
        if status == 429:
            self._tally.ends["429"] += 1
        else:
            self._tally.errors.append(f"{status}: {text[:200]}")


async def load(url: str, clients: int, seconds: float) -> tuple[Tally, list[str]]:
    """What `clients` callers saw in `seconds`, and what is wrong with the server afterwards."""
    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http:
        before = await _samples(http)
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(Caller(http, model, number, deadline, tally).run() for number in range(clients)))
        problems = await _problems(http, before)
    return tally, tally.errors[:5] + problems


async def _samples(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


async def _problems(http: httpx.AsyncClient, before: dict[tuple[str, ...], float]) -> list[str]:
    """Whether anything still runs, waits or holds pages some seconds after the last caller has gone."""
    problems: list[str] = []
    for _ in range(50):
        now = await _samples(http)
        problems = [f"{key[0]} is {now[key]:g}" for key in _QUEUES if now[key]]
        problems += [f"{'/'.join(key)} is {value:g}" for key, value in now.items() if key[2:] == ("held",) and value]
        if not problems:
            break
        await asyncio.sleep(0.1)
    for key, value in now.items():
        if key[0] == "partwise_kv_pages" and key[2] == "free":
            cached = now[(key[0], key[1], "cached")]
            whole = sum(before[(key[0], key[1], state)] for state in ("free", "held", "cached"))
            if value + cached != whole:
                problems.append(f"group {key[1]}: {value:g} free and {cached:g} cached pages of {whole:g}")
    if (await http.get("/health")).status_code != 200:
        problems.append("the server is not healthy")
    return problems


_QUEUES = (("partwise_requests_running",), ("partwise_requests_waiting",))


@contextmanager
def server(words: list[str]) -> Iterator[str]:
    """A server started with these words, ended afterwards; its URL."""
    command = [sys.executable, "-m", "core.serve", "server.port=0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"ready at (http\S+)", line):
                yield found[1]
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        if process.wait(30):
            print(f"the server ended with code {process.returncode}", file=sys.stderr)


def report(tally: Tally, seconds: float) -> Table:
    table = Table("figure", "value", title="load")
    for end, count in sorted(tally.ends.items()):
        table.add_row(f"requests: {end}", str(count))
    table.add_row("errors", str(len(tally.errors)))
    table.add_row("tokens a second", f"{tally.tokens / seconds:.1f}")
    for name, values in (("TTFT", sorted(tally.ttft)), ("gap between chunks", sorted(tally.gaps))):
        for share in (0.5, 0.99):
            if values:
                table.add_row(f"{name}, p{share * 100:g}", f"{1000 * values[int(share * (len(values) - 1))]:.0f} ms")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("words", nargs="*", help="words of the server's command line")
    options = parser.parse_args()
    if options.url:
        tally, problems = asyncio.run(load(options.url, options.clients, options.seconds))
    else:
        with server(options.words) as url:
            tally, problems = asyncio.run(load(url, options.clients, options.seconds))
    Console().print(report(tally, options.seconds))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
