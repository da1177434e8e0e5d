"""A model as the planner sees it: its matrices by class, and what each layer keeps of a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.plan.errors import PlanError
from core.plan.formats import INDEX_KEYS, KVFormat, weight_format
from core.plan.shape import Shape, with_structure

FILE = "file"
QUANTIZED = frozenset({"attention", "mlp", "experts"})


@dataclass(frozen=True)
class Matrices:
    """`count` equal [rows, columns] matrices of one kind, of which a token uses the share `used`.

    Kinds: embedding (looked up only), head (also a tied embedding), attention, mlp, experts, router, vectors.
    """

    name: str
    kind: str
    rows: int
    columns: int
    count: int
    used: float = 1.0

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.count


@dataclass(frozen=True)
class KVGroup:
    """`layers` layers that each keep `vectors` vectors of `width` elements of a token.

    A sliding group keeps the last `window` tokens. `read_limit` is for sparse attention, which keeps all and
    reads some. `shards` is into how many ranks the vectors can be split: key and value heads, or 1 for a
    latent. `prefill_ops` and `decode_ops` count the operations of one query token with one attended token in
    one layer.
    """

    name: str
    layers: int
    vectors: int
    width: int
    shards: int
    prefill_ops: int
    decode_ops: int
    window: int | None = None
    read_limit: int | None = None
    format: KVFormat | None = None

    def token_bytes(self, kv: KVFormat) -> float:
        """Bytes that all layers of the group keep of one token."""
        return self.layers * (self.format or kv).bytes(self.vectors, self.width)


@dataclass(frozen=True)
class Model:
    """A model to plan with. `checkpoint` is the weight format it comes in, "file" for a GGUF's own."""

    name: str
    source: str
    shape: Shape
    checkpoint: str = "bf16"
    keep_16_bit: frozenset[str] = frozenset()
    file_bytes: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()
    matrices: tuple[Matrices, ...] = field(init=False)
    groups: tuple[KVGroup, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrices", tuple(_matrices(self.shape)))
        object.__setattr__(self, "groups", tuple(_groups(self.shape)))

    @property
    def parameters(self) -> int:
        return sum(m.parameters for m in self.matrices)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, embedding and head included."""
        return round(sum(m.parameters * m.used for m in self.matrices))

    def converted(self, structure: str) -> Model:
        """This model with another attention structure; see `with_structure`."""
        if structure == "native":
            return self
        return Model(
            f"{self.name} as {structure}", self.source, with_structure(self.shape, structure),
            self.checkpoint, self.keep_16_bit, self.file_bytes, self.notes,
        )  # fmt: skip

    def weight_bytes(self, weights: str, kind: str | None = None) -> int:
        """Bytes of the weights of one kind (of all kinds for None) in a format, or in the "checkpoint"'s own.

        Linear layers take the format, with its scales; embeddings, head, router, norms and biases stay 16-bit
        (32-bit in fp32), and so does what the checkpoint says it keeps, for example everything but the
        experts in gpt-oss.
        """
        weights = self.checkpoint if weights == "checkpoint" else weights
        if weights == FILE:
            return self._file_bytes(kind)
        chosen = weight_format(weights)
        rest = weight_format("fp32" if weights == "fp32" else "bf16")
        return sum(
            (chosen if self.quantized(m.kind) else rest).bytes(m.rows, m.columns) * m.count
            for m in self.matrices
            if kind is None or m.kind == kind
        )

    def quantized(self, kind: str) -> bool:
        return kind in QUANTIZED and kind not in self.keep_16_bit

    def _file_bytes(self, kind: str | None) -> int:
        if self.file_bytes is None:
            raise PlanError(
                f"{self.name} is no file with its own formats; name one, for example weights=bf16"
            )
        return sum(self.file_bytes.values()) if kind is None else self.file_bytes.get(kind, 0)


def _matrices(s: Shape) -> list[Matrices]:
    out = [Matrices("head", "head", s.vocab, s.hidden, 1)]
    if s.tied:
        out = [Matrices("embedding and head (tied)", "head", s.vocab, s.hidden, 1)]
    else:
        out.append(Matrices("embedding", "embedding", s.vocab, s.hidden, 1))
    out += _attention(s)
    dense = s.layers if s.experts is None else s.experts.dense_layers
    out += _mlp("mlp", s, s.intermediate, dense)
    if s.experts is not None:
        out += _expert_layers(s, s.layers - dense)
    out.append(Matrices("norms and biases", "vectors", 1, _vector_elements(s), 1))
    return [m for m in out if m.parameters]


def _attention(s: Shape) -> list[Matrices]:
    if s.latent is None:
        shapes = {
            "q": (s.heads * s.head_dim, s.hidden),
            "k": (s.kv_heads * s.head_dim, s.hidden),
            "v": (s.kv_heads * s.head_dim, s.hidden),
            "o": (s.hidden, s.heads * s.head_dim),
        }
    else:
        z = s.latent
        query = s.heads * (z.nope + z.rope)
        shapes = {
            **({"q down": (z.query_rank, s.hidden)} if z.query_rank else {}),
            "q up" if z.query_rank else "q": (query, z.query_rank or s.hidden),
            "kv down": (z.rank + z.rope, s.hidden),
            "kv up": (s.heads * (z.nope + z.value), z.rank),
            "o": (s.hidden, s.heads * z.value),
        }
        if s.indexer is not None:
            shapes["index q"] = (s.indexer.heads * s.indexer.dim, z.query_rank or s.hidden)
            shapes["index k"] = (s.indexer.dim, s.hidden)
            shapes["index weights"] = (s.indexer.heads, s.hidden)
    return [Matrices(f"attention {n}", "attention", r, c, s.layers) for n, (r, c) in shapes.items()]


def _mlp(name: str, s: Shape, width: int, count: int, used: float = 1.0) -> list[Matrices]:
    kind = "experts" if name == "experts" else "mlp"
    return [
        Matrices(f"{name} up", kind, width * (2 if s.gated else 1), s.hidden, count, used),
        Matrices(f"{name} down", kind, s.hidden, width, count, used),
    ]


def _expert_layers(s: Shape, layers: int) -> list[Matrices]:
    e = s.experts
    assert e is not None
    out = [Matrices("router", "router", e.total, s.hidden, layers)]
    out += _mlp("experts", s, e.intermediate, layers * e.total, e.used / e.total)
    if s.expert_bias:
        elements = 2 * e.intermediate + s.hidden
        out.append(Matrices("expert biases", "vectors", 1, elements, layers * e.total, e.used / e.total))
    if e.shared_intermediate:
        out += _mlp("shared experts", s, e.shared_intermediate, layers)
    if e.shared_gate:
        out.append(Matrices("shared expert gate", "router", 1, s.hidden, layers))
    return out


def _vector_elements(s: Shape) -> int:
    """Elements of all norms, biases and sinks but the experts' own biases."""
    norm = s.hidden * (2 if s.norm_bias else 1)
    layer = s.norms * norm
    query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
    if s.latent is not None:
        layer += s.latent.rank + (s.latent.query_rank or 0)
    elif s.qk_norm:
        layer += 2 * s.head_dim
    if s.indexer is not None:
        layer += 2 * s.indexer.dim
    layer += (query + 2 * key) * s.qkv_bias + s.hidden * s.output_bias + s.heads * s.sinks
    total = s.layers * layer + norm
    dense = s.layers if s.experts is None else s.experts.dense_layers
    total += dense * s.mlp_bias * ((2 if s.gated else 1) * s.intermediate + s.hidden)
    if s.experts is not None:
        e, moe = s.experts, s.layers - dense
        total += moe * e.total * (s.expert_bias + s.correction_bias)
    return total


def _groups(s: Shape) -> list[KVGroup]:
    if s.latent is not None:
        return _latent_groups(s)
    ops = 4 * s.heads * s.head_dim
    groups = []
    for window in sorted(set(s.windows), key=lambda w: (w is not None, w)):
        name = "full" if window is None else f"window {window}"
        groups.append(
            KVGroup(name, s.windows.count(window), 2 * s.kv_heads, s.head_dim, s.kv_heads, ops, ops, window)
        )
    return groups


def _latent_groups(s: Shape) -> list[KVGroup]:
    z = s.latent
    assert z is not None
    prefill = 2 * s.heads * (z.nope + z.rope + z.value)
    decode = 2 * s.heads * (2 * z.rank + z.rope)
    top = s.indexer.top if s.indexer else None
    groups = [KVGroup("latent", s.layers, 1, z.rank + z.rope, 1, prefill, decode, read_limit=top)]
    if s.indexer is not None:
        ops = 2 * s.indexer.heads * s.indexer.dim
        groups.append(KVGroup("index keys", s.layers, 1, s.indexer.dim, 1, ops, ops, format=INDEX_KEYS))
    return groups
