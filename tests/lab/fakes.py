"""Simulated arms: what they measure is known, so a study can be run in moments.

`python -m tests.lab.fakes FOLDER [SECONDS]` runs one study of them; each run takes SECONDS, time enough to be killed.
"""

from __future__ import annotations

import math
import sys
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from core.lab import designs, plan, report
from core.lab.designs import Switch
from core.lab.errors import TargetError
from core.lab.ledger import Header, Ledger
from core.lab.metrics import Summary
from core.lab.plan import StudyPlan
from core.lab.study import Study
from core.lab.trial import Outcome

GAINS = {"int8": 1.4, "paged": 1.0, "continuous": 2.0, "radix": 1.2}


class Host:
    target = None
    pid = None

    def __init__(self, arm):
        self.arm = arm

    def snapshot(self):
        return {}


class FakeLab:
    """`broken` arms fail to start, `impossible` ones have reasons."""

    def __init__(self, broken=(), impossible=()):
        self.broken = broken
        self.impossible = impossible
        self.started = []

    @contextmanager
    def start(self, arm):
        self.started.append(arm.name)
        if arm.name in self.broken:
            raise TargetError(f"{arm.name} does not start")
        yield Host(arm)

    def reasons(self, arm):
        return [f"{arm.name} needs what nothing gives"] if arm.name in self.impossible else []


def runner(gains=GAINS, synergies=None, sd=0.02, seed=0, seconds=0.0, fail=0, drift=0.3):
    """Measures an arm by the gains of the parts that are on, with noise, and drift between blocks."""

    def run(host, workload, block, targets, warmup, deadline_s, progress):
        time.sleep(seconds)
        on = {p for p in gains if f"{p}=on" in host.arm.overrides}
        rate = math.prod(gains[p] for p in on)
        rate *= math.prod(s for pair, s in (synergies or {}).items() if set(pair) <= on)
        rng = np.random.default_rng([seed, zlib.crc32(f"{host.arm.name} {workload.name}".encode()), block])
        rate *= math.exp(rng.normal(0, sd) + np.random.default_rng([seed, block]).normal(0, drift))
        values = {"requests_per_s": rate, "output_tokens_per_s": 60 * rate, "itl_p50_ms": 40 / rate}
        return Outcome(Summary(20, 20 - fail, 10.0, values, {"HTTP 500": fail} if fail else {}), [], 1.0)

    return run


def switches(gains=GAINS):
    return [Switch(p, p, (f"{p}=on",), (f"{p}=off",)) for p in gains]


def study_plan(design="ladder", gains=GAINS, **options):
    made = designs.build(design, "full", switches(gains))
    given = {"workloads": {"chat": {"n": 1, "turns": 1}}, "budget_s": 1e6, "blocks": 6} | options
    return StudyPlan(recipe="full", design=made, **given)


def main(folder: Path, seconds: float) -> None:
    made = study_plan(workloads={"chat": {}, "document": {}})
    here = {"machine": "simulated"}
    with Ledger(folder / "ledger.jsonl") as ledger:
        ledger.append(Header(made.model_dump(mode="json"), here, "2026-01-01T00:00:00+00:00"))
        plan.write_lock(folder / "lock.yaml", made, here)
        print(Study(made, ledger, FakeLab(), run=runner(seconds=seconds)).run())
        report.write(made, ledger)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
