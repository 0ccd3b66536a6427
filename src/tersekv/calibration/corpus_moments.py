"""Sums over a corpus from which codecs are fitted, see `Codec.fit_moments`.

Two passes over the samples: the mean of keys before RoPE, if a codec removes it, then vectors with
gradients, or with queries. Only sums are kept. After each sample they are written to the work folder, so that a
stopped run continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.atomic_write import save_whole
from tersekv.attention.read import AttentionCall, grouped
from tersekv.cache.rotary import angles_at_once
from tersekv.calibration.capture import LayerTokens, OnePassCache, watch_calls
from tersekv.calibration.gradients import Source, each_gradient
from tersekv.codecs import Codec
from tersekv.layouts.mean_removed import RotatedMean
from tersekv.models.config import AttentionShape, text_config
from tersekv.models.rope import Ropes
from tersekv.transforms.moments import Moments, WeightedBy, score_loss
from tersekv.transforms.rope import Rope
from tersekv.versions import cache_argument

PARTS = "total", "squares", "metric"


class Sums:
    """Sums of tensors over samples, kept in one file of the work folder.

    done: number of samples so far.
    """

    def __init__(self, work: Path, name: str) -> None:
        self.work, self.name = work, name
        files = {int(path.stem.rpartition("-")[2]): path for path in work.glob(f"{name}-*.safetensors")}
        self.done = max(files, default=0)
        self.tensors: dict[str, Tensor] = load_file(files[self.done]) if files else {}

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add the tensors of the next sample and write the file."""
        old = self._path
        self.tensors = {name: self.tensors.get(name, 0) + t for name, t in tensors.items()}
        self.done += 1
        save_whole(self.tensors, self._path)
        old.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self.work / f"{self.name}-{self.done}.safetensors"


class Wanted(NamedTuple):
    """Sums that codecs are fitted on.

    centred: keys without their rotated mean. by: weights of the tokens, see `Codec.weighted_by`.
    """

    source: Source
    centred: bool
    by: WeightedBy | None

    @property
    def name(self) -> str:
        """Name of the tensors in files."""
        weights = {"gradients": "", "queries": ".queries", None: ".plain"}[self.by]
        return f"{self.source.name}{'.centred' if self.centred else ''}{weights}"


class CorpusMoments:
    """Moments of samples ids [samples, length] of a model.

    sinks: number of tokens left out at the start of each sample.

    Raises:
        UserError: RoPE cannot be removed from the model's keys, and a codec needs that.
    """

    def __init__(self, model: PreTrainedModel, windows: Tensor, wanted: Sequence[Wanted], sinks: int) -> None:
        config = text_config(model.config)
        self.model, self.windows, self.wanted, self.sinks = model, windows, wanted, sinks
        self.ropes = Ropes(config, AttentionShape.of(config).key_dim)
        self.sources = list(dict.fromkeys(one.source for one in wanted if one.by != "queries"))
        self.scored = [one for one in wanted if one.by == "queries"]
        self.centred = [one for one in wanted if one.centred]
        self.means: dict[int, Tensor] = {}

    def run(self, work: Path, progress: Callable[[str, int, int], object]) -> dict[Wanted, Moments]:
        """Return the sums. work: folder for the sums so far."""
        samples = len(self.windows)
        if self.centred:
            means = Sums(work, "means")
            for i in range(means.done, samples):
                progress("means", i, samples)
                means.add(self._key_sums(i))
            progress("means", samples, samples)
            vectors = samples * (self.windows.shape[1] - self.sinks)
            self.means = {int(layer): total / vectors for layer, total in means.tensors.items()}
        sums = Sums(work, "moments")
        for i in range(sums.done, samples):
            progress("samples", i, samples)
            sums.add(self._moments(i))
        progress("samples", samples, samples)
        return {one: self._read(one, sums.tensors) for one in self.wanted}

    def codec(self, codec: Codec, layer: int) -> Codec:
        """Return a centred codec with the mean of its layer's keys; others as they are."""
        if not codec.centred:
            return codec
        return dataclasses.replace(codec, fitted=codec.fitted | {"mean": self.means[layer].to(torch.float16)})

    def _ids(self, i: int) -> Tensor:
        return self.windows[i : i + 1].to(self.model.device)

    def _before_rope(self, rope: Rope, keys: Tensor) -> Tensor:
        """Return keys before RoPE, of all tokens but the sinks."""
        angles = angles_at_once(rope, keys.shape[2] + self.sinks, keys.device, self.sinks)
        return rope.invert(keys, *angles.cos_sin())

    @torch.no_grad()
    def _key_sums(self, i: int) -> dict[str, Tensor]:
        """Return the sums of a sample's keys before RoPE, by layer."""
        layers, found = {one.source.layer for one in self.centred}, {}

        def add(layer: int, keys: Tensor, values: Tensor) -> LayerTokens:
            if layer in layers:
                plain = self._before_rope(self.ropes.of_means(layer), keys[:, :, self.sinks :].float())
                found[str(layer)] = plain.sum(2, dtype=torch.float64).cpu()
            return LayerTokens(keys, values)

        cache = OnePassCache(self.model.config, add)
        base = self.model.base_model
        base(input_ids=self._ids(i), use_cache=True, **cache_argument(base, cache))
        return found

    def _moments(self, i: int) -> dict[str, Tensor]:
        """Return the sums of one sample as tensors of a file."""
        found: dict[str, Tensor] = {}

        def add(source: Source, x: Tensor, gradient: Tensor) -> None:
            for one in self.wanted:
                if one.source == source and one.by != "queries":
                    used = gradient if one.by == "gradients" else None
                    moments = Moments.of(self._input(one, x), used, source.side == "keys")
                    found.update(_tensors(one, moments))

        def add_scored(layer: int, tokens: LayerTokens, call: AttentionCall) -> None:
            wanted = [one for one in self.scored if one.source.layer == layer]
            if wanted:
                found.update(self._scored(wanted, tokens, call))

        if self.sources:
            each_gradient(self.model, self._ids(i), self.sources, add, self.sinks)
        if self.scored:
            watch_calls(self.model, self._ids(i), add_scored)
        return found

    def _scored(self, wanted: Sequence[Wanted], tokens: LayerTokens, call: AttentionCall) -> dict[str, Tensor]:
        """Return the sums of one layer that are weighted by queries."""
        keys, values = (x[:, :, self.sinks :].float() for x in tokens)
        queries = grouped(call.query[:, :, self.sinks :], keys.shape[1]).flatten(2, 3)
        losses = score_loss(keys, queries)
        found: dict[str, Tensor] = {}
        for one in wanted:
            of_keys = one.source.side == "keys"
            x, loss = (keys, losses[0]) if of_keys else (values, losses[1])
            if one.source.pre_rope:
                x, loss = self._before_rope(self.ropes.of(one.source.layer), x), loss._replace(metric=None)
            found.update(_tensors(one, Moments.weighted(self._input(one, x), loss.relative("scores"))))
        return found

    def _input(self, one: Wanted, x: Tensor) -> Tensor:
        """Return the vectors that the codec encodes."""
        if not one.centred:
            return x
        rope = self.ropes.of_means(one.source.layer)
        angles = angles_at_once(rope, x.shape[2] + self.sinks, x.device, self.sinks)
        mean = self.means[one.source.layer].to(x.device, torch.float16)
        return x - RotatedMean(mean, rope, angles).decode()

    def _read(self, one: Wanted, tensors: dict[str, Tensor]) -> Moments:
        vectors = len(self.windows) * (self.windows.shape[1] - self.sinks)
        return Moments(vectors, *(tensors.get(f"{one.name}.{part}") for part in PARTS))  # type: ignore[arg-type]


def _tensors(one: Wanted, moments: Moments) -> Iterator[tuple[str, Tensor]]:
    for part in PARTS:
        if (tensor := getattr(moments, part)) is not None:
            yield f"{one.name}.{part}", tensor.cpu()
