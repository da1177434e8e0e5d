from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.harness import Running, serving


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    """One healthy server for all tests that leave it healthy."""
    with serving() as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The healthy server, checked to be healthy and empty after the test."""
    yield shared
    shared.canary()
