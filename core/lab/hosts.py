"""What runs an arm while it is measured: our server in a process, or a server that somebody else runs."""

from __future__ import annotations

import collections
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from core.lab import children
from core.lab.errors import TargetError
from core.lab.targets import OpenAITarget, Target

START_S = 300.0
STOP_S = 10.0
_URL = re.compile(r"ready at (https?://\S+)")


class Host(Protocol):
    """A running arm. `pid`: the process whose memory is the arm's, None when it is not ours to look into."""

    target: Target
    pid: int | None

    def snapshot(self) -> Mapping[str, float]:
        """The engine's own counters and gauges: by name with label values summed, and by `name{value}`."""
        ...


class ExternalHost:
    """A server that is already there; nothing of it can be changed or looked into but its protocol."""

    def __init__(self, target: OpenAITarget) -> None:
        self.target: Target = target
        self.pid: int | None = None
        self._url = target.url

    def snapshot(self) -> Mapping[str, float]:
        return scrape(self._url)


class InProcessHost:
    """The engine in the load generator's process: it starts with each run and is gone with it. Its counters and its
    process come with the generator's lines."""

    def __init__(self, words: Sequence[str]) -> None:
        from core.lab.inprocess import EngineTarget  # torch and the model code, which no other host needs

        recipe = next((w.partition("=")[2] for w in words if w.startswith("recipe=")), "premium_chat")
        self.target: Target = EngineTarget(recipe, tuple(w for w in words if not w.startswith("recipe=")))
        self.pid: int | None = None

    def snapshot(self) -> Mapping[str, float]:
        return {}


class ServerHost:
    """`python -m core.serve WORDS` on a free port."""

    def __init__(self, url: str, pid: int, api: OpenAITarget) -> None:
        self.target: Target = api
        self.pid: int | None = pid
        self._url = url

    def snapshot(self) -> Mapping[str, float]:
        return scrape(self._url)


@contextmanager
def server(words: Sequence[str], command: Sequence[str] = ("-m", "core.serve")) -> Iterator[ServerHost]:
    """Starts a server for one arm and stops it again. TargetError says why it did not start.

    `command`: what Python is asked to run, before `words`.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = children.start([*command, *words], **pipes, text=True, errors="replace")
    output = _Output(process)
    try:
        url = output.url(START_S)
        if url is None:
            raise TargetError(f"the server of this arm did not start: {output.tail()}")
        yield ServerHost(url, process.pid, OpenAITarget(url))
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Output:
    """Reads a server's output so that it never blocks on a full pipe; keeps the last lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: collections.deque[str] = collections.deque(maxlen=40)
        self._url: str | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.append(line.strip())
            match = _URL.search(line)
            if match and not self._url:
                self._url = match[1].rstrip(".")
                self._known.set()
        self._known.set()

    def url(self, timeout_s: float) -> str | None:
        self._known.wait(timeout_s)
        return self._url

    def tail(self) -> str:
        if self._process.poll() is None and not self._known.is_set():
            return f"it was not ready after {START_S:.0f} s."
        said = [line for line in self._lines if line]
        return " ".join(said[-6:])[-600:] or "it said nothing."


def scrape(url: str) -> dict[str, float]:
    """`/metrics` of a server: by name, summed over labels, and by `name{label values}`; empty if there is none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
            text = response.read().decode()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
                if sample.labels:
                    totals[f"{sample.name}{{{','.join(sample.labels.values())}}}"] = sample.value
        return totals
    except (urllib.error.URLError, OSError, ValueError):
        return {}
