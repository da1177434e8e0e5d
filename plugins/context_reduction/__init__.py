"""Options of the context reductions."""

from pydantic import NonNegativeInt, PositiveInt

from core.interfaces.plugin import Options


class SinkWindowOptions(Options):
    """In tokens, rounded up to pages: `sinks` at the start and `window` at the end are kept."""

    sinks: NonNegativeInt = 4
    window: PositiveInt = 1024


class HeavyHitterOptions(Options):
    """In tokens, rounded up to pages: the last `recent` are kept, and the `heavy` that were attended to most."""

    recent: PositiveInt = 256
    heavy: NonNegativeInt = 256


class SnapOptions(Options):
    """In tokens: the prompt is cut to `budget`, by the attention of its last `window`, smoothed over `pooled`."""

    budget: PositiveInt = 512
    window: PositiveInt = 32
    pooled: PositiveInt = 5
