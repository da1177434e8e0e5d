"""Options of the memory benchmarks, and where their tables go."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory.results import Results

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser):
    group = parser.getgroup("memory benchmarks")
    group.addoption("--record", action="store_true", help="write the tables to benchmarks/memory/RESULTS.md as well")
    group.addoption("--data", default=str(ROOT / "../shared/data"), help="folder of the trace and the text")


@pytest.fixture
def results(request):
    """Prints a table; with --record, it becomes a section of RESULTS.md."""
    return Results(request.path.relative_to(ROOT), record=request.config.getoption("--record"))


@pytest.fixture(scope="session")
def data_file(request):
    """The path of a file of the data folder; the test is skipped where there is none."""

    def find(name: str) -> Path:
        path = Path(request.config.getoption("--data")) / name
        if not path.exists():
            pytest.skip(f"needs {name}; give the folder that it is in with --data")
        return path

    return find
