"""`python -m core.bench recipe=premium_chat workload=chat`, and with `-m` for every combination of several values."""

from __future__ import annotations

import itertools
import signal
import sys

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console

from core.lab.errors import LabError, UsageError

USAGE = """\
Measure one arm, or with -m every combination of several values.

  python -m core.bench [recipe=NAME] [workload=NAME] [KEY=VALUE] ...
  python -m core.bench -m scheduler=static,continuous prefix_cache=none,hash,radix output=DIR

  workload=chat            chat, document, agents, mixed, or sharegpt, mooncake, prompts with path=FILE
  chat.turns=3             an option of the workload; workload.turns=3 is the same
  load=closed              how sessions arrive: closed, constant, poisson, gamma, ramp, or trace (a trace's own times)
  load.concurrency=8       sessions at once, of a closed load
  load.rate=2              sessions a second, of the others; load.burstiness of gamma, load.rate_end of ramp
  target=http://HOST:PORT  a server that is already running, of any make; our own is started otherwise
                           (target.model, target.api=completions, target.api_key, target.ignore_eos=false)
  target=engine            the engine in the load generator's process, without a server
  goodput.ttft=200         a target in ms; also goodput.tpot, goodput.e2e
  repeat=3                 runs of each arm, in random order, each with other requests
  warmup=1                 short requests before each run; seed=0 chooses the requests
  again=true               also runs what the ledger already has
  price=0.50 | gpu=l4      dollars an hour, for the cost of a million tokens
  output=DIR               where the ledger is; what it holds already is not run again
  SEAM=PART KEY=VALUE      words of the recipe
"""


def expand(words: list[str], sweep: bool) -> list[list[str]]:
    """The words of each arm, by Hydra's grammar of overrides; without `sweep` there is one."""
    if not sweep:
        return [words]
    try:
        choices = [
            [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
            if each.is_sweep_override()
            else [word]
            for word, each in zip(words, OverridesParser.create().parse_overrides(words), strict=True)
        ]
        return [list(job) for job in itertools.product(*choices)]
    except HydraException as error:
        raise UsageError(f"cannot read the sweep: {' '.join(str(error).split())}") from None


def command(words: list[str]) -> int:
    if not words or "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0 if words else 2
    from core.bench.run import run  # heavy, and help does not need it

    sweep = any(word in ("-m", "--multirun") for word in words)
    plain = [word for word in words if word not in ("-m", "--multirun")]
    try:
        return run(expand(plain, sweep), Console(highlight=False))
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by you; what was measured is in the ledger", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(command(sys.argv[1:]))
