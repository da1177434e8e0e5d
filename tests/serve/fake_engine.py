"""A scripted engine: a prompt may hold `[[{...}]]`, JSON that says what its request produces and what goes wrong.

`say`: the bytes to produce, then <eos> (`eos` false: over and over). `group`: tokens an event. `delay`: seconds a step.
`fault_at`: the request fails at that token. `break_at`: the engine itself raises. `block`: a step never ends, or as
many seconds. `compute`: a step computes for so many seconds. `exit`: the process ends. `logprob`: every logprob.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from core.hooks import Observers
from core.types import Event, InvalidRequest, QueueFull, Request, TokenLogprob
from tests.serve.tiny_tokenizers import EOS

PAGE = 16
VOCAB = 258


@dataclass(frozen=True)
class Limits:
    max_model_len: int


class Choice:
    def __init__(self, request: Request, index: int, script: Mapping[str, Any], max_total: int) -> None:
        self.request, self.index, self.script, self.max_total = request, index, script, max_total
        self.say = list(str(script.get("say", "hello world. ")).encode())
        self.tokens: list[int] = []

    def next_token(self) -> int:
        place = len(self.tokens)
        if place < len(self.say) or not self.script.get("eos", "say" in self.script):
            return self.say[place % len(self.say)]
        return EOS

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.tokens)


class FakeEngine:
    def __init__(self, recipe: Mapping[str, Any], observers: Iterable[object]) -> None:
        self.limits = Limits(recipe["engine"]["max_model_len"] or 256)
        self.parts: dict[str, str] = {}
        self.observers = Observers()
        for observer in observers:
            self.observers.register(observer)
        self.max_waiting = recipe["engine"]["max_waiting"]
        self.max_running = recipe["model"].get("max_running", 16)
        self.n_pages = 4096
        self.waiting: list[Choice] = []
        self.running: list[Choice] = []
        self.events: list[Event] = []

    def add(self, request: Request) -> None:
        text = bytes(token for token in request.prompt if token < 256).decode("utf-8", "replace")
        script = json.loads(found[1]) if (found := re.search(r"\[\[(.*?)\]\]", text, re.DOTALL)) else {}
        if script.get("add_raises"):
            raise RuntimeError("scripted")
        room = self.limits.max_model_len - len(request.prompt)
        if (room < 1 and request.params.max_tokens != 0) or room < 0:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt)} tokens and the limit is {self.limits.max_model_len}", "prompt"
            )
        if len(self.waiting) >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} requests are waiting already; try again later")
        asked = request.params.max_tokens
        max_total = len(request.prompt) + (room if asked is None else min(asked, room))
        self.waiting += [Choice(request, index, script, max_total) for index in range(request.params.n)]
        self.observers.call("on_request_added", request=request)

    def abort(self, id: str, index: int | None = None) -> None:
        for queue in (self.waiting, self.running):
            for choice in [c for c in queue if c.request.id == id and index in (None, c.index)]:
                queue.remove(choice)
                self.events.append(Event(id, choice.index, finish_reason="abort"))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.events)

    def step(self) -> list[Event]:
        room = self.max_running - len(self.running)
        self.running += self.waiting[:room]
        del self.waiting[:room]
        if self.running:
            time.sleep(max(choice.script.get("delay", 0.002) for choice in self.running))
            batch = [self._advance(choice) for choice in list(self.running)]
            generated = sum(len(event.tokens) for event in batch)
            stats = {"batch_size": len(batch), "tokens": len(batch), "generated": generated}
            self.observers.call("on_step", stats=stats)
            self.events += batch
        events, self.events = self.events, []
        return events

    def _advance(self, choice: Choice) -> Event:
        self._mishap(choice)
        if len(choice.tokens) >= choice.script.get("fault_at", 1 << 30):
            self.running.remove(choice)
            return Event(choice.request.id, choice.index, finish_reason="error", error="scripted fault")
        tokens: list[int] = []
        reason, stop = ("length" if choice.num_tokens >= choice.max_total else None), None
        while reason is None and len(tokens) < choice.script.get("group", 1):
            token = choice.next_token()
            tokens.append(token)
            choice.tokens.append(token)
            reason, stop = self._ending(choice, token)
        if reason is not None:
            self.running.remove(choice)
        return self._event(choice, tokens, reason, stop)

    def _mishap(self, choice: Choice) -> None:
        script = choice.script
        if len(choice.tokens) >= script.get("break_at", 1 << 30):
            raise RuntimeError("scripted break")
        if "exit" in script and len(choice.tokens) >= 2:
            os._exit(script["exit"])
        if "compute" in script and len(choice.tokens) == 2:
            end = time.monotonic() + script["compute"]
            while time.monotonic() < end:
                sum(range(1000))
        if "block" in script and len(choice.tokens) == 2:
            time.sleep(3600 if script["block"] is True else script["block"])

    def _ending(self, choice: Choice, token: int) -> tuple[Any, int | None]:
        params = choice.request.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        if token in stops and len(choice.tokens) > params.min_tokens:
            return "stop", token
        return ("length" if choice.num_tokens >= choice.max_total else None), None

    def _event(self, choice: Choice, tokens: list[int], reason: Any, stop: int | None) -> Event:
        params, value = choice.request.params, float(choice.script.get("logprob", -0.5))
        first = len(choice.tokens) == len(tokens) and choice.index == 0

        def record(token: int, n_top: int) -> TokenLogprob:
            top = tuple((other, value - place) for place, other in enumerate(range(token, token + n_top)))
            return TokenLogprob(token, value, tuple((other % VOCAB, logprob) for other, logprob in top))

        logprobs = () if params.logprobs is None else tuple(record(token, params.logprobs) for token in tokens)
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = (None, *(record(token, params.prompt_logprobs) for token in choice.request.prompt[1:]))
        cached = choice.script.get("cached", 0)
        return Event(
            choice.request.id, choice.index, tuple(tokens), logprobs, prompt_logprobs, cached, reason, stop
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        held = sum(-(-choice.num_tokens // PAGE) for choice in self.running)
        pages = {"pages": self.n_pages, "free": self.n_pages - held, "held": held, "cached": 0}
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "drafted": [3, 2],
            "accepted": [2, 0],
            "kv": {"full": {**pages, "total_bytes": 4096, "used_bytes": held, "reserved_bytes": 0}},
            "prefix_cache": {"lookup_tokens": 0, "hit_tokens": 0},
            "seconds": {"scheduler": 0.0},
        }

    def close(self) -> None:
        pass


def build(recipe: Mapping[str, Any], observers: Iterable[object]) -> FakeEngine:
    if recipe["model"].get("refuse"):
        raise InvalidRequest("this recipe cannot work: scripted")
    return FakeEngine(recipe, observers)
