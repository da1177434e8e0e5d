from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serve.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")
