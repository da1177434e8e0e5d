"""The pytest side of the conformance suites: a table after the run, and `--partwise-report FILE` for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("partwise", "conformance suites of Partwise parts")
    group.addoption("--partwise-report", metavar="FILE", help="write the outcome of every conformance check as JSON")
