"""Cards of the schedulers."""

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from core.interfaces.plugin import PluginInfo
from core.interfaces.scheduling import BatchingOptions


class PriorityOptions(BatchingOptions):
    """`ageing`: seconds of waiting that are worth one class of priority."""

    ageing: PositiveFloat = 30.0


class ShortestFirstOptions(BatchingOptions):
    """`ageing`: tokens of length that one second of waiting makes up for."""

    ageing: PositiveFloat = 50.0


class FairOptions(BatchingOptions):
    """What a client is charged for a token: `prompt_weight` as its request is admitted, `output_weight` as it is
    decoded."""

    prompt_weight: NonNegativeFloat = 1.0
    output_weight: PositiveFloat = 2.0


class CacheAwareOptions(BatchingOptions):
    """`look_ahead`: how many of the longest waiting are compared; `patience`: how often one may be overtaken."""

    look_ahead: PositiveInt = 32
    patience: PositiveInt = 8


class SloOptions(BatchingOptions):
    """Targets in milliseconds: `ttft_ms` from arrival to the first token, `itl_ms` between two. A request that has
    missed its first target by `grace` times as much goes before all others."""

    ttft_ms: PositiveFloat = 1000.0
    itl_ms: PositiveFloat = 200.0
    grace: PositiveFloat = 5.0


STATIC = PluginInfo(
    name="static",
    seam="scheduler",
    part="plugins.scheduler.static:StaticScheduler",
    options=BatchingOptions,
    provides=frozenset({"lossless"}),
    summary="A batch ends before the next one begins",
)

CONTINUOUS = PluginInfo(
    name="continuous",
    seam="scheduler",
    part="plugins.scheduler.continuous:ContinuousScheduler",
    options=BatchingOptions,
    provides=frozenset({"lossless", "preempts"}),
    summary="Sequences join and leave at every step, in order of arrival",
)

PRIORITY = PluginInfo(
    name="priority",
    seam="scheduler",
    part="plugins.scheduler.priority:PriorityScheduler",
    options=PriorityOptions,
    provides=frozenset({"lossless", "preempts"}),
    summary="The lowest priority number first, at the cost of running requests of a higher one",
)

SHORTEST_FIRST = PluginInfo(
    name="shortest_first",
    seam="scheduler",
    part="plugins.scheduler.shortest_first:ShortestFirstScheduler",
    options=ShortestFirstOptions,
    provides=frozenset({"lossless", "preempts"}),
    summary="The request that is expected to be shortest first",
)

FAIR = PluginInfo(
    name="fair",
    seam="scheduler",
    part="plugins.scheduler.fair:FairScheduler",
    options=FairOptions,
    provides=frozenset({"lossless", "preempts"}),
    summary="The client that has been served least first",
)

CACHE_AWARE = PluginInfo(
    name="cache_aware",
    seam="scheduler",
    part="plugins.scheduler.cache_aware:CacheAwareScheduler",
    options=CacheAwareOptions,
    provides=frozenset({"lossless", "preempts"}),
    summary="The request with the longest cached prefix first",
)

SLO = PluginInfo(
    name="slo",
    seam="scheduler",
    part="plugins.scheduler.slo:SloScheduler",
    options=SloOptions,
    provides=frozenset({"lossless", "preempts"}),
    summary="The request whose latency target is nearest first, and steps short enough for the target between tokens",
)
