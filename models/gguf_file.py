"""Header of a GGUF file: metadata and where each tensor lies (gguf specification, versions 2 and 3).

`gguf.GGUFReader` makes an array view of every string of the tokenizer, which takes seconds; here strings are skipped
over and decoded when asked for. Pure Python, so that processes without torch can read configs and tokenizers.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from models.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufArray:
    """A metadata array that has not been decoded yet."""

    item_type: int
    count: int
    offset: int


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: shape in row-major order (the file has it reversed), position and size in bytes in the file."""

    name: str
    shape: tuple[int, ...]
    quant: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """A parsed header. Scalars and strings are in `fields`; `array(name)` decodes an array.

    Raises ModelError if the file is not GGUF, is of an unsupported version, or is shorter than its tensors need.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, object] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error})") from error
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError, IndexError) as error:
            raise ModelError(f"{path}: the GGUF header is truncated or corrupt") from error

    def array(self, name: str) -> list:
        """The decoded items of array `name`; KeyError if there is none."""
        found = self.fields[name]
        if not isinstance(found, GgufArray):
            raise KeyError(name)
        if found.item_type in _SCALARS:
            return list(struct.unpack_from(f"<{found.count}{_SCALARS[found.item_type]}", self._data, found.offset))
        return list(self._strings(found))

    def bytes_of(self, tensor: GgufTensor) -> memoryview:
        """The raw bytes of `tensor`, mapped from the file (copy on write: torch wants writable buffers)."""
        return memoryview(self._data)[tensor.offset : tensor.offset + tensor.num_bytes]

    def _strings(self, array: GgufArray) -> Iterator[str]:
        position = array.offset
        for _ in range(array.count):
            text, position = self._string(position)
            yield text

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, position)
        end = position + 8 + length
        if end > len(self._data):
            raise IndexError(position)
        return self._data[position + 8 : end].decode("utf-8", "replace"), end

    def _parse(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file")
        version, num_tensors, num_fields = struct.unpack_from("<IQQ", self._data, 4)
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        position = 24
        for _ in range(num_fields):
            position = self._parse_field(position)
        infos = []
        for _ in range(num_tensors):
            info, position = self._parse_tensor_info(position)
            infos.append(info)
        alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: field 'general.alignment' has an impossible value: {alignment!r}")
        self._place(infos, -(-position // alignment) * alignment)

    def _parse_field(self, position: int) -> int:
        name, position = self._string(position)
        (kind,) = struct.unpack_from("<I", self._data, position)
        position += 4
        if kind == _STRING:
            self.fields[name], position = self._string(position)
        elif kind == _ARRAY:
            item_type, count = struct.unpack_from("<IQ", self._data, position)
            position += 12
            self.fields[name] = GgufArray(item_type, count, position)
            position = self._skip_items(item_type, count, position)
        elif kind in _SCALARS:
            code = "<" + _SCALARS[kind]
            (self.fields[name],) = struct.unpack_from(code, self._data, position)
            position += struct.calcsize(code)
        else:
            raise ModelError(f"{self.path}: field {name!r} has an unknown type ({kind})")
        return position

    def _skip_items(self, item_type: int, count: int, position: int) -> int:
        if item_type in _SCALARS:
            return position + count * struct.calcsize("<" + _SCALARS[item_type])
        if item_type != _STRING:
            raise ModelError(f"{self.path}: arrays of type {item_type} are not supported")
        unpack, data = struct.Struct("<Q").unpack_from, self._data
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        return position

    def _parse_tensor_info(self, position: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, position = self._string(position)
        (num_dims,) = struct.unpack_from("<I", self._data, position)
        if num_dims > 8:
            raise IndexError(num_dims)
        shape = struct.unpack_from(f"<{num_dims}Q", self._data, position + 4)
        position += 4 + 8 * num_dims
        kind, offset = struct.unpack_from("<IQ", self._data, position)
        return (name, tuple(reversed(shape)), kind, offset), position + 12

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], data_start: int) -> None:
        for name, shape, kind, offset in infos:
            try:
                quant = GGMLQuantizationType(kind)
            except ValueError as error:
                raise ModelError(f"{self.path}: tensor {name} has an unknown quantization type ({kind})") from error
            block, block_bytes = GGML_QUANT_SIZES[quant]
            count = 1
            for extent in shape:
                count *= extent
            num_bytes = count // block * block_bytes
            start = data_start + offset
            if start + num_bytes > len(self._data):
                raise ModelError(
                    f"{self.path}: truncated: tensor {name} ends at byte {start + num_bytes}, "
                    f"but the file has {len(self._data)}"
                )
            self.tensors[name] = GgufTensor(name, shape, quant, start, num_bytes)
