"""`python -m core.plugins`: list, show, doctor, check, new."""

import json
import subprocess
import sys
import tomllib

import pytest

from core.interfaces import SEAMS
from core.plugins.cli import main
from core.registry import Registry


def output(capsys, *words, code=0):
    assert main(list(words)) == code
    return capsys.readouterr().out


def test_list_shows_every_part(capsys):
    lines = json.loads(output(capsys, "list", "--json", "recipe=baseline"))
    assert {(line["seam"], line["name"]) for line in lines} == {(f.seam, f.name) for f in Registry().all}
    active = {line["seam"]: line["name"] for line in lines if line["active"]}
    assert active["scheduler"] == "static" and active.keys() == set(SEAMS)
    static = next(line for line in lines if line["name"] == "static")
    assert static["distribution"] == "partwise" and static["accepted_api"] == "1.0" and static["summary"]
    assert static["options"]["max_running"]["default"] == 16


def test_list_follows_the_words_of_a_recipe(capsys):
    table = output(capsys, "list", "recipe=baseline", "scheduler=continuous", "--seam", "scheduler")
    lines = {line.split()[0]: line.split() for line in table.splitlines()[1:]}
    assert "yes" in lines["scheduler=continuous"] and "yes" not in lines["scheduler=static"]
    assert all(name.startswith("scheduler=") for name in lines)


def test_list_does_not_import_parts():
    code = (
        "import sys\nfrom core.plugins.cli import main\nmain(['list'])\n"
        "sys.exit('torch' in sys.modules or any(m.startswith('plugins.') and m.count('.') > 1 for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_show_tells_all(capsys):
    text = output(capsys, "show", "ngram")
    for wanted in ("drafter=ngram", "partwise", "plugins.drafter.ngram:NgramDrafter", "lossless", "drafter.n_max"):
        assert wanted in text
    about = json.loads(output(capsys, "show", "drafter.ngram", "--json"))
    assert about["options"]["k"]["default"] == 4 and about["documentation"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("ngramm", "did you mean ngram"),
        ("drafter.ngrm", "did you mean drafter.ngram"),
        ("none", "say "),
    ],
)
def test_names_that_are_not_clear(capsys, word, said):
    assert main(["show", word]) == 2
    assert said in capsys.readouterr().err


def test_doctor_finds_nothing_wrong_with_ours(capsys):
    assert json.loads(output(capsys, "doctor", "--json"))["findings"] == []
    assert "parts load" in output(capsys, "doctor")


def test_check_prints_a_table_and_json(capsys):
    table = output(capsys, "check", "kv_allocator.paged", "-l", "1")
    assert "pages are conserved" in table and "passed" in table and "failed" not in table
    report = json.loads(output(capsys, "check", "paged", "-l", "1", "-k", "extend", "--json"))
    assert [check["check"] for check in report["parts"][0]["checks"]] == ["test_l1_extend_adds_what_is_missing"]


def test_check_builds_with_the_options_given(capsys):
    report = json.loads(output(capsys, "check", "ngram", "n_max=2", "n_min=1", "-l", "1", "--json"))
    assert report["ok"]
    assert main(["check", "ngram", "n_max=0", "-l", "1", "-k", "one_draft"]) == 1
    assert "n_max" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["check", "ngram", "n_max"], ["check", "ngram", "-k", "no_such_check"]])
def test_check_says_what_it_cannot_do(capsys, words):
    assert main(words) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("seam", SEAMS)
def test_new_writes_a_distribution(tmp_path, capsys, seam):
    folder = tmp_path / "new"
    assert "pip install" in output(capsys, "new", seam, "some_name", "--into", str(folder))
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["partwise.plugins"]
    (package,) = project["tool"]["setuptools"]["packages"]
    assert points == {f"{seam}.some_name": f"{package}:CARD"}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        ".github/workflows/test.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "tests/test_conformance.py",
        f"{package}/__init__.py",
        f"{package}/part.py",
    }
    for path in folder.rglob("*"):
        text = path.read_text() if path.is_file() else ""
        assert "{%" not in text and "{{ " not in text.replace("${{ ", ""), f"{path} is not rendered"
    style = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", "-q", str(folder)]
    assert subprocess.run(style, capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize("name", ["Mine", "2nd", "my-part", "a b", ""])
def test_new_refuses_names_that_cannot_be_written(tmp_path, capsys, name):
    assert main(["new", "drafter", name, "--into", str(tmp_path / "new")]) == 2
    assert "cannot be a part's name" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_new_does_not_overwrite(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["new", "drafter", "mine", "--into", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_unknown_seam_names_the_seams(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["new", "schedulr", "mine"])
    assert ended.value.code == 2 and "kv_allocator" in capsys.readouterr().err
