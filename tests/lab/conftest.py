import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

STUB = Path(__file__).parent / "stub.py"


@contextmanager
def running(*options: str):
    process = subprocess.Popen([sys.executable, str(STUB), *options], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def stub():
    """Starts stub servers: `with stub("--gap", "0.01") as url`."""
    return running
