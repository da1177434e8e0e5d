"""Who may import whom. Imports are read from the source, so a lazy import inside a function counts as well."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("core", "plugins", "kernels", "recipes", "tests", "benchmarks")


@dataclass(frozen=True)
class Import:
    """`typing`: only under TYPE_CHECKING."""

    path: str
    line: int
    module: str
    typing: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def imports_of(path: Path, text: str | None = None) -> list[Import]:
    tree = ast.parse(path.read_text() if text is None else text)
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for body in node.body
        for inner in ast.walk(body)
    }
    found = []
    where = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{where}:{node.lineno}: write absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [Import(where, node.lineno, name, id(node) in typing) for name in names]
    return found


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "template" not in path.parts)


def under(module: str, *names: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def is_standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def fault(found: Import) -> str | None:
    """The rule that an import breaks."""
    path, module = found.path, found.module
    if path.startswith("kernels/"):
        allowed = is_standard(module) or under(module, "torch", "triton", "kernels")
        return None if allowed else "kernels use torch and triton only"
    if path.startswith("core/interfaces/") or path == "core/types.py":
        if under(module, "torch"):
            return None if found.typing else "the contract imports torch under TYPE_CHECKING only"
        allowed = is_standard(module) or under(module, "pydantic", "core.interfaces", "core.types")
        return None if allowed else "the contract uses the standard library, torch and pydantic only"
    if path.startswith("core/"):
        if under(module, "plugins", "kernels"):
            return "core knows parts and kernels by their entry points only"
        if under(module, "hydra") and not (path.endswith("__main__.py") or path == "core/compose.py"):
            return "hydra is for __main__ modules and core/compose.py"
        return None
    if path.startswith("plugins/"):
        return _fault_of_a_part(path, module)
    return None


def _fault_of_a_part(path: str, module: str) -> str | None:
    seam = ".".join(Path(path).parts[:2])
    if under(module, "core") and not under(module, "core.interfaces", "core.types", "core.hooks"):
        return "a part sees core.interfaces, core.types and core.hooks only"
    if under(module, "hydra", "omegaconf"):
        return "a part gets its options ready made"
    if path.endswith("__init__.py"):
        allowed = is_standard(module) or under(module, "pydantic", "core.interfaces", "core.types")
        return None if allowed else "a card's module imports nothing heavy"
    if under(module, "plugins"):
        own_card = under(module, seam) and not (ROOT / Path(*module.split(".")[:3])).with_suffix(".py").is_file()
        return None if own_card else "a part does not import another part"
    return None


@pytest.mark.parametrize("folder", ["kernels", "core", "plugins"])
def test_imports_follow_the_rules(folder):
    broken = [f"{found}: {rule}" for path in files(folder) for found in imports_of(path) if (rule := fault(found))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("kernels/cpu/x.py", "import core.types", "kernels use"),
        ("kernels/cpu/x.py", "import numpy", "kernels use"),
        ("core/interfaces/x.py", "import torch", "TYPE_CHECKING"),
        ("core/interfaces/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", None),
        ("core/types.py", "import numpy", "the contract uses"),
        ("core/interfaces/x.py", "from core.registry import Registry", "the contract uses"),
        ("core/engine.py", "def f():\n    from plugins.scheduler.static import StaticScheduler", "entry points"),
        ("core/lab/x.py", "import hydra", "hydra is for"),
        ("core/bench/__main__.py", "import hydra", None),
        ("plugins/scheduler/static.py", "from core.engine import Engine", "a part sees"),
        ("plugins/scheduler/static.py", "from plugins.drafter import NgramOptions", "another part"),
        ("plugins/scheduler/static.py", "from plugins.scheduler.continuous import ContinuousScheduler", "another part"),
        ("plugins/scheduler/static.py", "from plugins.scheduler import PriorityOptions", None),
        ("plugins/scheduler/__init__.py", "import torch", "nothing heavy"),
        ("plugins/attention/sdpa.py", "import torch\nfrom kernels.cpu import attention", None),
    ],
)
def test_the_rules_see_what_breaks_them(path, text, rule):
    faults = [found for item in imports_of(ROOT / path, text) if (found := fault(item))]
    assert (rule is None and not faults) or any(rule in found for found in faults), faults


def test_the_contract_imports_without_torch():
    light = "core.interfaces, core.types, core.registry, core.hooks, core.testing.pytest_plugin"
    code = f"import sys, {light}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_recipes_name_parts_and_not_classes():
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert "_target_" not in path.read_text(), f"{path} names a class; name the part"


def test_every_card_has_an_entry_point_and_every_entry_point_a_card():
    import importlib
    import tomllib

    from core.interfaces import PluginInfo

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["partwise.plugins"]
    cards = {
        f"{card.seam}.{card.name}": f"{module}:{name}"
        for folder in (ROOT / "plugins").iterdir()
        if (folder / "__init__.py").is_file()
        for module in [f"plugins.{folder.name}"]
        for name, card in vars(importlib.import_module(module)).items()
        if isinstance(card, PluginInfo)
    }
    assert points == cards
