"""Cards of the prefix caches and of the policies that choose what they give up."""

from pydantic import PositiveFloat, PositiveInt

from core.interfaces.plugin import Options, PluginInfo


class SegmentedOptions(Options):
    """`protected_uses`: matches after which an entry counts as protected."""

    protected_uses: PositiveInt = 1


class CostAwareOptions(Options):
    """`attention_tokens`: the context at which attending costs a token as much as all else; `horizon`: cache
    operations that one use of an entry of average cost is worth."""

    attention_tokens: PositiveFloat = 4096.0
    horizon: PositiveFloat = 100.0


NONE = PluginInfo(
    name="none",
    seam="prefix_cache",
    part="plugins.prefix_cache.none:NoPrefixCache",
    provides=frozenset({"lossless", "keeps_nothing"}),
    summary="Every prompt is computed anew",
)

HASH = PluginInfo(
    name="hash",
    seam="prefix_cache",
    part="plugins.prefix_cache.hash:HashCache",
    provides=frozenset({"lossless"}),
    summary="Pages found by the hash of all tokens up to their end",
)

RADIX = PluginInfo(
    name="radix",
    seam="prefix_cache",
    part="plugins.prefix_cache.radix:RadixCache",
    provides=frozenset({"lossless"}),
    summary="A tree of token runs, shared as far as prompts agree",
)

LRU = PluginInfo(
    name="lru",
    seam="prefix_cache.eviction",
    part="plugins.prefix_cache.lru:LeastRecentlyUsed",
    provides=frozenset({"lossless"}),
    summary="Gives up what was used longest ago",
)

EXACT = PluginInfo(
    name="exact",
    seam="prefix_cache",
    part="plugins.prefix_cache.exact:ExactCache",
    provides=frozenset({"lossless", "whole_prompts_only"}),
    summary="Whole prompts only: a hit if every page is the same",
)

LFU = PluginInfo(
    name="lfu",
    seam="prefix_cache.eviction",
    part="plugins.prefix_cache.lfu:LeastFrequentlyUsed",
    provides=frozenset({"lossless"}),
    summary="Gives up what was used least often",
)

FIFO = PluginInfo(
    name="fifo",
    seam="prefix_cache.eviction",
    part="plugins.prefix_cache.fifo:FirstInFirstOut",
    provides=frozenset({"lossless"}),
    summary="Gives up what came first",
)

SLRU = PluginInfo(
    name="slru",
    seam="prefix_cache.eviction",
    part="plugins.prefix_cache.slru:SegmentedLRU",
    options=SegmentedOptions,
    provides=frozenset({"lossless"}),
    summary="Gives up what was never used again before what was",
)

PRIORITY = PluginInfo(
    name="priority",
    seam="prefix_cache.eviction",
    part="plugins.prefix_cache.priority:PriorityEviction",
    provides=frozenset({"lossless"}),
    summary="Gives up first what only requests of low priority use",
)

COST_AWARE = PluginInfo(
    name="cost_aware",
    seam="prefix_cache.eviction",
    part="plugins.prefix_cache.cost_aware:CostAwareEviction",
    options=CostAwareOptions,
    provides=frozenset({"lossless"}),
    summary="Gives up what is cheapest to compute again for its bytes",
)
