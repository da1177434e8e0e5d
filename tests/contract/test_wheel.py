"""What is installed is what is in the repository: files that are not Python are easily left out of a wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "plugins", "kernels", "recipes")


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return set(filter(None, listed.stdout.split("\0")))


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(tmp_path):
    source = tmp_path / "source"
    files = {name for name in tracked() if (ROOT / name).is_file()}
    for name in {*files, "pyproject.toml", "README.md", "LICENSE"}:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    words = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files
