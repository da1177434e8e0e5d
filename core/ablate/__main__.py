"""`python -m core.ablate recipe=premium_chat design=ladder workload=chat,agents budget=20min output=study`"""

from __future__ import annotations

import signal
import sys

from rich.console import Console

from core.lab.errors import LabError

USAGE = """\
Tell what each part of a recipe is worth, with its uncertainty.

  python -m core.ablate [recipe=NAME] [design=NAME] [workload=NAME,...] [KEY=VALUE] ...

  design=ladder            from all parts off to the recipe, one part more at a time
         leave_one_out     the recipe, and the recipe without each part
         one_at_a_time     all parts off, and each part alone
         factorial         all combinations: main effects and interactions; fraction=1 runs half of them
         pair a=X b=Y      two recipes, or words: a=baseline b=[scheduler=static,drafter=none]
  parts=[scheduler,...]    the slots to switch, in this order; all that the recipe fills otherwise
  workload=chat,agents     chat, document, agents, mixed, or sharegpt, mooncake, prompts with path=FILE
  agents.n=4               an option of one workload; load=poisson load.rate=2 say how sessions arrive
  budget=20min             blocks of arms are repeated until all is known or this time is spent
  blocks=40                at most so many; seed=0 chooses requests and order, warmup=1 short requests before each run
  margin=5%                an effect smaller than this does not matter
  metric=requests_per_s    what the verdicts are about
  goodput.ttft=200         a target in ms; also goodput.tpot, goodput.e2e
  price=0.50 | gpu=l4      dollars an hour, for the cost of a million tokens
  quality=false            skips the comparison of answers; quality.path=FILE, quality.tokens=800
  output=DIR               report.html, report.md, lock.yaml and the ledger; run again to go on where it stopped
  SEAM=PART KEY=VALUE      words of the recipe, for all arms

  replay=DIR/lock.yaml     run a study again
  diff=DIR,DIR             compare two studies
  report=DIR               write a study's report again
"""


def command(words: list[str]) -> int:
    if not words or "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0 if words else 2
    from core.ablate.run import main  # heavy, and help does not need it

    try:
        return main(words, Console(highlight=False))
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(command(sys.argv[1:]))
