import multiprocessing
import os
import subprocess
import sys
import time

import pytest
import torch

from kernels import cpu
from kernels.cpu import build, library
from tests.kernels.test_linear import make

needs_library = pytest.mark.skipif(not cpu.available()[0], reason=cpu.available()[1])


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_builds_nothing(tmp_path):
    python("import kernels.cpu", XDG_CACHE_HOME=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_no_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "nowhere")
    with pytest.raises(cpu.Unavailable, match="CC=nowhere was not found"):
        build.build("avx2")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(cpu.Unavailable, match=r"need a C compiler.*use the torch kernels"):
        build.build("avx2")
    monkeypatch.setattr(library, "_load", build.build)
    assert cpu.available()[0] is False


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho out of cheese >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(cpu.Unavailable, match="out of cheese"):
        build.build("avx2")
    assert not list(build.cache_folder().iterdir())


def test_unknown_instruction_set_is_said():
    with pytest.raises(cpu.Unavailable, match="'sse2' is not one of this CPU's"):
        build.choose_isa("sse2")


def test_a_cpu_without_avx2_is_said(monkeypatch):
    monkeypatch.setattr(build, "supported_isas", tuple)
    with pytest.raises(cpu.Unavailable, match="AVX2"):
        build.choose_isa()


@needs_library
@pytest.mark.slow
def test_two_processes_build_at_once(tmp_path):
    code = "from kernels import cpu; assert cpu.available()[0]"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [p.wait() for p in running] == [0, 0]
    assert [p.suffix for p in build_files(tmp_path)] == [".so"]


def build_files(root):
    return list((root / "partwise" / "kernels").iterdir())


def _forked(x, packed, want, queue):
    queue.put(torch.equal(cpu.linear(x, packed), want))


@needs_library
def test_a_forked_process_has_threads_of_its_own():
    packed, x = make("int8", 64, 64)[0], torch.randn(8, 64)
    want = cpu.linear(x, packed)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_forked, args=(x, packed, want, queue))
    child.start()
    assert queue.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0
    assert torch.equal(cpu.linear(x, packed), want)


@needs_library
def test_calls_from_several_python_threads():
    from concurrent.futures import ThreadPoolExecutor

    packed, x = make("int8", 64, 64)[0], torch.randn(8, 64)
    want = cpu.linear(x, packed)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: torch.equal(cpu.linear(x, packed), want), range(200)))


@needs_library
def test_idle_threads_sleep():
    packed, x = make("int8", 64, 64)[0], torch.randn(8, 64)
    cpu.set_num_threads(4)
    cpu.linear(x, packed)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_number_of_threads():
    with pytest.raises(ValueError, match="at least 1"):
        cpu.set_num_threads(0)
    cpu.set_num_threads(None)
    assert library.num_threads() == min(len(os.sched_getaffinity(0)), torch.get_num_threads())
