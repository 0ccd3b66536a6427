"""Bases of the storage codec, fitted on a corpus once per model (`storage/basis.py`).

Keys are taken before RoPE where it can be removed. The metric of a layer and KV head is E[g·gᵀ] of
the gradients g of the loss with respect to them. The weight of a token in a group is the mean of g²
over the layers and heads, each relative to its own sum; it is predicted from the token's vector,
because `storage` has no gradients when it writes a file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv.calibration.calibrate import Corpus
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.find import default_folder, profile_place
from tersekv.calibration.gradients import Source, each_gradient
from tersekv.errors import UserError
from tersekv.layouts.base import Side
from tersekv.models.config import (
    AttentionShape,
    attention_layers,
    heads_by_layer,
    layers_without_own_tokens,
    text_config,
)
from tersekv.models.fingerprint import architecture, fingerprint
from tersekv.models.rope import Ropes
from tersekv.storage.basis import NUMBERS, TOKENS_PER_NUMBER, Basis, Sums, fitted, groups_of, specs
from tersekv.tensors import TensorSpec

NAME = "storage"
"""Name of the calibration's file, and its recipe."""

SIDES: tuple[Side, Side] = ("keys", "values")

BLOCK = 128
"""Tokens of a block, within which the weights of tokens are compared."""

Bases = dict[tuple[int, Side], Basis]
"""Bases by group and side."""


class Fitted(NamedTuple):
    """Bases of a model's calibration, its digest, and the most numbers of its groups' vectors."""

    bases: Bases
    digest: str
    numbers: int


def layer_groups(config: PreTrainedConfig, numbers: int) -> list[list[int]]:
    """Return the layers of each group, of those with keys and values of their own.

    numbers: of a group's vectors, at most, unless one layer has more.
    """
    shared, shape = layers_without_own_tokens(config), AttentionShape.of(config)
    kinds = attention_layers(config)
    own = [i for i, kind in enumerate(kinds) if kind.type == "attention" and i not in shared]
    size = max(1, numbers // (shape.kv_heads * max(shape.key_dim, shape.value_dim)))
    return [[own[place] for place in places] for places in groups_of([kinds[i].window for i in own], size)]


def basis_on(model: PreTrainedModel, corpus: Corpus, sinks: int, progress: Callable[[int, int], object]) -> Calibration:
    """Return the bases of a model's groups as a calibration. sinks: tokens left out at the start of each sample.

    Raises:
        CacheError: see `each_gradient`.
    """
    config = text_config(model.config)
    ropes = Ropes(config, AttentionShape.of(config).key_dim)
    groups = layer_groups(config, _numbers(corpus.windows.numel()))
    sources = [
        Source(i, side, side == "keys" and ropes.known(i) is not None) for g in groups for i in g for side in SIDES
    ]
    sums: dict[tuple[int, Side], Sums] = {}
    metrics: dict[tuple[int, Side], Tensor] = {}
    weighed: dict[tuple[int, Side], Tensor] = {}
    used = 0
    for sample, ids in enumerate(corpus.windows):
        progress(sample, len(corpus.windows))
        found: dict[tuple[int, Side], tuple[Tensor, Tensor]] = {}

        def see(source: Source, x: Tensor, gradient: Tensor, found: dict[tuple[int, Side], Any] = found) -> None:
            where = source.layer, source.side
            metric = (gradient[0].mT @ gradient[0]).double().cpu()
            metrics[where] = metrics[where] + metric if where in metrics else metric
            whole = metrics[where].diagonal(dim1=1, dim2=2).sum(1).float().clamp_min(1e-30)
            weights = (gradient[0].square().sum(2).cpu() / whole[:, None]).mean(0)
            found[where] = x[0].transpose(0, 1).flatten(1).cpu(), weights

        each_gradient(model, ids[None].to(model.device), sources, see, sinks)
        settled = _settled(len(ids) - sinks)
        used += len(settled.flatten())
        for g, layers in enumerate(groups):
            for side in SIDES:
                held = [found.pop((i, side)) for i in layers]
                x = torch.cat([x for x, _ in held], dim=1)
                new, logs = Sums.of(x), torch.stack([w for _, w in held]).mean(0).clamp_min(1e-30).log2()[settled]
                logs = (logs - logs.mean(1, keepdim=True)).flatten()
                pull = (x[settled.flatten()].T @ logs.float()).double()
                sums[g, side] = sums[g, side].plus(new) if sample else new
                weighed[g, side] = weighed[g, side] + pull if sample else pull
    tensors: dict[str, Tensor] = {}
    for g, layers in enumerate(groups):
        for side in SIDES:
            whole = sums.pop((g, side))
            metric = torch.cat([metrics[i, side] for i in layers]) / whole.vectors
            named = fitted(whole, metric, weighed[g, side] / max(used, 1))._asdict()
            tensors |= {f"groups.{g}.{side}.{name}": tensor.contiguous() for name, tensor in named.items()}
    return Calibration(corpus.made(NAME, model.config, fingerprint(model), sinks), tensors)


def _numbers(tokens: int) -> int:
    """Return the most numbers of a group's vectors for a corpus of so many tokens."""
    return min(NUMBERS, tokens // TOKENS_PER_NUMBER)


def _settled(tokens: int) -> Tensor:
    """Return the places [blocks, BLOCK] of a sample's tokens that weights are measured on, in blocks.

    A token's gradient is a sum over later tokens, so weights are compared within a block, and those
    of the last tokens are left out.
    """
    blocks = max(0, tokens // BLOCK - 1)
    return torch.arange(blocks * BLOCK).view(blocks, BLOCK)


def find_bases(model: str, config: PreTrainedConfig) -> Fitted | None:
    """Return the bases of a model's calibration; None if there is none.

    model: fingerprint.

    Raises:
        UserError: the calibration is damaged, or of another model.
    """
    path = profile_place(default_folder(model), NAME)
    return read_bases(path, config, model) if path.is_file() else None


def read_bases(path: Path, config: PreTrainedConfig, model: str | None = None) -> Fitted:
    """Return the bases in a file. model: fingerprint, if the weights are known.

    Raises:
        UserError: the calibration is damaged, or of another model.
    """
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    (found, digest), shape = _loaded(path, changed), AttentionShape.of(config)
    made = found.made
    if (made.recipe, made.model, made.architecture) != (NAME, model or made.model, architecture(config)):
        raise UserError(
            f"{path} is not the storage calibration of this model: make it with `tersekv calibrate --storage`"
        )
    numbers = _numbers(made.samples * made.length)
    heads = heads_by_layer(config)
    sizes = tuple(len(layers) * heads[layers[0]] for layers in layer_groups(config, numbers))
    return Fitted(_bases(path, changed, sizes, (shape.key_dim, shape.value_dim)), digest, numbers)


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, changed: int) -> tuple[Calibration, str]:
    """Return the calibration in a file and its digest, the same objects until the file changes."""
    found = Calibration.load(path)
    return found, found.digest


@functools.lru_cache(maxsize=2)
def _bases(path: Path, changed: int, heads: tuple[int, ...], dims: tuple[int, int]) -> Bases:
    """Return the bases in a file. They are checked once, because a check takes as much memory as a basis.

    heads: of all layers of each group. dims: of keys and values.
    """
    tensors, bases, single = _loaded(path, changed)[0].tensors, {}, torch.float32
    for group, count in enumerate(heads):
        for side, D in zip(SIDES, dims, strict=True):
            n = count * D
            wanted = specs(n, n) | {
                "variance": TensorSpec(single, (n,), low=0),
                "metric": TensorSpec(single, (count, D, D)),
                "weight": TensorSpec(single, (n,)),
            }
            start, held = f"groups.{group}.{side}.", {}
            for name, spec in wanted.items():
                tensor = tensors.get(start + name)
                if fault := spec.fault(tensor):
                    raise UserError(f"{path} is wrong: {start}{name} {fault}; calibrate again")
                held[name] = tensor
            bases[group, side] = Basis(**held)  # type: ignore[arg-type]
    return bases
