"""`plugin_path=./my_part.py` uses a part before it is packaged, by the same doors as an installed one."""

import json
import subprocess
import sys

import pytest

from core.compose import compose
from core.plugins.cli import main
from core.recipe import RecipeError, resolve
from core.registry import PartError, Registry
from core.testing import conformance
from core.testing.serving import NULL, assert_same, recipe_of, serve, served_by_null_parts
from core.testing.suite import run

PART = '''
"""A scheduler in one file."""

from pydantic import PositiveInt

from core.interfaces import PluginInfo
from core.interfaces.scheduling import BatchingOptions, BatchingScheduler


class OneFileOptions(BatchingOptions):
    """`spare`: tokens of the budget that are not used."""

    spare: PositiveInt = 1


class OneFile(BatchingScheduler):
    """Leaves some of the budget unused."""

    def plan(self, queues, budget, memory):
        from dataclasses import replace

        return super().plan(queues, replace(budget, tokens=max(1, budget.tokens - self.options.spare)), memory)


CARD = PluginInfo(
    name="one_file",
    seam="scheduler",
    part="{module}:OneFile",
    options=OneFileOptions,
    provides=frozenset({{"lossless"}}),
    summary="Fills a step a little less",
)
'''


def write(folder, name):
    path = folder / f"{name}.py"
    path.write_text(PART.format(module=name))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("one"), "one_file_part")


def test_it_serves(path):
    found = serve(recipe_of({**NULL, "scheduler": "one_file"}, "plain", plugin_path=str(path)))
    assert_same(served_by_null_parts("plain"), found, "a scheduler in one file")


def test_it_is_named_and_set_on_the_command_line(path):
    recipe = compose("baseline", [f"plugin_path={path}", "scheduler=one_file", "scheduler.spare=3"])
    chosen = resolve(recipe, recipe.registry())["scheduler"]
    assert chosen.options.spare == 3 and chosen.distribution == str(path)
    with pytest.raises(RecipeError, match="spare"):
        recipe = compose("baseline", [f"plugin_path={path}", "scheduler=one_file", "scheduler.spare=none"])
        resolve(recipe, recipe.registry())


def test_a_relative_path_is_kept_whole(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    recipe = compose("baseline", [f"plugin_path=./{path.name}", "scheduler=one_file"])
    monkeypatch.chdir("/")
    assert recipe.registry().info("scheduler", "one_file").name == "one_file"


def test_it_passes_its_checks(path):
    outcomes = list(run(conformance("scheduler", "one_file", plugin_path=str(path)), {0, 1}))
    assert {o.status for o in outcomes} == {"passed", "skipped"}
    assert [o.check for o in outcomes if o.status == "skipped"] == ["test_l0_importing_the_card_is_light"]


def test_the_commands_take_it(path, capsys):
    assert main(["list", "--json", "--plugin-path", str(path), "recipe=baseline", "scheduler=one_file"]) == 0
    (line,) = [line for line in json.loads(capsys.readouterr().out) if line["name"] == "one_file"]
    assert line["active"] and line["distribution"] == str(path)
    assert main(["show", "one_file", "--plugin-path", str(path)]) == 0
    assert "scheduler.spare" in capsys.readouterr().out
    assert main(["check", "one_file", "-l", "0", "--json", "--plugin-path", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_another_process_finds_it(path):
    code = (
        "import sys\nfrom core.build import build_engine\nfrom core.testing.serving import NULL, recipe_of\n"
        "recipe = recipe_of({**NULL, 'scheduler': 'one_file'}, 'plain', plugin_path=sys.argv[1])\n"
        "print(type(build_engine(recipe.model_dump(mode='json')).scheduler).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "OneFile", done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "holds no PluginInfo"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("def broken(:\n", "SyntaxError"),
        (None, "is not a file"),
    ],
)
def test_files_that_are_no_part(tmp_path, text, said):
    path = tmp_path / f"wrong_{abs(hash(text))}.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PartError) as caught:
        _ = Registry(path).all
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_file_named_like_a_loaded_module_is_refused(tmp_path):
    with pytest.raises(PartError, match="rename the file"):
        _ = Registry(write(tmp_path, "json")).all


def test_a_part_of_an_installed_name_is_a_clash(tmp_path):
    path = tmp_path / "clashing_part.py"
    path.write_text(PART.format(module="clashing_part").replace('name="one_file"', 'name="static"'))
    with pytest.raises(PartError, match="offered by"):
        Registry(path).find("scheduler", "static")
