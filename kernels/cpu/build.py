"""Compiles the C sources once with the system compiler and keeps the library in the user's cache folder.

Nothing is compiled at import. The library's name is a hash of the sources, the compiler's version and the
instruction set, and it is put in place by a rename, so any number of processes may build at once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "src"

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512_vnni": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-DPW_AVX512", "-DPW_VNNI"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-DPW_AVX512"),
    "avx2_vnni": ("-mavxvnni", "-DPW_VNNI"),
    "avx2": (),
}
"""Compiler flags of each instruction set, best first; all of them build on AVX2, FMA and F16C."""

_NEEDS: dict[str, frozenset[str]] = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx2_vnni": frozenset({"avx2", "fma", "f16c", "avx_vnni"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_vnni": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}),
}
_COMMON_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-pthread",
)


class Unavailable(RuntimeError):
    """The compiled kernels cannot be used here; the message says why and what to do."""


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Instruction sets of this CPU that the kernels have a path for, best first; empty on other CPUs."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    flags = _cpu_flags()
    return tuple(isa for isa in ISA_FLAGS if _NEEDS[isa] <= flags)


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux: torch knows the two large classes
        level = torch.backends.cpu.get_cpu_capability()
        return set(_NEEDS["avx512"] if level == "AVX512" else _NEEDS["avx2"] if level == "AVX2" else ())
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def choose_isa(name: str | None = None) -> str:
    """`name`, or the best instruction set of this CPU. `PARTWISE_CPU_ISA` in the environment overrides the best.

    Raises:
        Unavailable: this CPU has no supported set, or not the one named.
    """
    isas = supported_isas()
    name = name or os.environ.get("PARTWISE_CPU_ISA") or None
    if not isas:
        raise Unavailable(
            f"the compiled CPU kernels need an x86 processor with AVX2, FMA and F16C, and this one "
            f"({platform.machine()}) has not all of them; use the torch kernels instead"
        )
    if name is None:
        return isas[0]
    if name not in isas:
        raise Unavailable(f"instruction set {name!r} is not one of this CPU's: {', '.join(isas)}")
    return name


def find_compiler() -> str:
    """Path of the C compiler: `CC` from the environment, else the first of cc, gcc and clang.

    Raises:
        Unavailable: there is none.
    """
    wanted = os.environ.get("CC")
    names = [wanted] if wanted else ["cc", "gcc", "clang"]
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    where = f"CC={wanted} was not found" if wanted else "none of cc, gcc and clang was found on PATH"
    raise Unavailable(
        f"the compiled CPU kernels need a C compiler and {where}; install one (Debian and Ubuntu: "
        f"`apt-get install gcc`), or use the torch kernels instead"
    )


def cache_folder() -> Path:
    """Where libraries are kept: `$XDG_CACHE_HOME/partwise/kernels`, by default below `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "partwise" / "kernels"


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def library_path(isa: str, compiler: str) -> Path:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + path.read_bytes())
    for part in (_compiler_version(compiler), *_COMMON_FLAGS, *ISA_FLAGS[isa]):
        digest.update(part.encode() + b"\0")
    return cache_folder() / f"cpu-{isa}-{digest.hexdigest()[:16]}.so"


def build(isa: str) -> Path:
    """Path of the library for `isa`, compiled first (some seconds) unless the cache has it.

    Raises:
        Unavailable: no compiler, or it failed; the message holds what it said.
    """
    compiler = find_compiler()
    target = library_path(isa, compiler)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        objects = [Path(folder) / f"{path.stem}.o" for path in sorted(SOURCES.glob("*.c"))]
        flags = [*_COMMON_FLAGS, *ISA_FLAGS[isa]]
        _run_all([[compiler, *flags, "-c", str(SOURCES / f"{o.stem}.c"), "-o", str(o)] for o in objects])
        made = Path(folder) / target.name
        _run_all([[compiler, *flags, "-shared", *map(str, objects), "-o", str(made), "-lm"]])
        os.replace(made, target)
    return target


def _run_all(commands: list[list[str]]) -> None:
    """Runs the commands side by side; raises Unavailable with what the first that failed said."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    said = [process.communicate()[0] for process in running]
    for command, process, text in zip(commands, running, said, strict=True):
        if process.returncode != 0:
            raise Unavailable(
                f"the C compiler could not build the CPU kernels; {' '.join(command)}\nsaid:\n{text.strip()[-2000:]}"
            )
