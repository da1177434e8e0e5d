"""The header of a GGUF file: metadata and where each tensor lies. Imports no torch.

The `gguf` package builds a numpy array for each string of the vocabulary, which takes seconds to tens of seconds; this
reads the same header in tens of milliseconds and leaves long arrays unread until they are asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from core.types import PartwiseError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SIZE = struct.Struct("<Q")
_LONG = 1024


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is row-major, `kind` the number of its block format, `offset` from the start of
    the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Unread:
    offset: int
    length: int


class GGUFFile:
    """An open GGUF file. `metadata[key]` gives a number, a string or a list. PartwiseError: not such a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise PartwiseError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error

    def let_go(self) -> None:
        """Give the memory of all that was read back to the system; what is touched again is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> None:
        magic, version, n_tensors, n_fields = struct.unpack_from("<4sIQQ", self.data)
        if magic != b"GGUF" or version not in (2, 3):
            raise PartwiseError(f"{self.path} is not a GGUF file of version 2 or 3")
        offset = 24
        self._fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key, offset = self._string(offset)
            (kind,) = struct.unpack_from("<I", self.data, offset)
            self._fields[key], offset = self._value(kind, offset + 4)
        infos = []
        for _ in range(n_tensors):
            name, offset = self._string(offset)
            (n_dims,) = struct.unpack_from("<I", self.data, offset)
            *dims, kind, start = struct.unpack_from(f"<{n_dims}QIQ", self.data, offset + 4)
            offset += 4 + 8 * n_dims + 12
            infos.append((name, tuple(reversed(dims)), kind, start))
        alignment = self._fields.get("general.alignment", 32)
        base = -(-offset // alignment) * alignment
        self.tensors = {name: GGUFTensor(name, shape, kind, base + start) for name, shape, kind, start in infos}

    def _string(self, offset: int) -> tuple[str, int]:
        (size,) = _SIZE.unpack_from(self.data, offset)
        end = offset + 8 + size
        return self.data[offset + 8 : end].decode(), end

    def _value(self, kind: int, offset: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(offset)
        if kind != _ARRAY:
            form = _SCALARS[kind]
            return struct.unpack_from(form, self.data, offset)[0], offset + struct.calcsize(form)
        item, length = struct.unpack_from("<IQ", self.data, offset)
        start, offset = offset, offset + 12
        if item == _ARRAY:
            values = []
            for _ in range(length):
                value, offset = self._value(_ARRAY, offset)
                values.append(value)
            return values, offset
        if item == _STRING:
            data, size_at = self.data, _SIZE.unpack_from
            for _ in range(length):
                offset += 8 + size_at(data, offset)[0]
        else:
            offset += length * struct.calcsize(_SCALARS[item])
        unread = _Unread(start, length)
        return (unread if length > _LONG else self._array(unread)), offset

    def _array(self, unread: _Unread) -> list[Any]:
        (item,) = struct.unpack_from("<I", self.data, unread.offset)
        offset = unread.offset + 12
        if item != _STRING:
            return list(struct.unpack_from(f"<{unread.length}{_SCALARS[item][1]}", self.data, offset))
        strings = []
        for _ in range(unread.length):
            text, offset = self._string(offset)
            strings.append(text)
        return strings

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        return _Metadata(self)

    def length(self, key: str) -> int | None:
        """How long an array is, without reading it. None: there is none."""
        value = self._fields.get(key)
        return None if value is None else value.length if isinstance(value, _Unread) else len(value)

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


class _Metadata(Mapping[str, Any]):
    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def __getitem__(self, key: str) -> Any:
        value = self._file._fields[key]
        return self._file._array(value) if isinstance(value, _Unread) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._file._fields)

    def __len__(self) -> int:
        return len(self._file._fields)
