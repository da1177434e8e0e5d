"""A model's tokenizer and chat template. Imports no torch: the API process loads this, not the model."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from core.models.gguf_file import GGUFFile
from core.models.source import ModelSource, cache_folder
from core.types import InvalidRequest, PartwiseError

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """Text to token ids and back. `backend` is the `tokenizers` object below, as DecodeStream wants it."""

    def __init__(self, wrapped: PreTrainedTokenizerFast, name: str) -> None:
        self._wrapped, self._name = wrapped, name
        self.backend: tokenizers.Tokenizer = wrapped.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def bos_token_id(self) -> int | None:
        found: int | None = self._wrapped.bos_token_id
        return found

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that this tokenizer knows to end a text; the model may know more."""
        found = self._wrapped.eos_token_id
        return () if found is None else (found,)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapped.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A text that starts with the BOS token gets no second one. InvalidRequest: it is not
        valid Unicode."""
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}") from None
        twice = add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id
        return ids[1:] if twice and text.startswith(str(self._wrapped.bos_token)) else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation up to where the assistant answers, with the special tokens its template
        writes and no others. `options` as for `render_chat`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """A conversation as text. `options` (such as `tools`) go to the template. InvalidRequest: the model has no
        template, or it refuses these messages."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InvalidRequest(
                f"{self._name} has no chat template: it is a base model. Send plain text to /v1/completions", "messages"
            )
        try:
            text = self._wrapped.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from None
        return str(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model. One in a GGUF file is converted once and kept in the cache. PartwiseError: there is
    none, or it cannot be read."""
    folder = _converted(GGUFFile(source.gguf)) if source.gguf else source.folder
    assert folder is not None
    return Tokenizer(_read(folder), source.name)


def _read(folder: Path) -> PreTrainedTokenizerFast:
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
            return fast
        from transformers import AutoTokenizer  # imports torch

        wrapped: Any = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise PartwiseError(f"{folder}: its tokenizer cannot be read: {error}") from error
    if not hasattr(wrapped, "backend_tokenizer"):
        raise PartwiseError(f"{folder} has no tokenizer.json, and its tokenizer has no fast form; convert it first")
    return cast("PreTrainedTokenizerFast", wrapped)


def tokenizer_vocab(source: ModelSource) -> int | None:
    """How many token ids the tokenizer has, without loading it; a model's head may have more rows. None: not known."""
    if source.gguf:
        return GGUFFile(source.gguf).length("tokenizer.ggml.tokens")
    file = source.folder / "tokenizer.json" if source.folder else None
    if file is None or not file.is_file():
        return None
    parsed = json.loads(file.read_text())
    vocab, added = parsed["model"].get("vocab", {}), parsed.get("added_tokens", ())
    highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return int(max([highest, *(token["id"] for token in added)])) + 1


# --- out of GGUF files ------------------------------------------------------------------------------------------------

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _converted(file: GGUFFile) -> Path:
    """A folder with the file's tokenizer in transformers' form, named by what it was made from."""
    first = min(tensor.offset for tensor in file.tensors.values())
    key = hashlib.sha256(file.data[:first]).hexdigest()[:16]
    target = cache_folder() / "tokenizers" / key
    if (target / "tokenizer.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch:
        made = Path(scratch) / "made"
        _convert(file).save_pretrained(made)
        try:
            os.rename(made, target)
        except OSError:
            if not (target / "tokenizer.json").is_file():
                raise
    return target


def _convert(file: GGUFFile) -> PreTrainedTokenizerFast:
    from rich.console import Console
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    metadata = file.metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise PartwiseError(f"{file.path} has no vocabulary; fetch it again, or convert it anew")
    values, settings = (
        {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
        for names in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    )
    if values.get("tokenizer_type") == "llama":
        settings.setdefault("add_bos_token", True)
    for name, key in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        settings[name] = None if token is None else values["tokens"][token]
    try:
        with Console(stderr=True).status(f"converting the tokenizer of {file.path.name}, once"):
            backend, _ = convert_gguf_tokenizer(file.architecture, values)
    except Exception as error:
        raise PartwiseError(f"{file.path}: its tokenizer cannot be converted: {error}") from error
    make: Any = PreTrainedTokenizerFast
    return cast("PreTrainedTokenizerFast", make(tokenizer_object=backend, **settings))
