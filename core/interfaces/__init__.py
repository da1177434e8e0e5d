"""The contract: six seams, and the card by which a part is found."""

from core.interfaces.attention import AttentionKernel, AttentionStructure, KVView
from core.interfaces.context_reduction import ContextReduction, ContextView
from core.interfaces.drafter import Drafter, DrafterOptions
from core.interfaces.kv_allocator import AllocatorOptions, CountedPages, KVAllocator
from core.interfaces.model import LayerShape, ModelConfig, StoredWeight, Weights
from core.interfaces.plugin import SEAMS, BuildContext, CacheContext, Options, Part, PluginInfo, PoolContext
from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy, Insertion, PrefixCache, PrefixStats
from core.interfaces.quantizer import Embedding, KVQuantizer, Linear, WeightQuantizer
from core.interfaces.scheduler import Scheduler, SchedulerOptions, remaining

__all__ = [
    "SEAMS",
    "AllocatorOptions",
    "AttentionKernel",
    "AttentionStructure",
    "BuildContext",
    "CacheContext",
    "CacheEntry",
    "ContextReduction",
    "ContextView",
    "CountedPages",
    "Drafter",
    "DrafterOptions",
    "Embedding",
    "EvictionPolicy",
    "Insertion",
    "KVAllocator",
    "KVQuantizer",
    "KVView",
    "LayerShape",
    "Linear",
    "ModelConfig",
    "Options",
    "Part",
    "PluginInfo",
    "PoolContext",
    "PrefixCache",
    "PrefixStats",
    "Scheduler",
    "SchedulerOptions",
    "StoredWeight",
    "WeightQuantizer",
    "Weights",
    "remaining",
]
