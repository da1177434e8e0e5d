"""Partwise: serve language models from parts that can each be swapped, and measure what each part is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from core.llm import LLM  # imports torch, which most of core does without

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
