"""The compiled kernels as parts: stored numbers, whole steps beside layers one by one, and machines without them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.build import build_engine
from core.compose import compose
from core.interfaces import BuildContext
from core.interfaces.plugin import Options
from core.kv import Pool
from core.models.source import read_spec, resolve
from core.models.tokenizer import load_tokenizer
from core.testing.serving import Served, drain, greedy
from core.types import KVGroup
from kernels import cpu
from kernels.cpu.modules import Product, Table, unavailable
from plugins.attention.cpu_paged import PagedCPUKernel
from plugins.quantizer.cpu_int4 import Int4Weights
from plugins.quantizer.cpu_kv_int8 import PackedInt8KV
from plugins.quantizer.cpu_native import NativeWeights, RoundedNativeWeights
from plugins.quantizer.weights_int8 import Int8Weights, quantize
from tests.models.tiny import make

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
CONTEXT = BuildContext()


class Stored:
    """A tensor of a GGUF file, with blocks of `storage`; or fp32."""

    def __init__(self, weight, storage="f32"):
        gguf = pytest.importorskip("gguf")
        kind = gguf.GGMLQuantizationType[storage.upper()]
        self.bytes = gguf.quants.quantize(weight.numpy(), kind)
        self.numbers = torch.from_numpy(gguf.quants.dequantize(self.bytes, kind))
        self.storage, self.shape = storage, tuple(weight.shape)

    def dense(self):
        return self.numbers

    def raw(self):
        return torch.from_numpy(self.bytes)


def native(*weights, bias=None, part=NativeWeights):
    return part(Options(), CONTEXT).linear("w", weights, bias, torch.float32)


# --- weights -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    storage=st.sampled_from(["f32", "q4_0", "q4_1", "q8_0"]),
    heights=st.lists(st.sampled_from([5, 16, 48]), min_size=1, max_size=3),
    rows=st.integers(1, 20),
    bias=st.booleans(),
)
def test_native_products_are_those_of_the_opened_file(storage, heights, rows, bias):
    weights = [Stored(torch.randn(n, 96), storage) for n in heights]
    offset, x = torch.randn(sum(heights)) if bias else None, torch.randn(rows, 96)
    exact = x.double() @ torch.cat([w.dense() for w in weights]).double().T + (0 if offset is None else offset)
    found = native(*weights, bias=offset)(x)
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_native_keeps_the_bytes_of_the_file():
    stored = Stored(torch.randn(64, 256), "q4_1")
    assert native(stored, stored).nbytes == 2 * stored.raw().numel()
    assert native(stored, Stored(torch.randn(64, 256), "q8_0")).packed.kind == "fp32"


def test_rounded_inputs_are_near_and_not_exact():
    stored, x = Stored(torch.randn(64, 256), "q4_1"), torch.randn(5, 256)
    exact, rounded = native(stored)(x), native(stored, part=RoundedNativeWeights)(x)
    error = (exact - rounded).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("storage, planes, bound", [("q4_1", 2, 1e-4), ("q4_1", 3, 1e-6), ("q8_0", 2, 1e-6)])
def test_planes_add_up_to_the_inputs(storage, planes, bound):
    stored, x = Stored(torch.randn(50, 320), storage), torch.randn(13, 320)
    packed = replace(cpu.blocks_from_gguf([stored.raw()], storage.upper()), planes=planes)
    exact = x.double() @ stored.dense().double().T
    error = (cpu.linear(x, packed) - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert error <= bound


@pytest.mark.parametrize("part", [NativeWeights, Int8Weights, Int4Weights])
def test_woven_matrices_come_out_in_order_and_are_held_once(part):
    gate, up, x = torch.randn(32, 64), torch.randn(32, 64), torch.randn(7, 64)
    quantizer = part(Options(), CONTEXT)
    both = quantizer.linear("gate", [Stored(gate), Stored(up)], torch.arange(64.0), torch.float32)
    assert both.woven and both.out_features == 64
    for half, weight, bias in ((0, gate, torch.arange(32.0)), (1, up, torch.arange(32.0, 64.0))):
        alone = quantizer.linear("one", [Stored(weight)], bias, torch.float32)(x)
        assert torch.equal(both(x)[:, 32 * half : 32 * half + 32], alone)


def test_int8_stores_the_codes_that_torch_would():
    weight = torch.randn(48, 64)
    codes, scales = quantize(weight)
    found = Int8Weights(Options(), CONTEXT).linear("w", [Stored(weight)], None, torch.float32)
    assert isinstance(found, Product) and found.packed.kind == "int8"
    assert torch.equal(cpu.dequantize(found.packed), codes * scales[:, None])


def test_int4_keeps_table_and_heads_in_8_bits():
    part, weight = Int4Weights(Options(), CONTEXT), Stored(torch.randn(64, 64))
    table = part.embedding("embed.weight", weight, torch.float32)
    assert isinstance(table, Table) and table.packed.kind == "int8"
    assert part.tied_head("head.weight", table, torch.float32).packed is table.packed
    assert part.linear("head.weight", [weight], None, torch.float32).packed.kind == "int8"
    assert part.linear("layers.0.attn.o.weight", [weight], None, torch.float32).packed.kind == "q4_0"


def test_products_keep_the_type_of_their_inputs():
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert native(Stored(torch.randn(16, 64)))(x).dtype == torch.bfloat16


# --- keys and values -----------------------------------------------------------------------------------------------


class TorchPackedInt8KV(PackedInt8KV):
    """As on a machine on which the compiled kernels do not work."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._compiled = False


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_both_ways_of_writing_store_the_same(page_size, scale):
    group = KVGroup("full", (0,), kv_heads=2, key_dim=32, value_dim=48)
    k, v = torch.randn(40, 2, 32) * scale, torch.randn(40, 2, 48) * scale
    slots = torch.randperm(5 * page_size)[:40]
    found = []
    for part in (PackedInt8KV, TorchPackedInt8KV):
        quantizer = part(Options(), BuildContext(page_size=page_size))
        pool = Pool(group, 0, 5, page_size, quantizer, torch.float32)
        pool.layers[0].write(k, v, slots)
        found.append(quantizer.read(pool.layers[0].storage, torch.arange(5), 5 * page_size))
    for compiled, plain, wanted in zip(*found, (k, v), strict=True):
        bound = wanted.abs().amax(-1, keepdim=True) / 250 + 1e-6
        assert ((compiled[slots] - wanted).abs() <= bound).all()
        assert ((plain[slots] - wanted).abs() <= bound).all()


def test_int8_cpu_says_what_it_cannot_store():
    assert "multiple of 16" in PackedInt8KV.unfit(Options(), BuildContext(page_size=8))[0]
    part = PackedInt8KV(Options(), BuildContext(page_size=16))
    with pytest.raises(ValueError, match="a latent"):
        part.format(KVGroup("latent", (0,), 1, 48, 32, value_in_key=True), 16, torch.float32)
    with pytest.raises(ValueError, match="heads of 40 keys"):
        part.format(KVGroup("full", (0,), 1, 40, 40), 16, torch.float32)


# --- whole steps ---------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(scope="module", params=["Llama", "Llama-untied", "Qwen3", "Gemma2"])
def folder(request, tmp_path_factory):
    """A tiny model on disk, of a family that steps can be fused for."""
    from tests.models.tiny import BASE, GEMMA

    family, _, untied = request.param.partition("-")
    base = {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0} if family == "Gemma2" else BASE
    path = tmp_path_factory.mktemp(request.param)
    make(family, path, {family: (family, {**base, **TINY, "tie_word_embeddings": not untied})})
    return path


PROMPTS = [[3, 4], list(range(10, 47)), [7, 7, 7, 7, 7, 7], [5], list(range(20, 37))]


def engine_of(model, *words, kernel="cpu_paged", weights="native"):
    parts = [f"model={model}", f"attention.kernel={kernel}", f"quantizer.weights={weights}", "drafter=none"]
    return build_engine(compose("premium_chat", [*parts, "memory.kv_bytes=8MiB", *words]))


def answers(engine, prompts=PROMPTS):
    served = Served()
    try:
        for n, prompt in enumerate(prompts):
            engine.add(greedy(str(n), tuple(prompt)))
        drain(engine, served)
    finally:
        engine.close()
    return served


def agree(found, wanted, tie=1e-3, bound=2e-3):
    """The same tokens up to a tie, with logprobs within `bound`."""
    assert not found.errors and not wanted.errors
    compared = 0
    for name, scores in wanted.logprobs.items():
        for a, b in zip(found.logprobs[name], scores, strict=False):
            best, second = (score for _, score in b.top)
            if a.token != b.token:
                assert best - second <= tie, (a, b)
                break
            assert abs(a.logprob - b.logprob) <= bound, (a, b)
            compared += 1
    assert compared > 0.9 * sum(map(len, wanted.tokens.values()))


def test_a_fused_step_gives_what_eager_attention_and_dense_weights_give(folder):
    engine = engine_of(folder)
    assert engine.runner.fused
    agree(answers(engine), answers(engine_of(folder, kernel="eager", weights="none")))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_fused_step_gives_what_its_layers_one_by_one_give(folder, weights):
    fused, single = engine_of(folder, weights=weights), engine_of(folder, kernel="eager", weights=weights)
    assert fused.runner.fused and not single.runner.fused
    # One rounding of an input that falls the other way is seen in the logits, more so in 8 bits.
    agree(answers(fused), answers(single), tie=0.1, bound=0.1)


def test_drafts_chunks_neighbours_and_threads_change_nothing(folder):
    wanted = answers(engine_of(folder)).tokens
    for words in (
        ["scheduler.token_budget=5"],
        ["scheduler.max_running=1"],
        ["engine.threads=2", "scheduler.token_budget=16"],
        ["prefix_cache=none", "kv_allocator=contiguous"],
        ["kv_allocator.page_size=5"],
    ):
        engine = engine_of(folder, *words)
        assert engine.runner.fused
        assert answers(engine).tokens == wanted, words


def test_int8_keys_and_values_are_read_alike_by_every_kernel(folder):
    fused = answers(engine_of(folder, "quantizer.kv=int8_cpu"))
    eager = answers(engine_of(folder, "quantizer.kv=int8_cpu", kernel="eager"))
    agree(fused, eager, tie=0.1, bound=0.1)


def test_what_cannot_be_fused_runs_layer_by_layer(tmp_path):
    from tests.models.tiny import BASE, FAMILIES

    make("deepseek-v2", tmp_path / "latent", FAMILIES)
    make("odd", tmp_path / "odd", {"odd": ("Llama", {**BASE, "intermediate_size": 72})})
    for name in ("latent", "odd"):
        engine = engine_of(tmp_path / name)
        assert not engine.runner.fused
        agree(answers(engine), answers(engine_of(tmp_path / name, kernel="eager", weights="none")))
    dense = engine_of(tmp_path / "odd", weights="none")
    assert not dense.runner.fused
    dense.close()


def test_bfloat16_models_run_unfused(folder):
    engine = engine_of(folder, "engine.dtype=bfloat16")
    assert not engine.runner.fused
    assert not answers(engine).errors


def test_numbers_that_the_kernels_cannot_read_are_said_before_weights_load(folder):
    from core.recipe import RecipeError

    with pytest.raises(RecipeError, match=r"cpu_paged.*engine.dtype is float16; attention.kernel=sdpa does"):
        engine_of(folder, "engine.dtype=float16", "attention.kernel.otherwise=null")


def test_a_part_that_cannot_be_used_gives_way_to_the_one_named_otherwise(folder, caplog):
    engine = engine_of(folder, "engine.dtype=float16")
    assert engine.parts["attention.kernel"] == "sdpa" and "'sdpa'" in engine.labels["attention.kernel"]
    assert engine.parts["quantizer.weights"] == "native"
    assert "attention.kernel=sdpa in place of cpu_paged" in caplog.text and "float16" in caplog.text
    assert not answers(engine).errors
    used = engine_of(folder)
    assert used.parts["attention.kernel"] == "cpu_paged"
    used.close()


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.timeout(900)
def test_native_weights_give_the_tokens_of_the_opened_file():
    texts = ["The", "def quicksort(items):\n", "Once upon a time", "1, 2, 3, 4,", "SELECT name FROM", "La vie est"]
    words = ["engine.max_model_len=512"]
    engine = engine_of("smollm2_135m", *words)
    assert engine.runner.fused
    tokenizer = load_tokenizer(resolve(read_spec(compose("premium_chat").model)))
    prompts = [tokenizer.encode(text) for text in texts]
    dense = engine_of("smollm2_135m", *words, kernel="sdpa", weights="none")
    agree(answers(engine, prompts), answers(dense, prompts))


# --- machines without a compiler -----------------------------------------------------------------------------------


def alone(code: str, **environment: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_a_compiler_parts_say_what_to_choose_instead(tmp_path):
    code = (
        "from core.compose import compose; from core.build import build_engine\n"
        f"words = ['attention.kernel.otherwise=null', 'model={tiny(tmp_path)}']\n"
        "try: build_engine(compose('cpu_fast', words))\n"
        "except Exception as error: print(error)\n"
    )
    said = alone(code, CC="nowhere", XDG_CACHE_HOME=str(tmp_path))
    assert "CC=nowhere was not found" in said
    assert "attention.kernel=sdpa" in said and "quantizer.weights=none" in said


def test_without_a_compiler_premium_chat_is_served_by_torch(tmp_path):
    code = (
        "from core.compose import compose; from core.build import build_engine\n"
        f"engine = build_engine(compose('premium_chat', ['model={tiny(tmp_path)}', 'memory.kv_bytes=8MiB']))\n"
        "print(engine.parts['attention.kernel'], engine.parts['quantizer.weights'])\n"
    )
    said = alone(code, CC="nowhere", XDG_CACHE_HOME=str(tmp_path))
    assert "sdpa none" in said and "CC=nowhere was not found" in said


def test_without_a_compiler_int8_goes_through_torch(tmp_path):
    parts = ["attention.kernel=sdpa", "quantizer.weights=int8", "quantizer.kv=int8_cpu"]
    words = [f"model={tiny(tmp_path)}", *parts, "memory.kv_bytes=8MiB"]
    code = (
        "from core.testing.serving import serve; from core.compose import compose\n"
        f"served = serve(compose('premium_chat', {words!r}))\n"
        "print(served.errors, set(served.reasons.values()) <= {'length', 'stop'})\n"
    )
    assert alone(code, CC="nowhere", XDG_CACHE_HOME=str(tmp_path)).strip() == "{} True"


def tiny(folder: Path) -> Path:
    from tests.models.tiny import BASE

    make("Llama", folder / "model", {"Llama": ("Llama", {**BASE, **TINY})})
    return folder / "model"


@pytest.mark.slow
def test_the_first_use_says_that_it_builds(tmp_path):
    code = "from kernels.cpu.modules import unavailable; assert not unavailable()"
    assert "building the CPU kernels" in alone(code, XDG_CACHE_HOME=str(tmp_path))
    assert alone(code, XDG_CACHE_HOME=str(tmp_path)) == ""


def test_threads_are_those_of_the_recipe(folder):
    for n in (1, 2):
        engine_of(folder, f"engine.threads={n}").close()
        assert cpu.num_threads() == min(n, len(os.sched_getaffinity(0)))


def test_a_layer_is_read_from_the_pool_it_is_given():
    """Two pools, the same layer number: the second must not be read from the first."""
    from core.testing.paged import Row, make_case
    from plugins.quantizer.kv_none import PlainKV

    kernel = PagedCPUKernel(Options(), CONTEXT)
    for seed in (0, 1):
        case = make_case([Row(1, 40)], PlainKV(Options(), CONTEXT), page_size=16, seed=seed)
        found = kernel.forward(case.q, case.kv, case.layer, case.batch, kernel.prepare(case.batch, [case.layer]))
        torch.testing.assert_close(found.double(), case.expected(), atol=2e-5, rtol=2e-5)
