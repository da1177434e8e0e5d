"""What this machine can do at best, measured in the same run: the limits that the kernels are held against."""

import time

import pytest
import torch

from kernels import cpu


def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        isas = cpu.supported_isas()
        metafunc.parametrize("isa", [isas[0], isas[-1]] if len(isas) > 1 else isas)


def fastest(work, rounds=8):
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


@pytest.fixture(scope="session")
def limits():
    """Bytes a second read from memory and fp32 multiply-adds a second, as torch reaches them."""
    memory, square = torch.ones(64 * 2**20), torch.randn(1024, 1024)
    read = memory.numel() * 4 / fastest(memory.sum)
    return {"bytes": read, "macs": 1024**3 / fastest(lambda: square @ square)}


ROWS = []


def pytest_terminal_summary(terminalreporter):
    if ROWS:
        terminalreporter.write_line("| kernel | ms | GB/s | of read limit | GMAC/s | of fp32 limit | times torch |")
        terminalreporter.write_line("|---|---|---|---|---|---|---|")
    for name, seconds, info in ROWS:
        cells = [f"{seconds * 1e3:.3f}", *map(str, info.values())]
        terminalreporter.write_line(f"| {name} | {' | '.join(cells)} |")


@pytest.fixture
def measured(benchmark, limits, request):
    """Runs a kernel, and notes bytes and multiply-adds a second and the time that its reference takes."""

    def measure(work, *, n_bytes, n_macs, reference=None):
        work()
        benchmark(work)
        if benchmark.stats is None:
            return
        seconds = benchmark.stats.stats.min
        benchmark.extra_info |= {
            "GB/s": round(n_bytes / seconds / 1e9, 2),
            "of read limit": round(n_bytes / seconds / limits["bytes"], 3),
            "GMAC/s": round(n_macs / seconds / 1e9, 2),
            "of fp32 limit": round(n_macs / seconds / limits["macs"], 3),
        }
        if reference is not None:
            benchmark.extra_info["times faster than torch"] = round(fastest(reference, 3) / seconds, 2)
        name = request.node.name.removeprefix("test_").replace("[", " ").rstrip("]")
        ROWS.append((name, seconds, dict(benchmark.extra_info)))

    return measure
