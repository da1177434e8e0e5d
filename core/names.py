"""Near names for a word that is not known, for errors to suggest. Imports the standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

LONGEST: Final = 100
"""Characters of a word that are looked at; the words may come from anybody."""


def nearest(word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """The known names that `word` may mean, the likeliest first: those that begin with it, those spelt alike
    (difflib's ratio of at least `cutoff`), and those whose part before a hyphen is."""
    names, wanted = sorted(known), word[:LONGEST].lower()
    starting = [name for name in names if wanted and name.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, names, n=most, cutoff=cutoff)
    heads = {name.partition("-")[0] for name in names}
    families = difflib.get_close_matches(wanted, heads, n=len(heads) or 1, cutoff=0.75)
    related = [name for name in names if name.partition("-")[0] in families]
    return list(dict.fromkeys([*starting, *alike, *related]))[:most]


def near(word: str, known: Iterable[str]) -> str:
    """The rest of an error about an unknown `word`: near names, or all of them."""
    names = sorted(known)
    if close := nearest(word, names):
        return f"; did you mean {' or '.join(close)}?"
    return f"; there {'are' if len(names) > 1 else 'is'} {', '.join(names)}" if names else ""
