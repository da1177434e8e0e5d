"""Continuous batching: sequences join and leave at every step."""

from __future__ import annotations

from core.interfaces.scheduling import BatchingScheduler


class ContinuousScheduler(BatchingScheduler):
    """Admits in order of arrival and preempts the last one admitted.

    Iteration-level scheduling is Orca's (Yu et al., OSDI 2022).
    """
