"""Read the header of a GGUF file: its metadata, and names and shapes of its tensors.

The `gguf` package makes arrays of every token of the vocabulary, which takes seconds to half a
minute. This reader skips them. It also checks that no tensor ends after the file.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tersekv.errors import UserError
from tersekv.extras import require

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value in the metadata -> its format in `struct`."""


class Field(NamedTuple):
    """One value of the metadata. type: GGUF's number; value: a list for an array of numbers, None
    for an array of strings."""

    type: int
    value: Any


class Tensor(NamedTuple):
    """Place of a tensor in the file. shape: in torch's order; type: GGUF's name, for example
    "Q4_K"; start, end: bytes from the beginning of the file."""

    shape: tuple[int, ...]
    type: str
    start: int
    end: int


class GgufFile(NamedTuple):
    """The header of a GGUF file."""

    path: Path
    fields: dict[str, Field]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, for example "qwen2"."""
        return str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata."""
        return self.fields[key].value if key in self.fields else default

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return a value under the architecture's name."""
        return self.get(f"{self.architecture}.{key}", default)

    def token_id(self, kind: str) -> int | None:
        """Return the id of a special token ("eos", "padding", …), or None."""
        return self.get(f"tokenizer.ggml.{kind}_token_id")


class _BrokenError(Exception):
    """A reason why a header cannot be read."""


def is_gguf(path: Path) -> bool:
    """True if a file is named or begins like a GGUF file."""
    if path.suffix.lower() == ".gguf":
        return True
    with opened(path) as file:
        return file.read(len(MAGIC)) == MAGIC


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. An error of the system while it is open becomes a UserError."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; give a GGUF file that you can read") from error


def read(path: Path) -> GgufFile:
    """Return the header of a GGUF file.

    Raises:
        UserError: the file is not a whole GGUF file with a model, or `gguf` is not installed.
    """
    require("reading a GGUF file", "gguf")
    try:
        with opened(path) as file:
            start = file.read(24)
            if start[:4] != MAGIC:
                begins = f"it begins with {start[:4]!r}" if start else "it is empty"
                raise UserError(f"{path} is not a GGUF file ({begins}); give a GGUF file or a model folder")
            if len(start) < 24:
                raise _BrokenError(f"{len(start)} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = _Reader(data).file(path)
    except _BrokenError as error:
        raise UserError(f"{path} is not a whole GGUF file ({error}): get it again") from error
    _check_model(found)
    return found


def _check_model(found: GgufFile) -> None:
    """Raise UserError unless the file has one whole model."""
    parts = found.get("split.count", 0)
    if parts > 1:
        raise UserError(
            f"{found.path} is one of {parts} parts of a model: join them first with `llama-gguf-split --merge`"
        )
    if "token_embd.weight" not in found.tensors:
        kind = found.get("general.type", found.architecture)
        raise UserError(
            f"{found.path} has no token_embd.weight, so it is not a language model (its kind is {kind}): "
            "give the GGUF file of the model itself"
        )


class _Reader:
    """Reads values from the bytes of a file, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def file(self, path: Path) -> GgufFile:
        self.at = len(MAGIC)
        (version,) = self.numbers("I")
        if version not in VERSIONS:
            raise _BrokenError(f"its version is {version}, readable are {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_fields = self.numbers("QQ")
        fields = {}
        for _ in range(num_fields):
            key = self.string()
            fields[key] = self.field()
        architecture = fields.get("general.architecture")
        if architecture is None or architecture.type != STRING:
            raise _BrokenError("it does not name its architecture")
        tensors = dict(self.tensor() for _ in range(num_tensors))
        alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
        if not isinstance(alignment, int) or alignment < 1:
            raise _BrokenError(f"its alignment is {alignment}")
        data = -(-self.at // alignment) * alignment
        wanted = data + max((tensor.end for tensor in tensors.values()), default=0)
        if wanted > len(self.data):
            raise _BrokenError(f"{len(self.data):,} bytes instead of {wanted:,}")
        return GgufFile(
            path, fields, {name: t._replace(start=data + t.start, end=data + t.end) for name, t in tensors.items()}
        )

    def field(self) -> Field:
        (kind,) = self.numbers("I")
        if kind in SCALARS:
            return Field(kind, self.numbers(SCALARS[kind])[0])
        if kind == STRING:
            return Field(kind, self.string())
        if kind != ARRAY:
            raise _BrokenError(f"a value in it has the unknown type {kind}")
        element, count = self.numbers("IQ")
        if element in SCALARS:
            self.need(count * struct.calcsize(f"<{SCALARS[element]}"))
            return Field(kind, list(self.numbers(f"{count}{SCALARS[element]}")))
        if element != STRING:
            raise _BrokenError(f"an array in it has the unknown type {element}")
        for _ in range(count):
            (length,) = self.numbers("Q")
            self.need(length)
            self.at += length
        return Field(kind, None)

    def tensor(self) -> tuple[str, Tensor]:
        """Return a tensor's name and its place in the file's data section."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string()
        (dims,) = self.numbers("I")
        self.need(8 * dims)
        shape = self.numbers(f"{dims}Q")
        number, offset = self.numbers("IQ")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise _BrokenError(f"{name} has type {number}, which the installed gguf does not know") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[0] % block:
            raise _BrokenError(f"{name} has the shape {list(shape)}, which {kind.name} does not allow")
        end = offset + math.prod(shape) // block * size
        return name, Tensor(tuple(reversed(shape)), kind.name, offset, end)

    def string(self) -> str:
        (length,) = self.numbers("Q")
        self.need(length)
        self.at += length
        try:
            return self.data[self.at - length : self.at].decode()
        except UnicodeDecodeError:
            raise _BrokenError("a text in it is not UTF-8") from None

    def numbers(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        self.need(size)
        self.at += size
        return struct.unpack_from(f"<{form}", self.data, self.at - size)

    def need(self, size: int) -> None:
        """Raise unless that many bytes follow."""
        if self.at + size > len(self.data):
            raise _BrokenError("its header ends after the file")
