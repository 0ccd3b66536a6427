"""Storage files of prompts: `cache.save(path, storage=RATE)`, read by `CompressedCache.load`.

The file is a `cache/tensor_file.py` with other metadata than a packed cache has, and these tensors:

    ids                         int32 [1, T], if known
    exact.<group>.<side>        zstd of the first 4 tokens of a group of layers, 16 bits per number
    pages.<group>.<side>.<n>    codes of 256 tokens (`storage/streams.py`); the last page has 128
    tables.<group>.<side>.*     tables of the pages, and of the last one
    bases.<group>.<side>.*      the bases, unless they are those of the model's calibration

Loading decodes pieces of 2,304 tokens to exact ones, layer by layer, which any recipe packs. The file
holds the tokens that the cache held: of a sliding window no more than the window.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersekv.cache.schema import MOST, each, of_spec, one_of, require, tensor, whole
from tersekv.calibration.storage_basis import SIDES, Bases, Fitted, find_bases
from tersekv.errors import CacheError, UserError
from tersekv.hf.base import ModelCache
from tersekv.hf.layer import FLOATS, CompressedLayer
from tersekv.hf.storage_layers import Layers
from tersekv.layouts.base import Side
from tersekv.malloc_trim import malloc_trim
from tersekv.models.config import longest_context
from tersekv.storage import codec, streams
from tersekv.storage.basis import OWN_NUMBERS, Basis, Sums, fitted, plain_metric, specs
from tersekv.storage.codec import Components, Page, Span
from tersekv.tensors import type_name
from tersekv.transforms.rope import NO_ROPE

log = logging.getLogger(__name__)
OWN = {"prompt": OWN_NUMBERS, "layer": 1}
"""Most numbers of a group, if the bases are fitted on the prompt, or on the prompt layer by layer."""

PIECE = 9
"""Pages that are read at once, at most. Layers are filled piece by piece, so that memory does not grow with the file,
but for the zeros before a sliding window. Codecs of the prompt are fitted on the first piece."""

PARTS = "pages", "recent"
"""Parts of a group's pages that have tables of their own: all pages but the last one, and that one."""


def save(cache: ModelCache, about: dict[str, Any], ids: Tensor | None, rate: float) -> tuple[dict[str, Any], Any]:
    """Return metadata and tensors of a storage file. about: of the cache, see `saved.about_cache`.

    rate: bits per number of all tokens but the exact ones, with the bases if the file holds them.

    Raises:
        UserError: the rate is not allowed, or the file could not hold the cache: it is a batch, or padded, its policy
            evicts tokens, the model has an indexer, or other processes hold some heads.
    """
    streams.require_packages("a storage file")
    codec.check_rate(rate)
    if about["batch"] != 1:
        raise UserError(f"a storage file holds one sequence, and the cache has {about['batch']}: leave storage out")
    own = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    stores = [layer.store for layer in own if layer.store is not None]
    if any(cache.heads(of.store.kv_heads, of.index) is not None for of in own if of.store is not None):
        raise UserError("a storage file holds all heads, and other processes have some of them: leave storage out")
    if any(store.by_head for store in stores):
        raise UserError(f"{cache.recipe} evicts tokens, and a storage file holds them all: read the prompt without it")
    if any(of.padding is not None and int(of.padding.max()) > 0 for s in stores for of in (s, s.rotary) if of):
        raise UserError(
            "the prompt was padded, and a storage file holds no padding: read it without, or leave storage out"
        )
    if any(layer.plan.index_dim for layer in own):
        named = cache.config.model_type
        raise UserError(f"the indexer of {named} has keys that no storage file holds: leave storage out")
    kind, layers, bases, digest, bits = _chosen(cache, about, rate)
    if None not in layers.windows and layers.tokens > (context := _context(layers)):
        raise UserError(
            f"all layers have sliding windows; a storage file then holds at most the model's context of {context:,} "
            f"tokens, not {layers.tokens:,}: leave storage out"
        )
    analyses = {where: bases[where].analysis() for where in layers.sides()}
    step = _step(layers, bases, analyses, bits)
    log.info("storage with bases of the %s, step %.3g", kind, step)
    if kind == "layer":
        warnings.warn(
            "without a calibration, a storage file of a short prompt or of sliding windows loses much more at the same "
            "bits: run `tersekv calibrate --storage` once for this model",
            stacklevel=4,
        )
    tensors: dict[str, Tensor] = {} if ids is None else {"ids": ids}
    dtype = _exact_dtype(own[0].dtype)
    for group, span in enumerate(layers.spans):
        for side in SIDES:
            exact = [layers.held(i)[side][0, :, : span.start - span.first] for i in layers.groups[group]]
            tensors[f"exact.{group}.{side}"] = _bytes(codec.exact_bytes(torch.cat(exact).to(dtype)))
    for group, side in layers.sides():
        basis, span, x = bases[group, side], layers.spans[group], layers.vectors(group, side)
        exponents = span.exponents(basis.weights(x))
        codes = codec.quantised(codec.scaled(basis.components(x, analyses[group, side]), exponents), step)
        pages = {n: slice(first - span.start, last - span.start) for n, (first, last) in span.pages.items()}
        for part in PARTS:
            some = [n for n in pages if part == _part(span, n)]
            table, packed = codec.pack([codes[:, pages[n]] for n in some], [exponents[pages[n]] for n in some])
            tensors[f"tables.{group}.{side}.{part}"] = _bytes(table)
            tensors |= {f"pages.{group}.{side}.{n}": _bytes(page) for n, page in zip(some, packed, strict=True)}
        if digest is None:
            kept = basis._asdict()
            tensors |= {f"bases.{group}.{side}.{name}": kept[name].contiguous() for name in specs(1)}
    stored = {
        "rate": rate,
        "bases": kind,
        "calibration": digest,
        "step": step,
        "firsts": [span.first for span in layers.spans],
        "dtype": type_name(own[0].dtype),
    }
    return {**about, "recipe": "storage", "cache": _held(layers, tensors), "storage": stored}, tensors


def _context(layers: Layers) -> int:
    return longest_context(layers.cache.config) or MOST


def _held(layers: Layers, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the metadata about a file's size. A full cache has all tokens, also those out of a sliding window."""
    size = sum(x.nbytes for name, x in tensors.items() if name != "ids")
    elements = layers.tokens * sum(layers.numbers(g, side) for g in range(len(layers.groups)) for side in SIDES)
    return {"tokens": layers.tokens, "bytes": size, "ratio_bf16": round(2 * elements / size, 4)}


def _chosen(cache: ModelCache, about: dict[str, Any], rate: float) -> tuple[str, Layers, Bases, str | None, float]:
    """Return the kind of the bases, the groups, the bases, the digest of their calibration, and the codes' bits."""
    tokens = about["cache"]["tokens"]

    def grouped(size: int) -> Layers:
        layers = Layers(cache, tokens, size)
        for indices in layers.groups:
            store = layers.layer(indices[0]).store
            assert store is not None
            layers.spans.append(Span.of(store.num_evicted, tokens))
        return layers

    found = find_bases(about["model"], cache.config)
    layers = grouped(OWN_NUMBERS if found is None else found.numbers)
    bits = rate * sum(layers.spans[g].coded * layers.numbers(g, s) for g, s in layers.sides())
    if found is not None:
        return "calibration", layers, found.bases, found.digest, bits
    best: tuple[float, str, Layers, Bases] | None = None
    # a row of a basis over n numbers has n bytes, and saves about a bit of two per token: four tokens per number pay
    pays = all(layers.spans[g].coded >= 4 * layers.numbers(g, side) for g, side in layers.sides())
    for kind in ("prompt", "layer") if pays else ("layer",):
        layers = grouped(OWN[kind])
        bases = {where: _own_basis(layers, *where) for where in layers.sides()}
        if not bases:
            return kind, layers, bases, None, bits
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
    return kind, layers, bases, None, bits - 8 * sum(basis.nbytes for basis in bases.values())


def _own_basis(layers: Layers, group: int, side: Side) -> Basis:
    """Return the basis of a prompt's own tokens."""
    sums = Sums.of(layers.vectors(group, side))
    metric = plain_metric(sums, len(layers.groups[group]), layers.dims[side])
    return fitted(sums, metric)


def _step(layers: Layers, bases: Bases, analyses: dict[tuple[int, Side], Tensor], bits: float) -> float:
    """Return the step with which the codes have so many bits."""
    parts = []
    for group, side in layers.sides():
        span, basis, x = layers.spans[group], bases[group, side], layers.vectors(group, side)
        exponents = span.exponents(basis.weights(x))
        recent = max(0, span.coded - codec.LAST)
        for first, last in ((0, recent), (recent, span.coded)):
            if first < last:
                some = first + codec.sample(last - first)
                y = basis.components(x[some], analyses[group, side])
                parts.append((codec.scaled(y, exponents[some]), last - first))
    return codec.step_for(parts, bits)


def _part(span: Span, page: int) -> str:
    """Return the part that a page is in, see `PARTS`."""
    return PARTS[span.pages[page][1] == span.last]


def _exact_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.bfloat16 else torch.float16


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class StoredFile:
    """The layers of a storage file.

    cache: an empty one for the model. said, tensors: of the file.

    Raises:
        UserError: the file contradicts itself or the model, or its calibration is missing.
    """

    def __init__(self, cache: ModelCache, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        stored = said["storage"]
        one_of(*FLOATS)(stored["dtype"], "storage.dtype")
        one_of("storage")(said["recipe"], "recipe")
        codec.check_rate(stored["rate"])
        tokens = said["cache"]["tokens"]
        require(said["batch"] == 1, "batch", "must be 1")
        require(stored["step"] > 0, "storage.step", "must be more than 0")
        self.step, self.dtype, self.tensors = stored["step"], FLOATS[stored["dtype"]], tensors
        self.digest, self.config, self.held = stored["calibration"], cache.config, said["cache"]
        own = stored["bases"] != "calibration"
        require(own == (self.digest is None), "storage.calibration", "does not fit storage.bases")
        found = None if own else self._found(said)
        layers = Layers(cache, tokens, OWN[stored["bases"]] if found is None else found.numbers)
        each(whole(0, tokens - 1), len(layers.groups))(stored["firsts"], "storage.firsts")
        layers.spans = [Span.of(first, tokens) for first in stored["firsts"]]
        self.layers = layers
        for first, window in zip(stored["firsts"], layers.windows, strict=True):
            latest = 0 if window is None else max(0, tokens - window + 1)
            require(first <= latest, "storage.firsts", f"has {first}, and must have at most {latest}")
        self.bases = self._own_bases() if found is None else found.bases

    def check_whole(self) -> None:
        """Raise UserError unless the tensors are those of a whole file."""
        layers, wanted = self.layers, {"ids"} & self.tensors.keys()
        # a forged number of tokens must not make millions of names, or tensors of tokens that no page holds
        pages = sum(2 * (span.coded // codec.PAGE) for span in layers.spans)
        fits = pages <= len(self.tensors) and (None in layers.windows or layers.tokens <= _context(layers))
        require(fits, "cache.tokens", "is more than the pages hold")
        wanted |= {f"exact.{group}.{side}" for group in range(len(layers.groups)) for side in SIDES}
        for group, side in layers.sides():
            wanted |= {f"pages.{group}.{side}.{n}" for n in layers.spans[group].pages}
            wanted |= {f"tables.{group}.{side}.{part}" for part in PARTS}
            if self.digest is None:
                wanted |= {f"bases.{group}.{side}.{name}" for name in specs(1)}
        require(self.tensors.keys() == wanted, "tensors", "are not those of a storage file with so many tokens")
        for name, value in _held(layers, self.tensors).items():
            require(self.held.get(name) == value, f"cache.{name}", f"must be {value}")

    def _named(self, name: str) -> bytes:
        """Return the bytes of a tensor.

        Raises:
            UserError: it is missing, or holds no bytes.
        """
        require(name in self.tensors, name, "is missing")
        tensor(torch.uint8, None)(self.tensors[name], name)
        return self.tensors[name].numpy().tobytes()

    def _found(self, said: Mapping[str, Any]) -> Fitted:
        """Return the calibration's bases."""
        found = find_bases(said["model"], self.config)
        if found is None or found.digest != self.digest:
            has = "this machine has none" if found is None else f"that of this machine is {found.digest}"
            raise UserError(
                f"it needs the model's storage calibration {self.digest}, and {has}: copy it from where "
                "the file was made, or build the file again"
            )
        return found

    def _own_bases(self) -> Bases:
        """Return the bases that the file holds."""
        bases = {}
        for group, side in self.layers.sides():
            held = {name: self.tensors.get(f"bases.{group}.{side}.{name}") for name in specs(1)}
            n = self.layers.numbers(group, side)
            for name, spec in specs(n).items():
                of_spec(spec)(held[name], f"bases.{group}.{side}.{name}")
            unused = dict.fromkeys(("variance", "metric", "weight"), torch.empty(0))
            basis = Basis(**held, **unused)  # type: ignore[arg-type]
            fits = len(basis.rows) == len(basis.scale)
            require(fits, f"bases.{group}.{side}", "has other numbers of rows and scales")
            bases[group, side] = basis
        return bases

    def fill(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield a layer's index, and keys and values [1, H, n, D] of its next tokens, until each layer has all.

        For tokens out of a sliding window it repeats others, so that no codec is fitted on zeros.

        Raises:
            UserError: bytes are not those of tokens.
        """
        for group, (indices, span) in enumerate(zip(self.layers.groups, self.layers.spans, strict=True)):
            exact, numbers = {side: self._exact(group, side) for side in SIDES}, list(span.pages)
            for n in range(0, max(1, len(numbers)), PIECE):
                found = {side: self._components(group, side, numbers[n : n + PIECE]) for side in SIDES}
                for place, index in enumerate(indices):
                    first = {side: None if n else exact[side][place] for side in SIDES}
                    keys, values = (self._tokens(group, place, side, first[side], found[side]) for side in SIDES)
                    yield index, keys, values
                    del keys, values  # before those of the next layer
                self.layers.forget_angles()

    def page(self, number: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return keys and values [1, H, n, D] of a page's tokens, by layer. No other page is read."""
        read = {}
        for group, (indices, span) in enumerate(zip(self.layers.groups, self.layers.spans, strict=True)):
            if number in span.pages:
                found = {side: self._components(group, side, [number]) for side in SIDES}
                for place, index in enumerate(indices):
                    keys, values = (self._tokens(group, place, side, None, found[side]) for side in SIDES)
                    read[index] = keys, values
        return read

    def _components(self, group: int, side: Side, pages: Sequence[int]) -> tuple[int, Components] | None:
        """Return the first token of pages that follow each other, and their components; None without pages."""
        if not pages:
            return None
        found = Components.of([self._page(group, side, n) for n in pages], self.bases[group, side])
        return self.layers.spans[group].pages[pages[0]][0], found

    def _page(self, group: int, side: Side, number: int) -> Page:
        """Return a page of one side of a group."""
        span, basis = self.layers.spans[group], self.bases[group, side]
        table = self._named(f"tables.{group}.{side}.{_part(span, number)}")
        name, (first, last) = f"pages.{group}.{side}.{number}", span.pages[number]
        try:
            return Page.of(table, self._named(name), len(basis.rows), last - first, self.step)
        except UserError as error:
            raise UserError(f"{name} {error}") from error

    def _exact(self, group: int, side: Side) -> Tensor:
        """Return the exact tokens [layers, H, n, D] of one side of a group."""
        name, D, span = f"exact.{group}.{side}", self.layers.dims[side], self.layers.spans[group]
        shape = len(self.layers.groups[group]), self.layers.heads[group], span.start - span.first, D
        try:
            return codec.exact_tensor(self._named(name), shape, _exact_dtype(self.dtype))
        except UserError as error:
            raise UserError(f"{name} {error}") from error

    def _tokens(
        self, group: int, place: int, side: Side, exact: Tensor | None, coded: tuple[int, Components] | None
    ) -> Tensor:
        """Return one side [1, H, n, D] of the layer that is at `place` in its group.

        exact: first tokens [H, n, D] of the layer, in the first piece. coded: see `_components`.
        """
        layers, D = self.layers, self.layers.dims[side]
        parts, index = [] if exact is None else [exact[None].to(self.dtype)], layers.groups[group][place]
        rope = layers.cache.ropes.known(index) or NO_ROPE
        if coded is not None:
            (at, components), width = coded, layers.heads[group] * D
            flat = components.vectors(self.bases[group, side], place * width, (place + 1) * width)
            x = flat.unflatten(1, (-1, D)).transpose(0, 1)[None]
            if side == "keys":
                x = rope.apply(x, *layers.cos_sin(index, at, len(flat)))
            parts.append(x.to(self.dtype))
        x, first = torch.cat(parts, dim=2), layers.spans[group].first
        if exact is None or not first:
            return x
        order = torch.arange(first) % x.shape[2]
        if side == "values":
            return torch.cat([x[:, :, order], x], dim=2)
        plain = rope.invert(x.float(), *layers.cos_sin(index, first, x.shape[2]))
        before = rope.apply(plain[:, :, order], *layers.cos_sin(index, 0, first))
        return torch.cat([before.to(self.dtype), x], dim=2)


def fill(cache: ModelCache, said: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Fill an empty cache with the tokens of a storage file.

    Raises:
        UserError: the file contradicts itself or the model, or its calibration is missing.
    """
    file = StoredFile(cache, said, tensors)
    file.check_whole()
    for index, keys, values in file.fill():
        layer, (keys, values) = file.layers.layer(index), (x.to(device) for x in (keys, values))
        if not layer.is_initialized:
            layer.first_tokens = file.layers.tokens
            layer.lazy_initialization(keys, values)
            layer.loaded = True
        try:
            layer.append(keys, values)
        except CacheError as error:
            raise UserError(str(error)) from error
        del keys, values
    malloc_trim()
