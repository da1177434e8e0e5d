"""A part that goes wrong while serving ends the requests concerned with an error that names it, and nothing else."""

from pathlib import Path

import pytest

from core.registry import Registry
from tests.engine.toy import ToyModel, drain, outputs, request, toy_engine
from tests.testing import faulty_parts
from tests.testing.faulty_parts import FAULTS, VICTIM, VICTIM_LENGTH

FILE = Path(faulty_parts.__file__)
SLOT = {"drafter": "drafter", "scheduler": "scheduler", "kv_allocator": "allocator", "prefix_cache": "cache",
        "attention.kernel": "kernel"}  # fmt: skip
CASES = [
    pytest.param(seam, part.__name__, id=f"{seam}-{part.__name__}")
    for seam, (_, base) in FAULTS.items()
    for part in base.__subclasses__()
]
SURVIVED_BY_ALL = {"PlansTheUnknown"}
"""Nobody is concerned: the sequence does not exist."""
FATAL_TO_ALL = {"PlansNoPlan", "PlansWords", "PlanningRaises", "PreemptsAStranger"}
"""Every request is concerned where nothing at all was planned."""


def build(seam=None, part=None):
    words = {SLOT[seam]: part} if seam else {}
    return toy_engine(ToyModel(), plugin_path=str(FILE), page_size=4, **words)


def neighbours():
    return [request([7, 8, 9, 10, 11, 12], id="n0"), request([3] * 9, id="n1"), request([20, 21], id="n2")]


def victim():
    return request([VICTIM, *range(1, VICTIM_LENGTH)], id="victim")


def serve(engine, requests, check=True):
    for item in requests:
        engine.add(item)
    events = drain(engine, check=check)
    errors = {event.id: event.error for event in events if event.finish_reason == "error"}
    return outputs(events), errors


@pytest.fixture(scope="module")
def alone():
    return serve(build(), neighbours())[0]


@pytest.mark.parametrize("seam", FAULTS)
def test_the_quiet_ones_are_right(seam, alone):
    found, errors = serve(build(seam, FAULTS[seam][1].__name__), [*neighbours(), victim()])
    assert not errors
    assert {key: found[key] for key in alone} == alone


@pytest.mark.parametrize(("seam", "part"), CASES)
def test_only_the_requests_concerned_end(seam, part, alone):
    engine = build(seam, part)
    serve(engine, neighbours())
    found, errors = serve(engine, [victim(), *neighbours()], check=False)
    if part in SURVIVED_BY_ALL:
        assert not errors
    elif part in FATAL_TO_ALL:
        assert "victim" in errors
    else:
        assert errors.keys() == {"victim"}
    for message in errors.values():
        assert ("not finite" in message) == part.startswith("KernelGives")
        assert f"{seam} '{part}' of" in message and FILE.name in message, message
    if part not in FATAL_TO_ALL:
        assert {key: found[key] for key in alone} == alone
    again, errors = serve(engine, neighbours(), check=False)
    assert not errors and again == alone, "the engine does not serve as before"


@pytest.mark.parametrize(("seam", "part"), [case for case in CASES if case.values[0] != "kv_allocator"])
def test_no_page_is_lost(seam, part):
    engine = build(seam, part)
    serve(engine, [victim(), *neighbours()])
    engine.check()
    for group in engine.stats()["kv"].values():
        assert group["free"] + group["cached"] == group["pages"]


def test_the_file_is_found_without_an_entry_point():
    registry = Registry(FILE)
    assert "PlansTwice" in registry.names("scheduler")
    assert registry.find("scheduler", "PlansTwice").distribution == str(FILE)
    assert "PlansTwice" not in Registry().names("scheduler")
