"""Cards of the attention parts: structures (what is kept) and kernels (how it is read)."""

from core.interfaces.plugin import PluginInfo

_READS = frozenset({"window", "softcap", "sinks", "latent", "kv:any", "kv:none"})

NATIVE = PluginInfo(
    name="native",
    seam="attention.structure",
    part="plugins.attention.native:NativeStructure",
    provides=frozenset({"lossless"}),
    summary="Keeps the checkpoint's own heads: MHA, GQA, MQA or an MLA latent",
)

EAGER = PluginInfo(
    name="eager",
    seam="attention.kernel",
    part="plugins.attention.eager:EagerKernel",
    provides=_READS | {"lossless"},
    summary="Plain attention with its softmax written out: the reference",
)

SDPA = PluginInfo(
    name="sdpa",
    seam="attention.kernel",
    part="plugins.attention.sdpa:SdpaKernel",
    provides=_READS | {"lossless"},
    summary="Torch's fused attention, grouped-query heads without repeating keys and values",
)

CPU_PAGED = PluginInfo(
    name="cpu_paged",
    seam="attention.kernel",
    part="plugins.attention.cpu_paged:PagedCPUKernel",
    provides=frozenset({"window", "softcap", "sinks", "latent", "kv:none", "kv:int8_cpu", "lossless", "error:0.001"}),
    summary="Compiled attention for x86 CPUs, and the whole step in one call where the weights are packed for it",
)
