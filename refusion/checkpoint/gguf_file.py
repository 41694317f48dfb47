"""The header of a GGUF file, and its tensors one by one.

Read here and not by gguf.GGUFReader, which needs seconds for the arrays of a large
vocabulary and doesn't notice a file that was cut short. Layout: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refusion.checkpoint.reasons import reason
from refusion.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_HEADER_COUNT = 1 << 28
_VALUES_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place: shape in PyTorch's order, type as ggml names it, bytes from `offset` of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


class _Cursor:
    """Reads little-endian values one after the other; a struct.error means the file ended."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.place)
        self.place += struct.calcsize("<" + code)
        return value

    def count(self) -> int:
        value = self.scalar("Q")
        if value > _LONGEST_HEADER_COUNT:
            raise ValueError(f"a length of {value} in the header")
        return value

    def text(self) -> str:
        size = self.count()
        if self.place + size > len(self.data):
            raise struct.error("text behind the end")
        raw = self.data[self.place : self.place + size]
        self.place += size
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.count()
            if inner in _SCALARS:
                return self.numbers(_SCALARS[inner], count)
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} in the header")
        return self.scalar(_SCALARS[kind])

    def numbers(self, code: str, count: int) -> list[Any]:
        form = f"<{count}{code}"
        found = list(struct.unpack_from(form, self.data, self.place))
        self.place += struct.calcsize(form)
        return found


class GgufFile:
    """Metadata and tensors of a GGUF file, mapped into memory.

    Raises:
        CheckpointError: not a GGUF file, of an unknown version, damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: can't be read ({reason(error)}); fetch it again") from error
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{path}: isn't a GGUF file; give a .gguf file or a Hugging Face folder")
        try:
            self._read_header(_Cursor(self._data))
        except struct.error as error:
            raise CheckpointError(f"{path}: the file ends inside its header; fetch it again") from error
        except (ValueError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path}: the header is damaged ({reason(error)}); fetch the file again") from error

    def _read_header(self, cursor: _Cursor) -> None:
        cursor.place = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version} isn't supported (2 and 3, little-endian, are)")
        tensor_count, value_count = cursor.count(), cursor.count()
        for _ in range(value_count):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        raw = []
        for _ in range(tensor_count):
            name = cursor.text()
            dims = cursor.numbers("Q", cursor.scalar("I"))
            raw.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.place // alignment) * alignment
        for name, shape, kind, offset in raw:
            self.tensors[name] = self._info(name, shape, kind, start + offset)

    def _info(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {name} is of unknown type {kind}; update gguf") from error
        block, size = GGML_QUANT_SIZES[quantisation]
        elements = int(np.prod(shape, dtype=object)) if shape else 1
        nbytes = elements // block * size
        if (shape[-1] if shape else 1) % block:
            raise CheckpointError(f"{self.path}: tensor {name} has rows that don't fill {quantisation.name} blocks")
        if offset + nbytes > len(self._data):
            raise CheckpointError(
                f"{self.path}: the file is cut short, tensor {name} ends at byte {offset + nbytes} "
                f"of {len(self._data)}; fetch it again"
            )
        return TensorInfo(name, shape, quantisation.name, offset, nbytes)

    def tensor(self, name: str) -> Tensor:
        """A tensor in float32, dequantised.

        Raises:
            CheckpointError: its type can't be dequantised.
            KeyError: there is no such tensor.
        """
        info = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        try:
            values = _dequantised(raw, info)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is quantised as {info.kind}, which can't be read; "
                "use a file in F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K"
            ) from error
        return torch.from_numpy(values.reshape(info.shape))

    def need(self, key: str) -> Any:
        """
        Raises:
            CheckpointError: the metadata lack the key.
        """
        if key not in self.metadata:
            raise CheckpointError(f"{self.path}: the metadata lack {key}; convert the model to GGUF again")
        return self.metadata[key]

    def number(self, key: str, default: float | None = None) -> Any:
        """A number; some writers store one for every layer, which is accepted if all are equal.

        Raises:
            CheckpointError: missing without a default, or different from layer to layer.
        """
        value = self.need(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(set(value)) != 1:
                raise CheckpointError(f"{self.path}: {key} differs between layers, which isn't supported")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self.path}: {key} isn't a number; convert the model to GGUF again")
        return value


def _dequantised(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    """float32 values in memory of their own, so that nothing writes to the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(info.kind)
    if plain is not None:
        return raw.view(plain).astype(np.float32)
    kind = GGMLQuantizationType[info.kind]
    block, size = GGML_QUANT_SIZES[kind]
    count = info.nbytes // size
    values = np.empty((count, block), np.float32)
    # a run of blocks at a time: gguf's own loop over rows is slow, and one call for all needs much memory
    step = max(_VALUES_AT_ONCE // block, 1)
    for start in range(0, count, step):
        stop = min(start + step, count)
        run = raw[start * size : stop * size].reshape(1, -1)
        values[start:stop] = dequantize(run, kind).reshape(-1, block)
    return values
