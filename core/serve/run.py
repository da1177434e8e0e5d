"""The command: words to a running server, and what the terminal shows of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from core.compose import compose_words
from core.models.source import read_spec, resolve
from core.recipe import PartChoice, Recipe
from core.recipe import resolve as resolve_parts
from core.serve.launch import EngineProcess
from core.serve.prompts import ModelTokenizer
from core.types import PartwiseError


def run(words: Sequence[str], engine: EngineProcess) -> int:
    """Serve the recipe in `words` with a started engine process, which the caller stops; the exit code."""
    try:
        recipe = _checked(words)
        source = resolve(read_spec(recipe.model))

        def tokenizer() -> ModelTokenizer:
            from core.models.tokenizer import load_tokenizer

            return load_tokenizer(source)

        return serve(recipe, source.name, engine, tokenizer)
    except PartwiseError as error:
        print(error, file=sys.stderr)
        return 1


def show(words: Sequence[str]) -> int:
    """Print the recipe in `words` as it would be used; the exit code."""
    try:
        recipe = _checked(words)
    except PartwiseError as error:
        print(error, file=sys.stderr)
        return 1
    print(yaml.safe_dump(_public(recipe.model_dump(mode="json")), sort_keys=False), end="")
    return 0


def _checked(words: Sequence[str]) -> Recipe:
    """The recipe in `words`, every part found and its options right. PartwiseError lists what is wrong."""
    recipe = compose_words(words)
    resolve_parts(recipe, recipe.registry())
    return recipe


def serve(recipe: Recipe, model: str, engine: EngineProcess, load_tokenizer: Callable[[], ModelTokenizer]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. PartwiseError: it cannot start."""
    from core.serve.server import Server  # FastAPI takes a while to import; a wrong recipe should not wait for it

    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")

    async def main() -> int:
        server = Server(recipe, model, engine, load_tokenizer)
        server.handle_signals()
        with _loading(model) as bar:

            def ready() -> None:
                bar.stop()
                gc.freeze()
                gc.enable()
                _announce(recipe, model, server.url, server.parts)

            return await server.run(ready)

    return asyncio.run(main())


def _loading(model: str) -> Progress:
    """A bar for as long as the model loads, on a terminal only."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
    bar.add_task(f"loading {model}", total=None)
    return bar


def _announce(recipe: Recipe, model: str, url: str, parts: Mapping[str, str]) -> None:
    seconds = time.time() - psutil.Process().create_time()
    console = Console(highlight=False)
    table = Table(title=f"{recipe.name}: {model}", title_justify="left")
    for column in ("seam", "part", "options"):
        table.add_column(column)
    for seam, choice in recipe.slots():
        used = parts.get(seam, choice.name)
        table.add_row(seam, used, _options(choice) if used == choice.name else f"in place of {choice.name}")
    console.print(table)
    console.print(f"Partwise is ready at {url} after {seconds:.1f} s", soft_wrap=True)
    console.file.flush()


def _options(choice: PartChoice) -> str:
    return " ".join(f"{key}={value}" for key, value in choice.options.items() if not isinstance(value, Mapping))


def _public(recipe: dict[str, Any]) -> dict[str, Any]:
    """Without the API key."""
    key = recipe["server"]["api_key"]
    return {**recipe, "server": {**recipe["server"], "api_key": key and "(set)"}}
