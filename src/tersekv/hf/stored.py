"""Storage files of prompts: `cache.save(path, storage=RATE)`, read by `CompressedCache.load`.

The file is a `cache/tensor_file.py` with other metadata than a packed cache has, and these tensors:

    ids                         int32 [1, T], if known
    exact.<layer>.<side>        zstd of the first 4 and the last 128 tokens of a layer
    pages.<group>.<side>.<n>    codes of tokens 256·n to 256·n + 255 of a group of layers (`storage/`)
    bases.<group>.<side>.*      the bases, unless they are those of the model's calibration

Loading decodes one layer after another to exact tokens, which any recipe packs. The file holds the
tokens that the cache held: of a sliding window no more than the window.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tersekv.cache.rotary import Rotary
from tersekv.cache.schema import MOST, each, number, of_spec, one_of, optional, record, require, tensor, text, whole
from tersekv.calibration.storage_basis import SIDES, Bases, find_bases, layer_groups
from tersekv.errors import CacheError, UserError
from tersekv.hf.base import ModelCache
from tersekv.hf.layer import FLOATS, CompressedLayer
from tersekv.layouts.base import Side
from tersekv.models.config import attention_layers, longest_context
from tersekv.storage import codec, streams
from tersekv.storage.basis import GROUP, Basis, Sums, fitted, plain_metric, specs
from tersekv.storage.codec import Pages, Span
from tersekv.tensors import type_name
from tersekv.transforms.rope import NO_ROPE

log = logging.getLogger(__name__)
RATES = 0.1, 8.0
"""Least and most bits per number."""

GROUPED = {"calibration": GROUP, "prompt": GROUP, "layer": 1}
"""Layers of a group, by what the bases are fitted on: a corpus, the prompt, or the prompt layer by layer."""


class Layers:
    """The attention layers of a cache, as vectors of groups.

    size: layers of a group. tokens: of the sequence. spans: of each group.
    """

    def __init__(self, cache: ModelCache, tokens: int, size: int) -> None:
        self.cache, self.tokens = cache, tokens
        self.groups = layer_groups(cache.config, size)
        shape = cache.shape
        self.widths = {"keys": shape.kv_heads * shape.key_dim, "values": shape.kv_heads * shape.value_dim}
        self.dims = {"keys": shape.key_dim, "values": shape.value_dim}
        kinds = attention_layers(cache.config)
        self.windows = [kinds[layers[0]].window for layers in self.groups]
        self.spans: list[Span] = []

    def layer(self, index: int) -> CompressedLayer:
        """Return a layer of the cache."""
        layer: Any = self.cache.layers[index]
        assert isinstance(layer, CompressedLayer)
        return layer

    def cos_sin(self, index: int, first: int, n: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of n tokens of a layer, for `Rope.apply`."""
        rotary = Rotary(self.cache.ropes.known(index) or NO_ROPE)
        rotary.note(0, self.tokens)
        return rotary.angles(first, n, torch.device("cpu")).cos_sin()

    def held(self, index: int) -> dict[Side, Tensor]:
        """Return keys and values [1, H, n, D] of the tokens that a layer holds."""
        layer = self.layer(index)
        assert layer.store is not None
        keys, values = layer.store.decoded(layer.dtype)
        return {"keys": keys.cpu(), "values": values.cpu()}

    def vectors(self, group: int, side: Side) -> Tensor:
        """Return the vectors of a group's coded tokens, float32 [tokens, n]; keys before RoPE."""
        span, parts = self.spans[group], []
        for index in self.groups[group]:
            x = self.held(index)[side][:, :, span.start - span.first : span.stop - span.first].float()
            if side == "keys":
                rope = self.cache.ropes.known(index) or NO_ROPE
                x = rope.invert(x, *self.cos_sin(index, span.start, span.coded))
            parts.append(x[0].transpose(0, 1).flatten(1))
        return torch.cat(parts, dim=1)

    def sides(self) -> Iterator[tuple[int, Side]]:
        """Yield the groups that have coded tokens, with each side."""
        for group, span in enumerate(self.spans):
            if span.coded:
                yield from ((group, side) for side in SIDES)


def save(cache: ModelCache, about: dict[str, Any], ids: Tensor | None, rate: float) -> tuple[dict[str, Any], Any]:
    """Return metadata and tensors of a storage file. about: of the cache, see `saved.about_cache`.

    rate: bits per number of the coded tokens, with the bases if the file holds them.

    Raises:
        UserError: the rate is not allowed, or the cache is a batch, or its policy evicts tokens.
    """
    streams.require_packages("a storage file")
    if not RATES[0] <= rate <= RATES[1]:
        raise UserError(f"storage={rate:g} is not allowed; give {RATES[0]} to {RATES[1]:g} bits per number")
    if about["batch"] != 1:
        raise UserError(f"a storage file holds one sequence, and the cache has {about['batch']}: leave storage out")
    own = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    if any(layer.store is not None and layer.store.by_head for layer in own):
        raise UserError(f"{cache.recipe} evicts tokens, and a storage file holds them all: read the prompt without it")
    kind, layers, bases, digest, step = _chosen(cache, about, rate)
    log.info("storage with bases of the %s, step %.3g", kind, step)
    if kind == "layer":
        warnings.warn(
            "without a calibration, a storage file of a short prompt or of sliding windows loses much more at the same "
            "bits: run `tersekv calibrate --storage` once for this model",
            stacklevel=4,
        )
    tensors: dict[str, Tensor] = {} if ids is None else {"ids": ids}
    for indices, span in zip(layers.groups, layers.spans, strict=True):
        for index in indices:
            dtype = _exact_dtype(layers.layer(index).dtype)
            for side, x in layers.held(index).items():
                tensors[f"exact.{index}.{side}"] = _bytes(codec.exact_bytes(span.exact(x[0]).to(dtype)))
    for group, side in layers.sides():
        basis, span = bases[group, side], layers.spans[group]
        x, analysis = layers.vectors(group, side), basis.analysis()
        for page, first, last in span.pages():
            y = basis.components(x[first - span.start : last - span.start], analysis)
            tensors[f"pages.{group}.{side}.{page}"] = _bytes(streams.pack(codec.quantised(y, step)))
        if digest is None:
            kept = basis._asdict()
            tensors |= {f"bases.{group}.{side}.{name}": kept[name].contiguous() for name in specs(1)}
    size = sum(x.nbytes for name, x in tensors.items() if name != "ids")
    elements = cache.footprint().elements
    held = {"tokens": layers.tokens, "bytes": size, "ratio_bf16": round(2 * elements / size, 4)}
    stored = {
        "rate": rate,
        "bases": kind,
        "calibration": digest,
        "step": step,
        "firsts": [span.first for span in layers.spans],
        "dtype": type_name(own[0].dtype),
    }
    return {**about, "recipe": "storage", "cache": held, "storage": stored}, tensors


def _chosen(cache: ModelCache, about: dict[str, Any], rate: float) -> tuple[str, Layers, Bases, str | None, float]:
    """Return the kind of the bases, the groups, the bases, the digest of their calibration, and the step."""
    tokens = about["cache"]["tokens"]

    def grouped(size: int) -> Layers:
        layers = Layers(cache, tokens, size)
        for indices in layers.groups:
            store = layers.layer(indices[0]).store
            assert store is not None
            layers.spans.append(Span.of(store.num_evicted, tokens))
        return layers

    layers = grouped(GROUP)
    bits = rate * sum(layers.spans[g].coded * layers.widths[s] * len(layers.groups[g]) for g, s in layers.sides())
    found = find_bases(about["model"], cache.config)
    if found is not None:
        bases, digest = found
        return "calibration", layers, bases, digest, _step(layers, bases, bits)
    best: tuple[float, str, Layers, Bases] | None = None
    # a row of a basis over n numbers has n bytes, and saves about a bit of two per token: four tokens per number pay
    pays = all(layers.spans[g].coded >= 4 * layers.widths[side] * len(layers.groups[g]) for g, side in layers.sides())
    for kind in ("prompt", "layer") if pays else ("layer",):
        layers = grouped(GROUPED[kind])
        bases = {where: _own_basis(layers, *where) for where in layers.sides()}
        if not bases:
            return kind, layers, bases, None, 1.0
        parts = [(basis.variance, layers.spans[g].coded) for (g, _), basis in bases.items()]

        def tables(at: float, bases: Bases = bases) -> float:
            return sum(8.0 * basis.head(int((basis.variance > at).sum())).nbytes for basis in bases.values())

        at = codec.level(parts, bits, tables)
        error = sum(n * float(variance.clamp(max=at).sum()) for variance, n in parts)
        if best is None or error < best[0]:
            kept = {w: basis.head(max(1, int((basis.variance > at).sum()))) for w, basis in bases.items()}
            best = error, kind, layers, kept
    assert best is not None
    _, kind, layers, bases = best
    left = bits - 8 * sum(basis.nbytes for basis in bases.values())
    return kind, layers, bases, None, _step(layers, bases, left)


def _own_basis(layers: Layers, group: int, side: Side) -> Basis:
    """Return the basis of a prompt's own tokens."""
    sums = Sums.of(layers.vectors(group, side))
    metric = plain_metric(sums, len(layers.groups[group]), layers.dims[side])
    return fitted(sums, metric)


def _step(layers: Layers, bases: Bases, bits: float) -> float:
    parts = []
    for group, side in layers.sides():
        span, basis = layers.spans[group], bases[group, side]
        y = basis.components(layers.vectors(group, side)[codec.sample(span)], basis.analysis())
        parts.append((y, span.coded))
    return codec.step_for(parts, bits)


def _exact_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.bfloat16 else torch.float16


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


STORED = {
    "rate": number,
    "bases": one_of(*GROUPED),
    "calibration": optional(text),
    "step": number,
    "firsts": each(whole()),
    "dtype": one_of(*FLOATS),
}


class StoredFile:
    """The layers of a storage file.

    cache: an empty one for the model. said, tensors: of the file.

    Raises:
        UserError: the file contradicts itself or the model, or its calibration is missing.
    """

    def __init__(self, cache: ModelCache, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        stored = said["storage"]
        record(STORED)(stored, "storage")
        tokens = said["cache"]["tokens"]
        require(said["batch"] == 1, "batch", "must be 1")
        require(stored["step"] > 0, "storage.step", "must be more than 0")
        self.step, self.dtype, self.tensors = stored["step"], FLOATS[stored["dtype"]], tensors
        self.digest = stored["calibration"]
        own = stored["bases"] != "calibration"
        require(own == (self.digest is None), "storage.calibration", "does not fit storage.bases")
        layers = Layers(cache, tokens, GROUPED[stored["bases"]])
        each(whole(0, tokens - 1), len(layers.groups))(stored["firsts"], "storage.firsts")
        layers.spans = [Span.of(first, tokens) for first in stored["firsts"]]
        self.layers = layers
        for first, window in zip(stored["firsts"], layers.windows, strict=True):
            latest = 0 if window is None else max(0, tokens - window + 1)
            require(first <= latest, "storage.firsts", f"has {first}, and must have at most {latest}")
        self.bases = self._bases(said)

    def check_names(self) -> None:
        """Raise UserError unless the tensors are those of a whole file."""
        layers, wanted = self.layers, {"ids"} & self.tensors.keys()
        # a forged number of tokens must not make millions of names, or tensors of tokens that no page holds
        pages = sum(2 * len(span.page_numbers()) for span in layers.spans)
        context = longest_context(layers.cache.config) or MOST
        fits = pages <= len(self.tensors) and (None in layers.windows or layers.tokens <= context)
        require(fits, "cache.tokens", "is more than the pages hold")
        for indices in layers.groups:
            wanted |= {f"exact.{index}.{side}" for index in indices for side in SIDES}
        for group, side in layers.sides():
            wanted |= {f"pages.{group}.{side}.{page}" for page, _, _ in layers.spans[group].pages()}
            if self.digest is None:
                wanted |= {f"bases.{group}.{side}.{name}" for name in specs(1)}
        require(self.tensors.keys() == wanted, "tensors", "are not those of a storage file with so many tokens")

    def _named(self, name: str) -> bytes:
        """Return the bytes of a tensor.

        Raises:
            UserError: it is missing, or holds no bytes.
        """
        require(name in self.tensors, name, "is missing")
        tensor(torch.uint8, None)(self.tensors[name], name)
        return self.tensors[name].numpy().tobytes()

    def _bases(self, said: Mapping[str, Any]) -> Bases:
        if self.digest is not None:
            found = find_bases(said["model"], self.layers.cache.config)
            if found is None or found[1] != self.digest:
                has = "this machine has none" if found is None else f"that of this machine is {found[1]}"
                raise UserError(
                    f"it needs the model's storage calibration {self.digest}, and {has}: copy it from where "
                    "the file was made, or build the file again"
                )
            return found[0]
        bases = {}
        for group, side in self.layers.sides():
            held = {name: self.tensors.get(f"bases.{group}.{side}.{name}") for name in specs(1)}
            n = self.layers.widths[side] * len(self.layers.groups[group])
            for name, spec in specs(n).items():
                of_spec(spec)(held[name], f"bases.{group}.{side}.{name}")
            basis = Basis(**held, variance=torch.empty(0), metric=torch.empty(0))  # type: ignore[arg-type]
            fits = len(basis.rows) == len(basis.scale)
            require(fits, f"bases.{group}.{side}", "has other numbers of rows and scales")
            bases[group, side] = basis
        return bases

    def fill(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each layer's index, keys and values [1, H, T, D]; tokens out of a sliding window are 0.

        Raises:
            UserError: bytes are not those of tokens.
        """
        layers = self.layers
        for group, (indices, span) in enumerate(zip(layers.groups, layers.spans, strict=True)):
            pages = {side: self.pages(group, side) for side in SIDES} if span.coded else {}
            for place, index in enumerate(indices):
                keys, values = (self._tokens(index, place, side, span, pages.get(side)) for side in SIDES)
                yield index, keys, values

    def pages(self, group: int, side: Side, only: int | None = None) -> Pages:
        """Return the codes of one side of a group, of all pages or of one."""
        data = [
            (self._named(f"pages.{group}.{side}.{page}"), last - first)
            for page, first, last in self.layers.spans[group].pages()
            if only in (None, page)
        ]
        try:
            return Pages.of(self.bases[group, side], self.step, data)
        except UserError as error:
            raise UserError(f"pages.{group}.{side} {error}") from error

    def page(self, number: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return keys and values [1, H, n, D] of a page's coded tokens, by layer. No other page is read."""
        found = {}
        for group, indices in enumerate(self.layers.groups):
            for page, first, last in self.layers.spans[group].pages():
                if page == number:
                    codes = {side: self.pages(group, side, number) for side in SIDES}
                    for place, index in enumerate(indices):
                        keys, values = (next(self._decoded(index, place, s, codes[s], first)) for s in SIDES)
                        found[index] = keys, values
                    assert keys.shape[2] == last - first
        return found

    def _tokens(self, index: int, place: int, side: Side, span: Span, pages: Pages | None) -> Tensor:
        """Return one side [1, H, T, D] of a layer, which is at `place` in its group."""
        name, D = f"exact.{index}.{side}", self.layers.dims[side]
        H, kept = self.layers.widths[side] // D, span.last - span.first - span.coded
        try:
            exact = codec.exact_tensor(self._named(name), (H, kept, D), _exact_dtype(self.dtype))
        except UserError as error:
            raise UserError(f"{name} {error}") from error
        out = torch.zeros((1, H, span.last, D), dtype=self.dtype)
        before, at = span.start - span.first, span.start
        out[0, :, span.first : span.start] = exact[:, :before].to(self.dtype)
        out[0, :, span.stop :] = exact[:, before:].to(self.dtype)
        for x in () if pages is None else self._decoded(index, place, side, pages, at):
            out[:, :, at : at + x.shape[2]] = x
            at += x.shape[2]
        return out

    def _decoded(self, index: int, place: int, side: Side, pages: Pages, at: int) -> Iterator[Tensor]:
        """Yield the coded tokens [1, H, n, D] of each page. at: position of the first one."""
        width, D = self.layers.widths[side], self.layers.dims[side]
        rope = self.layers.cache.ropes.known(index) or NO_ROPE
        for flat in pages.vectors(place * width, (place + 1) * width):
            x = flat.unflatten(1, (-1, D)).transpose(0, 1)[None]
            if side == "keys":
                x = rope.apply(x, *self.layers.cos_sin(index, at, len(flat)))
            at += len(flat)
            yield x.to(self.dtype)


def fill(cache: ModelCache, said: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Fill an empty cache with the tokens of a storage file.

    Raises:
        UserError: the file contradicts itself or the model, or its calibration is missing.
    """
    file = StoredFile(cache, said, tensors)
    file.check_names()
    for index, keys, values in file.fill():
        layer, (keys, values) = file.layers.layer(index), (x.to(device) for x in (keys, values))
        layer.lazy_initialization(keys, values)
        try:
            layer.append(keys, values)
        except CacheError as error:
            raise UserError(str(error)) from error
