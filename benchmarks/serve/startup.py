"""How long from the start of the process to a ready server, with the model cached, and what it then holds at most.

python benchmarks/serve/startup.py [--starts 5] [words of the server's command line]
python benchmarks/serve/startup.py --recipes baseline premium_chat async_agents cpu_fast
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

LIMIT_SECONDS = 8.0
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 16, 512, 64


@contextmanager
def server(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """A server, its URL, and the seconds from before its process existed until the ready line. Ended afterwards."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "core.serve", "server.port=0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = next((m for line in process.stdout if (m := re.search(r"ready at (http\S+)", line))), None)
        if found is None:
            raise SystemExit("the server did not start")
        yield process, found[1], time.perf_counter() - started
    finally:
        process.terminate()
        process.wait(30)


def start_times(words: list[str], starts: int) -> list[float]:
    """Seconds to ready of several starts, after one that fills the caches."""
    seconds = []
    for _ in range(starts + 1):
        with server(words) as (_, _, ready):
            seconds.append(ready)
    return seconds[1:]


def peak_bytes(words: list[str]) -> int:
    """The most that was resident of the server's processes, added up, once it has served the requests at once."""
    with server(words) as (process, url, _):
        asyncio.run(_serve(url))
        whole = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        return sum(_high_water(one.pid) for one in whole)


async def _serve(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        await asyncio.gather(*(_ask(http, model, number) for number in range(REQUESTS)))


async def _ask(http: httpx.AsyncClient, model: str, number: int) -> None:
    prompt = random.Random(number).choices(range(100, 10_000), k=PROMPT_TOKENS)
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    used = answer.json()["usage"]
    if (used["prompt_tokens"], used["completion_tokens"]) != (PROMPT_TOKENS, NEW_TOKENS):
        raise SystemExit(f"asked for {PROMPT_TOKENS} and {NEW_TOKENS} tokens, used {used}")


def _high_water(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measure(recipes: list[list[str]], starts: int) -> tuple[Table, bool]:
    """A row for each list of words; whether all were ready in time."""
    table = Table("server", "ready after, s", "from", "to", "peak resident, MB")
    in_time = True
    for words in recipes:
        seconds = start_times(words, starts)
        median = statistics.median(seconds)
        in_time &= median < LIMIT_SECONDS
        peak = f"{peak_bytes(words) / 1e6:.0f}"
        table.add_row(" ".join(words), *(f"{s:.2f}" for s in (median, min(seconds), max(seconds))), peak)
    return table, in_time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="a row for each of these recipes")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    rows = [[f"recipe={name}"] for name in options.recipes] if options.recipes else [options.words]
    table, in_time = measure(rows, options.starts)
    Console().print(table)
    return 0 if in_time else 1


if __name__ == "__main__":
    sys.exit(main())
