"""When sessions start: open loops, which never wait for answers, and the closed loop, which does."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Process = Literal["closed", "constant", "poisson", "gamma", "ramp", "trace"]


class Load(BaseModel):
    """How sessions arrive.

    `closed` keeps `concurrency` sessions running. The others are open loops of `rate` sessions a second:
    `constant` gaps, `poisson`, `gamma` with `burstiness` as its shape (1 is Poisson, below 1 comes in
    bursts), `ramp` (Poisson with a rate that grows linearly from `rate` to `rate_end`), and `trace` (the
    times that the workload's own trace gives).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: Process = "closed"
    concurrency: Count = 8
    rate: Positive = 1.0
    rate_end: Positive = 4.0
    burstiness: Positive = 1.0


def offsets(load: Load, n: int, seed: int) -> NDArray[np.float64]:
    """Seconds [n] from the run's start at which the sessions of an open loop are due, ascending.

    As in vLLM's `bench serve`, random gaps are rescaled so that n sessions take n/rate seconds; a ramp's
    are not.
    """
    rng = np.random.default_rng(seed)
    if load.process == "constant":
        return np.arange(1, n + 1) / load.rate
    if load.process == "ramp":
        rates = np.linspace(load.rate, load.rate_end, n)
        return np.cumsum(rng.exponential(1.0, n) / rates)
    shape = load.burstiness if load.process == "gamma" else 1.0
    due: NDArray[np.float64] = np.cumsum(rng.gamma(shape, 1.0 / (load.rate * shape), n))
    return due * float(n / load.rate / due[-1])
