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

WEIGHTS_INT4 = PluginInfo(
    name="int4",
    seam="quantizer.weights",
    part="plugins.quantizer.cpu_int4:Int4Weights",
    provides=frozenset({"lossy", "error:0.3"}),
    summary="Weights in 4 bits with a scale for each 32, by compiled kernels for x86 CPUs; token table and head in 8",
)

WEIGHTS_NATIVE = PluginInfo(
    name="native",
    seam="quantizer.weights",
    part="plugins.quantizer.cpu_native:NativeWeights",
    provides=frozenset({"lossless"}),
    summary="Weights in the blocks of their GGUF file (Q4_0, Q4_1, Q8_0), by compiled kernels for x86 CPUs",
)

WEIGHTS_NATIVE_ROUNDED = PluginInfo(
    name="native_rounded",
    seam="quantizer.weights",
    part="plugins.quantizer.cpu_native:RoundedNativeWeights",
    provides=frozenset({"lossy", "error:0.02"}),
    summary="The same weights, with inputs rounded to 8 bits over 4-bit blocks and to 14 over Q8_0: faster",
)

KV_NONE = PluginInfo(
    name="none",
    seam="quantizer.kv",
    part="plugins.quantizer.kv_none:PlainKV",
    provides=frozenset({"lossless"}),
    requires=frozenset({"kv:none|kv:any"}),
    summary="Keys and values in the model's dtype",
)

KV_INT8 = PluginInfo(
    name="int8",
    seam="quantizer.kv",
    part="plugins.quantizer.kv_scaled:Int8KV",
    provides=frozenset({"lossy", "error:0.02"}),
    requires=frozenset({"kv:int8|kv:any"}),
    summary="Keys and values in 8 bits, with a scale for each token and head",
)

KV_INT8_CPU = PluginInfo(
    name="int8_cpu",
    seam="quantizer.kv",
    part="plugins.quantizer.cpu_kv_int8:PackedInt8KV",
    provides=frozenset({"lossy", "error:0.02"}),
    requires=frozenset({"kv:int8_cpu|kv:any"}),
    summary="Keys and values in 8 bits, 16 tokens side by side as compiled CPU kernels read them",
)

KV_FP8_E4M3 = PluginInfo(
    name="fp8_e4m3",
    seam="quantizer.kv",
    part="plugins.quantizer.kv_scaled:Fp8KV",
    provides=frozenset({"lossy", "error:0.05"}),
    requires=frozenset({"kv:fp8_e4m3|kv:any"}),
    summary="Keys and values as 8-bit floats, with a scale for each token and head",
)

KV_INT4 = PluginInfo(
    name="int4",
    seam="quantizer.kv",
    part="plugins.quantizer.kv_int4:Int4KV",
    provides=frozenset({"lossy", "per_page", "error:0.15"}),
    requires=frozenset({"kv:int4|kv:any"}),
    summary="Keys by channel and values by token in 4 bits; keys of a page in the making stay whole",
)
