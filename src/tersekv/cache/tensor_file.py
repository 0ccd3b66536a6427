"""Safetensors files with checksums: a SHA-256 of the header and a CRC-32 of every tensor.

    8 bytes     length of the header, little-endian
    header      JSON: {"__metadata__": {"tersekv.sha256": …, "tersekv.cache": …}, tensor: {…}, …},
                padded with spaces to a multiple of 64 bytes
    tensors     consecutive, without gaps, those with wide elements first

The SHA-256 covers length and header, with zeros in place of the digest. `tersekv.cache` is JSON
with the format's number, the CRC of each tensor, and the writer's own entries. Any safetensors
reader can read the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from tersekv.atomic_write import atomic_write
from tersekv.cache.schema import MOST, anything, each, number, one_of, optional, record, require, shortened, whole
from tersekv.cache.schema import text as schema_text
from tersekv.errors import UserError

FORMAT = 1
DIGEST, ENTRY = "tersekv.sha256", "tersekv.cache"
NO_DIGEST = "0" * 64
ALIGNED = 64
AGAIN = "create it again"
GIVE = "give what `cache.save` or `tersekv prompt-cache build` wrote"
MOST_AXES, MOST_BYTES, MOST_NAME = 16, 2**62, 200

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


HELD = record({"tokens": whole(1), "bytes": whole(1, 2**63), "ratio_bf16": number}, open_ended=True)
"""Check of a cache file's entry about the cache's content."""

STORED = {
    "rate": number,
    "bases": one_of("calibration", "prompt", "layer"),
    "calibration": optional(schema_text),
    "step": number,
    "firsts": each(whole()),
    "dtype": schema_text,
}
"""Checks of a storage file's own entry, see `hf/stored.py`."""


class TensorFile(NamedTuple):
    """Metadata of a file, its tensors by name, and its size in bytes.

    The tensors use the memory-mapped file until they are written to. The file itself is never
    changed.
    """

    said: dict[str, Any]
    tensors: dict[str, Tensor]
    size: int


def write(path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> None:
    """Write tensors and metadata (JSON) atomically. Equal arguments give equal bytes.

    Raises:
        UserError: the file cannot be written.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    crcs = {name: f"{zlib.crc32(_bytes(tensors[name])):08x}" for name in order}
    entry = json.dumps({"format": FORMAT, **said, "crc32": crcs})
    header: dict[str, Any] = {"__metadata__": {DIGEST: NO_DIGEST, ENTRY: entry}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    head = struct.pack("<Q", len(text)) + text
    head = head.replace(NO_DIGEST.encode(), hashlib.sha256(head).hexdigest().encode(), 1)
    with atomic_write(path) as file:
        file.write(head)
        for name in order:
            file.write(_bytes(tensors[name]))


def read(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> TensorFile:
    """Map a file into memory and check all its bytes, or the header and the tensors with wanted names.

    Raises:
        UserError: the file is missing, has another format, is cut off or is damaged.
    """
    with _opened(path) as file:
        size = _size(file)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    view = memoryview(memory)
    start, header, said = _header(path, view, size)
    tensors = {}
    for name, entry in header.items():
        if not wanted(name):
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if f"{zlib.crc32(view[begin:end]):08x}" != said["crc32"][name]:
            raise UserError(f"{path} is damaged: the bytes of {name} are not those that were written; {AGAIN}")
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        tensors[name] = (
            torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)
            if end > begin
            else torch.empty(shape, dtype=dtype)
        )
    return TensorFile(said, tensors, size)


def read_said(path: Path) -> tuple[dict[str, Any], int]:
    """Return a cache file's metadata and size in bytes. Only the header is read and checked.

    Raises:
        UserError: the file is missing, its header is damaged, or it holds no cache.
    """
    with _opened(path) as file:
        size = _size(file)
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        view = memoryview(head + file.read(min(length, size)))
    said = _header(path, view, size)[2]
    check_said(path, said, size)
    return said, size


def check_said(path: Path, said: dict[str, Any], size: int) -> None:
    """Raise UserError unless the metadata of a file of this size are those of a cache file."""
    holds = "storage" if "storage" in said else "state"
    if holds not in said:
        raise UserError(f"{path} holds tensors, but no cache; give what `cache.save` or `tersekv prompt-cache` wrote")
    texts = dict.fromkeys(("tersekv", "recipe", "model_type", "architecture", "model"), schema_text)
    entries = {**texts, "batch": whole(1, min(size, MOST)), "ids_sha256": optional(schema_text), "cache": HELD}
    if "kl" in said:  # of the storage file that the tokens are from, if it was measured
        entries["kl"] = number
    if "padding" in said:  # tokens of padding that each row begins with, if they are known
        entries["padding"] = each(whole(0, MOST))
    try:
        record({**entries, holds: record(STORED) if holds == "storage" else anything}, open_ended=True)(said, "")
    except UserError as error:
        raise UserError(f"{path} lacks the metadata of a cache file: {error}; {AGAIN}") from error


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {GIVE}") from error


def _size(file: BinaryIO) -> int:
    size = file.seek(0, 2)
    file.seek(0)
    return size


def _header(path: Path, view: memoryview, size: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the start of the tensors, their entries, and the metadata."""
    if size < 8:
        raise UserError(f"{path} has {size} bytes, so it is not a cache or is cut off; {AGAIN}")
    start = 8 + struct.unpack("<Q", view[:8])[0]
    if start > size:
        raise UserError(f"{path} is cut off or is not a cache: its {size:,} bytes end within its header; {AGAIN}")
    head = bytes(view[:start])
    written = _digest(head)
    if written is None:
        raise UserError(f"{path} is not a cache, or its header is damaged; {GIVE}")
    if hashlib.sha256(head.replace(written, NO_DIGEST.encode(), 1)).hexdigest().encode() != written:
        raise UserError(f"{path} is damaged: its header is not the one that was written; {AGAIN}")
    try:
        header, said = _parsed(head[8:])
        end = start + _checked(header, said["crc32"])
    except UserError as error:
        raise UserError(f"{path} does not have the header of a cache: {error}; {AGAIN}") from error
    if end != size:
        what = "is cut off" if size < end else "has data after its end"
        raise UserError(f"{path} {what}: {size:,} bytes instead of {end:,}; {AGAIN}")
    return start, header, said


def _parsed(text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors' entries and the metadata.

    Raises:
        UserError: the text is not JSON of that form.
    """
    try:
        header = json.loads(text)
        record({"__metadata__": record({ENTRY: schema_text}, open_ended=True)}, open_ended=True)(header, "")
        said = json.loads(header.pop("__metadata__")[ENTRY])
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError("it is not JSON") from error
    record({"format": anything, "crc32": anything}, open_ended=True)(said, "")
    if said["format"] != FORMAT:
        raise UserError(f"it has format {shortened(said['format'])}; this version reads format {FORMAT}")
    return header, said


def _checked(header: dict[str, Any], crcs: Any) -> int:
    """Return the end of a header's tensors, which must be consecutive.

    Raises:
        UserError: an entry is not one that `write` could have written.
    """
    named = all(name.isprintable() and len(name) <= MOST_NAME for name in header)
    require(named, "tensors", "have names that are not allowed")  # errors name them
    record(dict.fromkeys(header, schema_text))(crcs, "crc32")
    end = 0
    for name, entry in header.items():
        offsets = each(whole(0, MOST_BYTES), 2)
        shape = each(whole())
        record({"dtype": one_of(*DTYPES), "shape": shape, "data_offsets": offsets})(entry, name)
        size, axes = DTYPES[entry["dtype"]].itemsize, [max(1, n) for n in entry["shape"]]
        require(len(axes) <= MOST_AXES and math.prod(axes) <= MOST_BYTES, name, "has a shape that is not allowed")
        begin, stop = entry["data_offsets"]
        require(begin == end and begin % size == 0, name, f"begins at {begin}, and must begin at {end}")
        end += math.prod(entry["shape"]) * size
        require(stop == end, name, f"ends at {stop}, and must end at {end}")
    return end


def _digest(head: bytes) -> bytes | None:
    """Return the digest at the beginning of a header."""
    before = b'{"__metadata__":{"' + DIGEST.encode() + b'":"'
    digest = head[8 + len(before) :][: len(NO_DIGEST)]
    return digest if head[8:].startswith(before) and len(digest) == len(NO_DIGEST) else None


def _bytes(tensor: Tensor) -> memoryview:
    """Return the elements as stored in a file."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
