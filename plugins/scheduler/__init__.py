"""Cards of the schedulers."""

from core.interfaces.plugin import PluginInfo
from core.interfaces.scheduling import BatchingOptions

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
