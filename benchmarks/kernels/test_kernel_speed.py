"""Each compiled kernel against its torch reference and the machine's limits; shapes of a 135M llama.

pytest benchmarks/kernels --benchmark-enable --benchmark-json=kernels.json
"""

import functools

import pytest
import torch

from kernels import cpu
from kernels.reference.attention import paged_attention as attention_reference

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCABULARY, PAGE = 30, 576, 9, 3, 64, 1536, 49152, 16


def weight(kind, n, k):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale = torch.full((n, k // 32), 0.004).half()
    match kind:
        case "fp32":
            return cpu.pack_fp32(torch.randn(n, k) * 0.02)
        case "int8":
            return cpu.pack_int8(codes.to(torch.int8), torch.full((n,), 0.004))
        case "q8_0":
            return cpu.pack_q8_0(codes.to(torch.int8), scale)
        case "q4_0":
            return cpu.pack_q4_0(codes, scale)
        case _:
            return cpu.pack_q4_1(codes, scale, (-8 * scale).half())


@functools.cache
def model(kind, head_kind):
    angles = torch.outer(torch.arange(8192.0), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    cos, sin, norm = angles.cos(), angles.sin(), torch.ones(HIDDEN)
    shapes = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
    layers = [
        cpu.DecoderLayer(*[weight(kind, *shape) for shape in shapes], norm, norm, HEADS, cos, sin, DIM**-0.5)
        for _ in range(LAYERS)
    ]
    return layers, weight(head_kind, VOCABULARY, HIDDEN), norm


def cache(format, n_pages):
    made = cpu.KVCache.allocate(format, n_pages, PAGE, KV_HEADS, DIM, DIM)
    for tensor in (made.k, made.v, made.k_scale, made.v_scale):
        if tensor is not None:
            tensor.random_(-127, 128) if tensor.dtype == torch.int8 else tensor.fill_(0.01)
    return made


def ragged(batch, queries, context):
    n = batch * -(-context // PAGE)
    table = torch.randperm(n).int().view(batch, -1).contiguous()
    starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32)
    return cpu.Ragged(table, starts, torch.full((batch,), context, dtype=torch.int32)), n


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    "batch, queries, context", [(1, 1, 256), (32, 1, 256), (16, 1, 1024), (1, 1, 8192), (1, 1024, 1024)]
)
def test_attention(measured, isa, format, batch, queries, context):
    requests, n_pages = ragged(batch, queries, context)
    pages = cache(format, n_pages)
    q, out = torch.randn(batch * queries, HEADS, DIM), torch.empty(batch * queries, HEADS, DIM)
    keys, values = cpu.kv_read(pages, torch.arange(n_pages))
    held = sum(t.numel() * t.element_size() for t in (pages.k, pages.v, pages.k_scale, pages.v_scale) if t is not None)
    seen = batch * (queries * context - queries * (queries - 1) // 2)
    measured(
        lambda: cpu.paged_attention(q, pages, requests, scale=DIM**-0.5, out=out, isa=isa),
        n_bytes=held,
        n_macs=seen * HEADS * DIM * 2,
        reference=lambda: attention_reference(
            q, keys, values, requests.page_table, requests.query_start, requests.kv_len, scale=DIM**-0.5
        ),
    )


@pytest.mark.parametrize("kind", ["fp32", "int8", "q8_0", "q4_1", "q4_0"])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128])
def test_linear(measured, isa, kind, rows):
    packed, x = weight(kind, 2 * FFN, HIDDEN), torch.randn(rows, HIDDEN)
    plain = cpu.dequantize(packed)
    measured(
        lambda: cpu.linear(x, packed, isa=isa),
        n_bytes=packed.nbytes,
        n_macs=rows * packed.n * packed.k,
        reference=lambda: torch.nn.functional.linear(x, plain),
    )


@pytest.mark.parametrize(
    "kinds", [("int8", "int8", "int8"), ("q4_1", "q8_0", "int8"), ("q4_1", "q8_0", "fp32")], ids="-".join
)
@pytest.mark.parametrize(
    "batch, queries, context", [(1, 1, 256), (4, 1, 256), (16, 1, 256), (64, 1, 256), (16, 1, 1024), (1, 1024, 1024)]
)
def test_step(measured, isa, kinds, batch, queries, context):
    kind, head_kind, format = kinds
    requests, n_pages = ragged(batch, queries, context)
    layers, head, norm = model(kind, head_kind)
    caches = [cache(format, n_pages) for _ in layers]
    decoder = cpu.Decoder(layers, caches, final_norm=norm, head=head, embed=head, isa=isa)
    ids, rows = torch.randint(0, VOCABULARY, (batch * queries,)), torch.arange(queries - 1, batch * queries, queries)
    logits = torch.empty(batch, VOCABULARY)
    weights = sum(w.nbytes for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    kv = sum(t.numel() * t.element_size() for c in caches for t in (c.k, c.v, c.k_scale, c.v_scale) if t is not None)
    per_token = sum(w.n * w.k for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    measured(
        lambda: decoder.step(ids, [requests], rows, logits=logits),
        n_bytes=weights + head.nbytes + kv,
        n_macs=batch * queries * per_token + batch * head.n * head.k,
    )
