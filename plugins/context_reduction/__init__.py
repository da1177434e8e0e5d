"""Cards of the context reductions."""

from pydantic import NonNegativeInt, PositiveInt

from core.interfaces.plugin import Options, PluginInfo


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


NONE = PluginInfo(
    name="none",
    seam="context_reduction",
    part="plugins.context_reduction.none:NoReduction",
    provides=frozenset({"lossless"}),
    summary="Nothing is forgotten",
)

SINK_WINDOW = PluginInfo(
    name="sink_window",
    seam="context_reduction",
    part="plugins.context_reduction.sink_window:SinkWindow",
    options=SinkWindowOptions,
    provides=frozenset({"lossy"}),
    summary="Keeps the first tokens and the last ones",
)

H2O = PluginInfo(
    name="h2o",
    seam="context_reduction",
    part="plugins.context_reduction.heavy_hitters:HeavyHitters",
    options=HeavyHitterOptions,
    provides=frozenset({"lossy"}),
    summary="Keeps the last tokens and those attended to most",
)

SNAPKV = PluginInfo(
    name="snapkv",
    seam="context_reduction",
    part="plugins.context_reduction.snap:Snap",
    options=SnapOptions,
    provides=frozenset({"lossy"}),
    summary="Cuts the prompt once, to what its end attends to",
)
