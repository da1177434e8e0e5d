"""Observers see what happens; one that fails is switched off and never stops serving."""

import logging

import pluggy
import pytest

from core.build import build_engine
from core.hooks import OBSERVER_GROUP, Observers, ObserverSpec, hookimpl
from core.testing.serving import BUSY, Served, drain, greedy, prompts, recipe_of

HOOKS = [name for name in vars(ObserverSpec) if name.startswith("on_")]


class Recorder:
    """Notes the arguments of every hook."""

    def __init__(self):
        self.seen = {name: [] for name in HOOKS}

    @hookimpl
    def on_plugin_loaded(self, seam, name, distribution, version):
        self.seen["on_plugin_loaded"].append((seam, name, distribution, version))

    @hookimpl
    def on_request_added(self, request):
        self.seen["on_request_added"].append(request.id)

    @hookimpl
    def on_first_token(self, id, index, seconds):
        self.seen["on_first_token"].append((id, index, seconds))

    @hookimpl
    def on_request_finished(self, id, index, reason, tokens, seconds):
        self.seen["on_request_finished"].append((id, reason, tokens, seconds))

    @hookimpl
    def on_step(self, stats):
        self.seen["on_step"].append(dict(stats))

    @hookimpl
    def on_preempted(self, id, index, computed_tokens):
        self.seen["on_preempted"].append((id, computed_tokens))

    @hookimpl
    def on_evicted(self, pages):
        self.seen["on_evicted"].append(pages)


class Thrower:
    """Raises in every hook, and counts."""

    calls = 0

    @hookimpl
    def on_step(self):
        self.calls += 1
        raise RuntimeError("the dashboard is down")

    @hookimpl
    def on_request_added(self, request):
        self.calls += 1
        raise RuntimeError("the dashboard is down")


@pytest.fixture
def engine():
    made = build_engine(recipe_of(BUSY, "plain", kv_tokens=100))
    yield made
    made.close()


def serve(engine):
    served = Served()
    for n, prompt in enumerate(prompts()):
        engine.add(greedy(f"p{n}", prompt))
    drain(engine, served)
    return served


def test_every_event_is_seen(engine):
    recorder = Recorder()
    engine.observers.register(recorder)
    served = serve(engine)
    seen = recorder.seen
    assert seen["on_request_added"] == [f"p{n}" for n in range(len(prompts()))]
    assert sorted(id for id, *_ in seen["on_first_token"]) == sorted(served.tokens)
    assert {id: n for id, _, n, _ in seen["on_request_finished"]} == {i: len(t) for i, t in served.tokens.items()}
    assert {id: reason for id, reason, *_ in seen["on_request_finished"]} == served.reasons
    assert len(seen["on_step"]) == engine.stats()["steps"] and seen["on_step"][0]["tokens"] > 0
    assert len(seen["on_preempted"]) == engine.stats()["preemptions"] > 0
    assert sum(seen["on_evicted"]) == engine.stats()["prefix_cache"]["evicted_pages"] > 0
    first, last = ({id: s for id, *_, s in seen[name]} for name in ("on_first_token", "on_request_finished"))
    assert all(0 <= first[id] <= last[id] for id in first)


def test_the_parts_are_told_to_a_named_observer(monkeypatch):
    class Point:
        name = "recorder"

        def load(self):
            return Recorder

    made = []
    register = Observers.register
    monkeypatch.setattr("core.build.entry_points", lambda group: [Point()] if group == OBSERVER_GROUP else [])
    monkeypatch.setattr(Observers, "register", lambda self, o, name=None: (made.append(o), register(self, o, name)))
    build_engine(recipe_of(BUSY, "plain").model_copy(update={"observers": ("recorder",)})).close()
    loaded = {seam: name for seam, name, distribution, _ in made[0].seen["on_plugin_loaded"] if distribution}
    assert loaded == BUSY


def test_an_observer_that_raises_is_logged_once_and_left_out(engine, caplog):
    thrower, recorder = Thrower(), Recorder()
    engine.observers.register(thrower, "dashboard")
    engine.observers.register(recorder)
    alone = build_engine(recipe_of(BUSY, "plain", kv_tokens=100))
    expected = serve(alone)
    alone.close()
    with caplog.at_level(logging.ERROR, "partwise"):
        found = serve(engine)
    assert found.tokens == expected.tokens and not found.errors
    assert thrower.calls == 1
    told = [record for record in caplog.records if "dashboard" in record.message]
    assert len(told) == 1 and "the dashboard is down" in told[0].exc_text
    assert len(recorder.seen["on_step"]) == engine.stats()["steps"], "the other observer must go on"


@pytest.mark.parametrize("hook", ["on_steps", "on_request"])
def test_a_hook_that_does_not_exist_is_an_error(hook):
    observer = type("Observer", (), {hook: hookimpl(lambda self: None)})()
    with pytest.raises(pluggy.PluginValidationError, match=hook):
        Observers().register(observer)


def test_an_argument_that_does_not_exist_is_an_error():
    class Observer:
        @hookimpl
        def on_step(self, statistics):
            return None

    with pytest.raises(pluggy.PluginValidationError, match="statistics"):
        Observers().register(Observer())


def test_every_hook_is_tested_here():
    assert set(HOOKS) == {name for name in vars(Recorder) if name.startswith("on_")}
