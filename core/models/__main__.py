"""`python -m core.models NAME...`: fetch models, and convert their tokenizers, ahead of serving them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files

import yaml

from core.models.source import ModelSpec, read_spec, resolve, spec_from_word
from core.models.tokenizer import load_tokenizer
from core.names import near
from core.types import PartwiseError


def named(word: str) -> ModelSpec:
    """The model a word means: a recipe's name, a path or `hf:org/name`. PartwiseError: there is no such recipe."""
    spec = spec_from_word(word)
    if spec is not None:
        return read_spec(spec)
    recipe = files("recipes") / "model" / f"{word}.yaml"
    if not recipe.is_file():
        known = [file.name.removesuffix(".yaml") for file in (files("recipes") / "model").iterdir()]
        raise PartwiseError(f"there is no model recipe {word!r}{near(word, known)}")
    return read_spec(yaml.safe_load(recipe.read_text()))


def main(words: Sequence[str]) -> int:
    if not words:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for word in words:
            source = resolve(named(word))
            load_tokenizer(source)
            print(source.gguf or source.folder)
    except PartwiseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
