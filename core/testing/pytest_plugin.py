"""The pytest side of the conformance suites: a table after the run, and `--partwise-report FILE` for JSON.

pytest loads this module in every run of every project that has partwise installed: it imports nothing until a
conformance check has run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from core.testing.suite import Outcome

PROPERTY = "partwise"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("partwise", "conformance suites of Partwise parts")
    group.addoption("--partwise-report", metavar="FILE", help="write the outcome of every conformance check as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ConformanceReport(config), "partwise-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note on each conformance check which part it is of, so that its report says so in any process."""
    for item in items:
        cls = getattr(item, "cls", None)
        if cls is not None and any(base.__module__ == "core.testing.suite" for base in cls.__mro__):
            item.user_properties.append((PROPERTY, (cls.seam, cls.part, item.name)))


class ConformanceReport:
    """Collects the outcomes of conformance checks in one run."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = config.getoption("partwise_report", None)
        self.outcomes: list[Outcome] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(PROPERTY)
        if isinstance(found, (list, tuple)) and (report.when == "call" or not report.passed):
            self.outcomes.append(_outcome(report, *found))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.outcomes:
            return
        from core.testing.report import as_json, as_text, overview

        terminalreporter.write_line("")
        terminalreporter.write(as_text(overview(self.outcomes)))
        if self.path:
            Path(self.path).write_text(json.dumps(as_json(self.outcomes), indent=1) + "\n")


def _outcome(report: pytest.TestReport, seam: str, part: str, check: str) -> Outcome:
    from core.testing.suite import Outcome, level_of

    detail = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        detail = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        detail = crash.message if crash else report.longreprtext
        detail = detail.removeprefix("AssertionError: ").split("\nassert ")[0]
    return Outcome(seam, part, check, level_of(check), report.outcome, detail, report.duration)
