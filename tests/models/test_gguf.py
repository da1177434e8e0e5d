"""GGUF files: every architecture and block format gives the logits of the model that was written."""

from __future__ import annotations

import gguf
import pytest
import torch

from core.models.dequant import dequantize
from core.models.gguf_file import GGUFFile
from core.models.loading import open_model
from core.types import PartwiseError
from tests.models.gguf_writer import rounded, write
from tests.models.harness import chunked, load, prefill
from tests.models.test_families import close, ids
from tests.models.tiny import BASE, FAMILIES, GEMMA, LONG, logits, make

WIDE = {**BASE, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
FILES = {
    "llama": FAMILIES["llama"],
    "llama-tied": FAMILIES["llama-tied"],
    "mixtral": FAMILIES["mixtral"],
    "qwen2": ("Qwen2", BASE),
    "qwen3": FAMILIES["qwen3"],
    "qwen3-moe": ("Qwen3Moe", {**FAMILIES["qwen3-moe"][1], "mlp_only_layers": []}),
    "gemma-2": ("Gemma2", {**FAMILIES["gemma-2"][1], "query_pre_attn_scalar": 16}),
    "gemma-3": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "phi-3": ("Phi3", BASE),
    "olmo-2": FAMILIES["olmo-2"],
    "gpt-oss": FAMILIES["gpt-oss"],
}


@pytest.mark.parametrize("name", FILES)
def test_architectures(tmp_path, name):
    reference = make(name, tmp_path, FILES)
    file = tmp_path / "model.gguf"
    write(reference, file)
    model = load(str(file))
    expected = logits(reference, ids())
    close(prefill(model, ids()), expected)
    close(chunked(model, ids(), 6), expected)
    assert model.eos_token_ids == (2, 5)
    assert model.tokenizer_vocab == 96


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_block_formats(tmp_path, kind):
    """Rows of q and k are stored permuted, in whole blocks."""
    reference = make("wide", tmp_path, {"wide": ("Llama", WIDE)})
    file = tmp_path / "model.gguf"
    write(reference, file, quantize=kind)
    with torch.no_grad():
        for tensor in reference.state_dict().values():
            if tensor.dim() == 2:
                tensor.copy_(rounded(tensor, kind))
    close(prefill(load(str(file)), ids()), logits(reference, ids()))


def test_raw_blocks_are_those_of_the_rows(tmp_path):
    reference = make("wide", tmp_path, {"wide": ("Llama", WIDE)})
    file = tmp_path / "model.gguf"
    write(reference, file, quantize="Q4_1")
    seen = {}

    class Watch:
        def linear(self, name, weights, bias, dtype):
            for weight in weights:
                seen.setdefault(name, []).append(weight)
            return _Never()

        def embedding(self, name, weight, dtype):
            return None

        def tied_head(self, name, embedding, dtype):
            return None

    from core.interfaces.plugin import BuildContext, Options
    from core.models.loading import load_model
    from plugins.attention.native import NativeStructure

    load_model(open_model({"path": str(file)}), structure=NativeStructure(Options(), BuildContext()), weights=Watch())
    q, k, v = seen["layers.1.attn.q.weight"]
    assert {weight.storage for weight in (q, k, v)} == {"q4_1"}
    attention = reference.model.layers[1].self_attn
    for weight, linear in ((q, attention.q_proj), (k, attention.k_proj), (v, attention.v_proj)):
        raw = weight.raw()
        assert raw.dtype == torch.uint8 and raw.shape == (weight.shape[0], weight.shape[1] // 32 * 20)
        torch.testing.assert_close(dequantize(raw, "q4_1", torch.float32), rounded(linear.weight, "Q4_1"))
        torch.testing.assert_close(weight.dense(), rounded(linear.weight, "Q4_1"))


class _Never:
    nbytes, out_features = 0, 96


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_decoding_equals_the_package(kind):
    number = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[number]
    raw = torch.randint(0, 256, (7, 3 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), number))
    found = dequantize(raw, kind.lower(), torch.float32)
    assert found.shape == (7, 3 * numbers)
    torch.testing.assert_close(found, expected, equal_nan=True, atol=0, rtol=1e-6)


def test_scaling_by_factors(tmp_path):
    """Llama 3.1 files hold a divisor for each frequency."""
    reference = make("llama-3", tmp_path)
    rotary = reference.model.rotary_emb
    plain = 1.0 / (500.0 ** (torch.arange(0, 12, 2).float() / 12))
    write(reference, tmp_path / "model.gguf", extra={"rope_freqs.weight": plain / rotary.inv_freq})
    close(prefill(load(str(tmp_path / "model.gguf")), ids()), logits(reference, ids()))


def test_longrope(tmp_path):
    reference = make("phi-3-longrope", tmp_path)
    factors = {f"rope_factors_{x}.weight": torch.tensor(LONG[f"{x}_factor"]) for x in ("long", "short")}
    file = tmp_path / "model.gguf"
    write(reference, file, extra=factors)
    close(prefill(load(str(file), max_model_len=64), ids()), logits(reference, ids()))
    close(prefill(load(str(file), max_model_len=100), ids(90)), logits(reference, ids(90)))


def test_what_is_wrong_with_a_file(tmp_path):
    reference = make("llama", tmp_path)
    file = tmp_path / "model.gguf"
    write(reference, file)
    whole = file.read_bytes()

    def refused(content, *words):
        file.write_bytes(content)
        with pytest.raises(PartwiseError) as caught:
            load(str(file))
        for word in (str(file), *words):
            assert word in str(caught.value)

    refused(whole[:-4000], "beyond the end")
    refused(whole[:200], "not a whole GGUF file")
    refused(b"GGML" + whole[4:], "not a GGUF file")
    refused(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"), "blk.1.ffn_xx", "no tensor")
    refused(whole.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"), "layers.1.mlp.up.weight", "missing")
    refused(whole.replace(b"\x05\0\0\0\0\0\0\0llama\x14", b"\x05\0\0\0\0\0\0\0llamb\x14"), "llamb")


def test_arrays_are_read_when_asked_for(tmp_path):
    import numpy as np

    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("short", [1, 2, 3])
    writer.add_array("words", [f"w{i}" for i in range(5000)])
    writer.add_array("numbers", [float(i) for i in range(5000)])
    writer.add_bool("flag", True)
    writer.add_float32("real", 0.5)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GGUFFile(file)
    assert read.architecture == "llama"
    assert read.metadata["short"] == [1, 2, 3]
    assert read.metadata["words"][4999] == "w4999" and read.length("words") == 5000
    assert read.metadata["numbers"] == [float(i) for i in range(5000)]
    assert read.metadata["flag"] is True and read.metadata["real"] == 0.5
    assert read.length("absent") is None
    assert read.tensors["t"].shape == (2, 3)
