"""Cards of the quantizers: how weights and how cached keys and values are stored."""

from core.interfaces.plugin import PluginInfo

WEIGHTS_NONE = PluginInfo(
    name="none",
    seam="quantizer.weights",
    part="plugins.quantizer.weights_none:DenseWeights",
    provides=frozenset({"lossless"}),
    summary="Weights in the model's dtype",
)

WEIGHTS_INT8 = PluginInfo(
    name="int8",
    seam="quantizer.weights",
    part="plugins.quantizer.weights_int8:Int8Weights",
    provides=frozenset({"lossy"}),
    summary="Weights in 8 bits with a scale for each output channel, multiplied as integers",
)

KV_NONE = PluginInfo(
    name="none",
    seam="quantizer.kv",
    part="plugins.quantizer.kv_none:PlainKV",
    provides=frozenset({"lossless"}),
    requires=frozenset({"kv:none|kv:any"}),
    summary="Keys and values in the model's dtype",
)
