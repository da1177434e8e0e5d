"""The commands of `python -m core.plugins`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from core.interfaces import SEAMS, PluginInfo
from core.plugins.listing import Line, accepted, documentation, find, lines, options_of, version
from core.registry import PartError, Registry
from core.types import PartwiseError


def main(words: Sequence[str]) -> int:
    """Run one command; its exit code: 0, 1 where something is wrong with a part, 2 where the words are wrong."""
    given = _parser().parse_args(words)
    try:
        return int(given.run(given))
    except PartwiseError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core.plugins", description="Parts of Partwise: see, check, make.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, what: str, *, json: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what)
        added.set_defaults(run=run)
        if json:
            added.add_argument("--json", action="store_true", help="print JSON")
            added.add_argument("--plugin-path", metavar="FILE", help="take the parts in this file as well")
        return added

    listed = command("list", _list, "every part that is installed, and which of them a recipe uses")
    listed.add_argument("words", nargs="*", metavar="KEY=VALUE", help="recipe=NAME, scheduler=NAME ...; premium_chat")
    listed.add_argument("--seam", choices=list(SEAMS), help="this seam only")
    shown = command("show", _show, "all about one part")
    shown.add_argument("part", metavar="PART", help="NAME or SEAM.NAME")
    command("doctor", _doctor, "what cannot load, and why; clashes of names; API versions that do not fit")
    checked = command("check", _check, "run a part through the conformance suite of its seam")
    checked.add_argument("part", metavar="PART", help="NAME or SEAM.NAME")
    checked.add_argument("-k", dest="keyword", default="", metavar="TEXT", help="checks with TEXT in their names only")
    checked.add_argument(
        "-l",
        "--level",
        dest="levels",
        action="append",
        type=int,
        choices=range(5),
        metavar="N",
        help="this level only, 0 to 4; may be given several times",
    )
    checked.add_argument("options", nargs="*", metavar="KEY=VALUE", help="options to build the part with")
    matrix = command("matrix", _matrix, "which of our parts work together, as Markdown", json=False)
    matrix.add_argument("--write", action="store_true", help="write core/plugins/COMPATIBILITY.md")
    new = command("new", _new, "write a complete distribution with a part that works, to start from", json=False)
    new.add_argument("seam", choices=list(SEAMS), metavar="SEAM", help=", ".join(SEAMS))
    new.add_argument("name", metavar="NAME", help="the part's name in recipes")
    new.add_argument("--into", type=Path, metavar="FOLDER", help="where to write it (a folder of its own name)")
    return parser


def _list(given: argparse.Namespace) -> int:
    registry = Registry(given.plugin_path)
    active = _active(given.words, given.plugin_path)
    found = [line for line in lines(registry, active) if given.seam in (None, line.found.seam)]
    if given.json:
        _print_json([line.as_json() for line in found])
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("part", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for name in ("API", "used", "capabilities"):
        table.add_column(name)
    for line in found:
        table.add_row(*_cells(line))
    _print(table)
    return 0


def _active(words: Sequence[str], plugin_path: str | None) -> dict[str, str]:
    from core.compose import compose_words

    extra = [f"plugin_path={json.dumps(str(plugin_path))}"] if plugin_path else []
    return {seam: choice.name for seam, choice in compose_words([*words, *extra]).slots()}


def _cells(line: Line) -> list[str]:
    part, source = f"{line.found.seam}={line.found.name}", f"{line.found.distribution} {line.found.version}"
    if line.card is None:
        return [f"[red]{part}[/]", source, "", "", f"[red]{escape(line.problem or '')}[/]"]
    words = [
        *sorted(line.card.provides),
        *(f"[yellow]needs {name}[/]" for name in sorted(line.card.requires)),
        *(f"[yellow]not with {name}[/]" for name in sorted(line.card.conflicts)),
    ]
    used = "[bold]yes[/]" if line.active else ""
    return [f"[bold]{part}[/]" if line.active else part, source, version(line.card.api), used, " ".join(words)]


def _show(given: argparse.Namespace) -> int:
    registry = Registry(given.plugin_path)
    found = find(registry, given.part)
    card = registry.info(found.seam, found.name)
    part = registry.load(found.seam, found.name)
    if given.json:
        about = Line(found, card, None).as_json()
        _print_json(about | {"class": card.part, "documentation": documentation(part)})
        return 0
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("from", f"{found.distribution} {found.version}")
    table.add_row("class", card.part)
    table.add_row("API", f"{version(card.api)} (this Partwise takes {accepted(card.seam)})")
    for name in ("provides", "requires", "conflicts"):
        table.add_row(name, " ".join(sorted(getattr(card, name))) or "-")
    heading = Text(f"{found.seam}={found.name}", style="bold")
    blank = Text("")
    documented = Text(documentation(part))
    _print(Group(heading, Text(card.summary), table, blank, documented, blank, _options_table(card)))
    return 0


def _options_table(card: PluginInfo) -> RenderableType:
    table = Table(box=None, pad_edge=False, title="options", title_justify="left")
    for name in ("key", "kind", "default"):
        table.add_column(name)
    for key, about in options_of(card.options).items():
        default = "must be set" if about.get("required") else json.dumps(about["default"], default=str)
        table.add_row(f"{card.seam}.{key}", _kind(about), default)
    described = documentation(card.options)
    return Group(table, Text(described)) if table.row_count else Text("It has no options.")


def _kind(about: dict[str, Any]) -> str:
    if "enum" in about:
        return " or ".join(map(str, about["enum"]))
    if "anyOf" in about:
        return " or ".join(_kind(option) for option in about["anyOf"])
    words = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = " and ".join(f"{word} {about[key]}" for key, word in words.items() if key in about)
    return " ".join(filter(None, (str(about.get("const", about.get("type", ""))), limits)))


def _doctor(given: argparse.Namespace) -> int:
    from core.plugins.doctor import examine

    registry = Registry(given.plugin_path)
    findings = examine(registry)
    if given.json:
        _print_json({"parts": len(registry.all), "findings": [asdict(finding) for finding in findings]})
    elif findings:
        for finding in findings:
            _print(Text.assemble((finding.kind, "red"), "  ", finding.message))
        print(f"{len(findings)} of {len(registry.all)} parts cannot be used")
    else:
        print(f"all {len(registry.all)} parts load")
    return 1 if findings else 0


def _check(given: argparse.Namespace) -> int:
    from core.testing import conformance
    from core.testing.report import as_json, checklist
    from core.testing.suite import run

    if find_spec("hypothesis") is None:
        raise PartError("check needs hypothesis: pip install 'partwise[test]'")
    if any("=" not in word for word in given.options):
        raise PartError(f"options are written KEY=VALUE, not {' '.join(given.options)}")
    options = {key: _value(value) for key, _, value in (word.partition("=") for word in given.options)}
    registry = Registry(given.plugin_path)
    found = find(registry, given.part)
    registry.info(found.seam, found.name)
    path = None if given.plugin_path is None else str(Path(given.plugin_path).expanduser().resolve())
    suite = conformance(found.seam, found.name, plugin_path=path, **options)
    levels = set(given.levels) if given.levels else None
    outcomes = []
    with Console(stderr=True).status(f"checking {found.label}") as status:
        for outcome in run(suite, levels, keep=lambda name: given.keyword in name):
            outcomes.append(outcome)
            status.update(f"checking {found.label}: {len(outcomes)} checks done")
    if not outcomes:
        raise PartError(f"no check of {found.seam} has {given.keyword!r} in its name on these levels")
    if given.json:
        _print_json(as_json(outcomes))
    else:
        _print(checklist(outcomes))
    return 0 if all(outcome.status != "failed" for outcome in outcomes) else 1


def _value(text: str) -> Any:
    """An option's value as JSON reads it, or the text itself; pydantic turns it into what the option takes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _new(given: argparse.Namespace) -> int:
    from core.plugins.scaffold import create

    folder = create(given.seam, given.name, given.into)
    print(f"wrote {folder}\n\n  pip install -e {folder}\n  python -m core.plugins check {given.seam}.{given.name}")
    return 0


def _matrix(given: argparse.Namespace) -> int:
    from core.plugins.matrix import PAGE, page

    text = page(Registry())
    if given.write:
        PAGE.write_text(text)
        print(f"wrote {PAGE}")
    else:
        print(text, end="")
    return 0


def _print(what: RenderableType) -> None:
    Console(width=None if sys.stdout.isatty() else 120).print(what)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))
