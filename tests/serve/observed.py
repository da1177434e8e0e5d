"""Engines for a server whose metrics are looked at: one with a second observer, one whose figures cannot be had."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from core.build import build_engine
from core.engine import Engine
from core.hooks import hookimpl
from tests.serve.fake_engine import FakeEngine

TALLY = "PARTWISE_TEST_TALLY"
"""Names the variable that says which file the second observer writes."""


class Tally:
    """Writes every call of a hook as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def _note(self, hook: str, **values: Any) -> None:
        print(json.dumps({"hook": hook, **values}), file=self._file)

    @hookimpl
    def on_plugin_loaded(self, seam: str, name: str) -> None:
        self._note("loaded", seam=seam, name=name)

    @hookimpl
    def on_request_added(self, request: Any) -> None:
        self._note("added", prompt=len(request.prompt))

    @hookimpl
    def on_first_token(self, seconds: float) -> None:
        self._note("first", seconds=seconds)

    @hookimpl
    def on_request_finished(self, reason: str, tokens: int) -> None:
        self._note("finished", reason=reason, tokens=tokens)

    @hookimpl
    def on_step(self, stats: Mapping[str, Any]) -> None:
        self._note("step", batch=stats["batch_size"], tokens=stats["tokens"])

    @hookimpl
    def on_preempted(self, computed_tokens: int) -> None:
        self._note("preempted", lost=computed_tokens)

    @hookimpl
    def on_evicted(self, pages: int) -> None:
        self._note("evicted", pages=pages)


def build(recipe: Mapping[str, Any], observers: Iterable[object]) -> Engine:
    return build_engine(recipe, (*observers, Tally(Path(os.environ[TALLY]))))


class WrongSteps(FakeEngine):
    """Its steps tell nothing, so that an observer that counts them raises."""

    def __init__(self, recipe: Mapping[str, Any], observers: Iterable[object]) -> None:
        super().__init__(recipe, observers)
        call = self.observers.call
        self.observers.call = lambda hook, **given: call(  # type: ignore[method-assign]
            hook, **({"stats": {}} if hook == "on_step" else given)
        )


class NoFigures(FakeEngine):
    def stats(self) -> dict[str, Any]:
        raise RuntimeError("scripted: a part's books are broken")
