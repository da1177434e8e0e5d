"""How long from the start of the process to a ready server, with the model cached.

python benchmarks/serve/startup.py [--starts 5] [words of the server's command line]
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time

LIMIT_SECONDS = 8.0


def start_once(words: list[str]) -> float:
    """Seconds from before the process exists until the ready line; the server is ended."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "core.serve", "server.port=0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if re.search(r"ready at http", line):
                return time.perf_counter() - started
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    start_once(options.words)  # fills the caches
    seconds = [start_once(options.words) for _ in range(options.starts)]
    median = statistics.median(seconds)
    print(f"ready after {median:.2f} s (median of {len(seconds)}; {min(seconds):.2f} to {max(seconds):.2f})")
    return 0 if median < LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
