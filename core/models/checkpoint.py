"""Checkpoint files to weights under canonical names: folders of safetensors, and GGUF files. Nothing is read before
it is asked for."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.interfaces.model import Weights
from core.models.config import ModelConfig
from core.models.dequant import block_bytes
from core.models.gguf_file import GGUFFile, GGUFTensor
from core.models.names import canonical, gguf_naming, hf_naming
from core.models.stored import BlockWeight, MXFP4Weight, PlainWeight, Weight
from core.types import PartwiseError

_PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)(?!vision_tower)")
_PLAIN_KINDS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


def open_folder(folder: Path, config: ModelConfig, dtype: torch.dtype, device: str, interleaved: bool) -> Weights:
    """A folder of safetensors, whole or in shards, memory-mapped. `interleaved`: its rotary rows come as pairs.
    PartwiseError names what is wrong."""
    tensors = {_PREFIX.sub("", name): weight for name, weight in folder_tensors(folder, dtype, device).items()}
    return Weights(canonical(config, hf_naming(config, interleaved), _paired(tensors, dtype, device), str(folder)))


def folder_tensors(folder: Path, dtype: torch.dtype, device: str) -> dict[str, PlainWeight]:
    """Every tensor of a folder's safetensors by its own name."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, PlainWeight] = {}
    for path in _shards(folder):
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise PartwiseError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name in found:
                raise PartwiseError(f"{folder}: tensor {name} lies in two files")
            part = file.get_slice(name)
            stored = _stored_dtype(part.get_dtype())
            open = _opener(file, name)
            found[name] = PlainWeight(open, part.get_shape(), stored, dtype, device)
    return found


def _opener(file: Any, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)


def _stored_dtype(name: str) -> torch.dtype:
    known = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    return known.get(name, torch.uint8)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise PartwiseError(f"{folder}: {', '.join(absent)} named in {index.name} is missing; fetch it again")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise PartwiseError(f"{folder} holds no *.safetensors; convert the model (save_pretrained writes them)")
    return found


def _paired(tensors: dict[str, PlainWeight], dtype: torch.dtype, device: str) -> dict[str, Weight]:
    """MXFP4 blocks and scales, stored as two tensors, as one."""
    found: dict[str, Weight] = {}
    for name, weight in tensors.items():
        scales = tensors.get(name.removesuffix("_blocks") + "_scales")
        if name.endswith("_blocks") and scales:
            *rows, groups, packed = weight.shape
            shape = (*rows, groups * packed * 2)
            found[name] = MXFP4Weight(weight.open, scales.open, shape, dtype, device)
        elif not (name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors):
            found[name] = weight
    return found


def open_gguf(file: GGUFFile, config: ModelConfig, dtype: torch.dtype, device: str) -> Weights:
    """A GGUF file, memory-mapped. PartwiseError names what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        data = torch.frombuffer(file.data, dtype=torch.uint8)
    tensors = {name: _gguf_weight(file, data, info, dtype, device) for name, info in file.tensors.items()}
    return Weights(canonical(config, gguf_naming(config), tensors, str(file.path)))


def _gguf_weight(file: GGUFFile, data: Tensor, info: GGUFTensor, dtype: torch.dtype, device: str) -> Weight:
    *rows, columns = info.shape
    plain = _PLAIN_KINDS.get(info.kind)
    if plain:
        storage, width = "", columns * plain.itemsize
    else:
        storage, width = _block_format(file, info)
    size = width * (info.elements // columns)
    if info.offset + size > data.numel():
        raise PartwiseError(f"{file.path}: tensor {info.name} goes beyond the end of the file; fetch it again")
    part = data[info.offset : info.offset + size]
    if plain:
        return PlainWeight(lambda: part.view(plain).view(info.shape), info.shape, plain, dtype, device)
    return BlockWeight(lambda: part.view(*rows, width), info.shape, storage, dtype, device)


def _block_format(file: GGUFFile, info: GGUFTensor) -> tuple[str, int]:
    """The format's name, and the bytes of a row."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(info.kind)
        return kind.name.lower(), block_bytes(info.shape[-1], *GGML_QUANT_SIZES[kind])
    except ValueError as error:
        raise PartwiseError(f"{file.path}: tensor {info.name}: {error}") from None
