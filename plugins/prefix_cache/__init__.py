"""Cards of the prefix caches and of the policies that choose what they give up."""

from core.interfaces.plugin import PluginInfo

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
