"""What an observer may watch. Observers are pluggy plugins: they see what happens and change nothing.

An observer is found by an entry point in the group `partwise.observers` and named in a recipe's `observers`; or it is
handed to `Observers.register`. Hooks run between steps, never for every token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import pluggy

from core.types import FinishReason, Request

OBSERVER_GROUP: Final = "partwise.observers"

hookspec = pluggy.HookspecMarker("partwise")
hookimpl = pluggy.HookimplMarker("partwise")

log = logging.getLogger("partwise")


class ObserverSpec:
    """The hooks. An implementation takes those arguments it wants, by name. Times are in seconds."""

    @hookspec
    def on_plugin_loaded(self, seam: str, name: str, distribution: str, version: str) -> None:
        """A part that the recipe names was built."""

    @hookspec
    def on_request_added(self, request: Request) -> None:
        """A request joined the queue."""

    @hookspec
    def on_first_token(self, id: str, index: int, seconds: float) -> None:
        """A choice got its first token, `seconds` after the request's arrival."""

    @hookspec
    def on_request_finished(self, id: str, index: int, reason: FinishReason, tokens: int, seconds: float) -> None:
        """A choice ended with so many tokens, `seconds` after the request's arrival."""

    @hookspec
    def on_step(self, stats: Mapping[str, Any]) -> None:
        """A step is done; `stats` are its batch_size, the tokens computed and generated, and the sequences running and
        waiting after it."""

    @hookspec
    def on_preempted(self, id: str, index: int, computed_tokens: int) -> None:
        """A running sequence lost its pages; `computed_tokens` are to be computed again."""

    @hookspec
    def on_evicted(self, pages: int) -> None:
        """The prefix cache gave up so many pages."""


class Observers:
    """Calls observers. One that raises is logged once and left out from then on."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("partwise")
        self._manager.add_hookspecs(ObserverSpec)

    def register(self, observer: object, name: str | None = None) -> None:
        """Add an observer. Raises pluggy's PluginValidationError for a hook or an argument that does not exist."""
        registered = self._manager.register(observer, name)
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError:
            self._manager.unregister(name=registered)
            raise

    def call(self, hook: str, **arguments: Any) -> None:
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            try:
                implementation.function(**{name: arguments[name] for name in implementation.argnames})
            except Exception:
                name = implementation.plugin_name
                log.exception("observer %s raised in %s and is switched off", name, hook)
                self._manager.unregister(implementation.plugin)
