"""Hypothesis as the suites use it: the same examples on every machine, and no files left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

PHASES = [Phase.explicit, Phase.generate, Phase.shrink]


def suite_settings(examples: int = 30, steps: int = 40) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def run_machine(machine: Callable[[], RuleBasedStateMachine], examples: int = 30, steps: int = 40) -> None:
    """Drive a machine through many orders of its rules."""
    run_state_machine_as_test(
        cast(type[RuleBasedStateMachine], machine), settings=suite_settings(examples, steps), _min_steps=1
    )
