import pytest
import torch

from kernels import cpu
from kernels.reference.linear import linear as reference_linear
from kernels.reference.rows import rms_norm
from kernels.reference.step import decoder_layer
from tests.kernels.paged import page_table, poisoned, slots_of, starts
from tests.kernels.test_linear import make

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCABULARY, PAGE = 64, 4, 2, 32, 96, 130, 16


def build(kind: str, format: str, isa: str, n_pages: int = 40, **extra):
    """A decoder of three layers with the same model for the reference."""
    angles = torch.outer(torch.arange(512.0), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    shapes = {
        "q": (HEADS * DIM, HIDDEN),
        "k": (KV_HEADS * DIM, HIDDEN),
        "v": (KV_HEADS * DIM, HIDDEN),
        "o": (HIDDEN, HEADS * DIM),
        "gate": (FFN, HIDDEN),
        "up": (FFN, HIDDEN),
        "down": (HIDDEN, FFN),
    }
    layers, plain, caches = [], [], []
    for i in range(3):
        made = {name: make(kind, *shape) for name, shape in shapes.items()}
        common = {
            "attn_norm": torch.rand(HIDDEN),
            "ffn_norm": torch.rand(HIDDEN),
            "n_q_heads": HEADS,
            "cos": angles.cos(),
            "sin": angles.sin(),
            "scale": 0.02,
            **extra,
        }
        if "window" in extra:
            common["window"] = extra["window"] if i else None
        packed = {name: p for name, (p, _) in made.items()}
        layers.append(
            cpu.DecoderLayer(
                cpu.concatenate([packed[n] for n in "qkv"]),
                packed["o"],
                cpu.interleave(packed["gate"], packed["up"]),
                packed["down"],
                **common,
                group=int(i > 0) if "window" in extra else 0,
            )
        )
        plain.append({**common, **{name: (w, kind) for name, (_, w) in made.items()}})
        caches.append(poisoned(format, n_pages, PAGE, KV_HEADS, DIM, DIM))
    head, head_weight = make(kind, VOCABULARY, HIDDEN)
    norm = torch.rand(HIDDEN)
    decoder = cpu.Decoder(layers, caches, final_norm=norm, head=head, embed=head, embed_scale=2.0, isa=isa)
    return decoder, {"layers": plain, "norm": norm, "head": head_weight, "kind": kind}


def reference_step(model, caches, ids, table, queries, lens, rows):
    x = model["head"][ids].float() * 2.0
    where = [torch.arange(n - q, n) for q, n in zip(queries, lens, strict=True)]
    slots = torch.cat([slots_of(row, w, PAGE) for row, w in zip(table, where, strict=True)])
    batch = {"page_table": table, "query_start": starts(queries), "kv_len": torch.tensor(lens)}
    for layer, (k, v) in zip(model["layers"], caches, strict=True):
        x = decoder_layer(x, layer, k, v, torch.cat(where), slots, batch, 1e-5)
    x = rms_norm(x, model["norm"], 1e-5)
    return reference_linear(x[rows], model["head"], model["kind"]).float(), x


def run(decoder, table, ids, queries, lens, rows, groups=1, **options):
    batch = cpu.Ragged(table, starts(queries), torch.tensor(lens, dtype=torch.int32))
    return decoder.step(ids, [batch] * groups, rows, **options)


@pytest.mark.parametrize("kind", ["fp32", "int8", "q4_1"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {
            "window": 20,
            "softcap": 30.0,
            "gate": "gelu",
            "q_norm": torch.rand(DIM),
            "k_norm": torch.rand(DIM),
            "post_attn_norm": torch.rand(HIDDEN),
            "post_ffn_norm": torch.rand(HIDDEN),
            "sinks": torch.randn(HEADS),
        },
    ],
    ids=["llama", "everything"],
)
def test_prefill_then_decode(isa, kind, extra):
    decoder, model = build(kind, "fp32", isa, **extra)
    for layer in model["layers"]:
        layer["gate_act"] = extra.get("gate", "silu")
        layer["gate"] = layer.pop("gate")
    table = page_table([200, 64, 48], PAGE, 40)
    caches = [tuple(torch.zeros(40, PAGE, KV_HEADS, DIM) for _ in range(2)) for _ in range(3)]
    lens = [0, 0, 0]
    for queries in ([50, 17, 1], [1, 1, 1], [100, 0, 3]):
        lens = [n + q for n, q in zip(lens, queries, strict=True)]
        ids, rows = torch.randint(0, VOCABULARY, (sum(queries),)), torch.tensor([sum(queries) - 1, 0])
        hidden = torch.empty(sum(queries), HIDDEN)
        got = run(decoder, table, ids, queries, lens, rows, groups=decoder.n_groups, hidden=hidden)
        want, want_hidden = reference_step(model, caches, ids, table, queries, lens, rows)
        tolerance = {"fp32": 1e-4, "int8": 3e-3, "q4_1": 6e-2}[kind]
        assert (hidden - want_hidden).abs().max() <= tolerance * want_hidden.abs().max()
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["int8", "q4_1"])
def test_same_bits_for_any_chunks_threads_and_neighbours(isa, kind, format):
    n = 75
    ids = torch.randint(0, VOCABULARY, (n,))
    torch.manual_seed(1)
    decoder, _ = build(kind, format, isa)
    table = page_table([n, n], PAGE, 40)

    def feed(chunks, threads, neighbour=False):
        cpu.set_num_threads(threads)
        logits, at = [], 0
        for chunk in chunks:
            at += chunk
            part, queries, lens = ids[at - chunk : at], [chunk], [at]
            if neighbour:
                part, queries, lens = torch.cat([ids[:1], part]), [1, chunk], [1, at]
            rows = torch.arange(len(part) - chunk, len(part))
            logits.append(run(decoder, table[-len(lens) :] if neighbour else table[1:], part, queries, lens, rows))
        return torch.cat(logits)

    whole = feed([n], 1)
    assert torch.isfinite(whole).all()
    for chunks, threads, neighbour in [([n], 2, False), ([1] * n, 2, False), ([5] * 15, 1, True), ([16, 59], 3, True)]:
        assert torch.equal(feed(chunks, threads, neighbour), whole)


def test_embeddings_instead_of_ids(isa):
    decoder, model = build("int8", "fp32", isa)
    table, ids, rows = page_table([9], PAGE, 40), torch.randint(0, VOCABULARY, (9,)), torch.arange(9)
    want = run(decoder, table, ids, [9], [9], rows)
    batch = cpu.Ragged(table, starts([9]), torch.tensor([9], dtype=torch.int32))
    embeddings = model["head"][ids].float().contiguous()
    torch.testing.assert_close(decoder.step(None, [batch], rows, embeddings=embeddings), want, rtol=1e-3, atol=1e-3)
    assert decoder.step(ids, [batch], torch.zeros(0, dtype=torch.int64)).shape == (0, VOCABULARY)


def test_what_does_not_fit_is_said():
    decoder, _ = build("int8", "fp32", cpu.supported_isas()[0])
    layers, caches, norm, head, _ = decoder._kept
    layers[1].down = make("int8", HIDDEN, 32)[0]
    with pytest.raises(ValueError, match="layer 1: gate_up is 192x64 where"):
        cpu.Decoder(layers, caches, final_norm=norm, head=head)
