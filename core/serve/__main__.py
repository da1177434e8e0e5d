"""`python -m core.serve recipe=premium_chat server.port=8001 scheduler=static`"""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

from core.serve.launch import launch

USAGE = """\
Serve a model over an OpenAI-compatible API.

  python -m core.serve [recipe=NAME] [SEAM=PART] [KEY=VALUE] ...

  recipe=premium_chat        premium_chat, async_agents, baseline, or a file of your own beside them
  model=NAME                 a model recipe, a folder, a .gguf file, or hf:org/name
  scheduler=static           any part by its name; `python -m core.plugins list` shows them
  server.port=8001           any key; --show prints them all
  server.api_key=SECRET      asked of every route but /health and /metrics

  --show                     print the recipe as it would be used, and end
  --help                     print this, and end

Quote values with special characters as key='"a,b=c"'.
"""


def main(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    if "--show" in words:
        from core.serve.run import show

        return show([word for word in words if word != "--show"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # until the server drains on them
    gc.disable()  # until all is loaded: what imports make stays
    engine = launch()  # first, so that its imports run beside ours
    try:
        from core.serve.run import run

        return run(words, engine)
    finally:
        engine.stop()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
