"""Keys and values of a text, with the gradients of the loss with respect to them; calibration fits
codecs on these.

The loss is the mean cross-entropy of the next token. Its squared gradients are the diagonal Fisher
information, by which KVQuant (arXiv 2401.18079, §3.3) weights k-means. Weights are frozen, so that
the backward pass saves nothing for them. The gradient of a key before RoPE is its gradient after
RoPE times the transposed rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.cache.rotary import angles_at_once
from tersekv.calibration.capture import LayerTokens, OnePassCache
from tersekv.errors import CacheError
from tersekv.layouts.base import Side
from tersekv.models.config import AttentionShape, text_config
from tersekv.models.rope import Ropes
from tersekv.versions import cache_argument

POSITIONS_AT_A_TIME = 256
"""Positions whose softmax over the vocabulary is computed at a time, which bounds the memory for
copies of logits."""


class Source(NamedTuple):
    """Data that a codec is fitted on: one side of one layer; pre_rope: keys before RoPE."""

    layer: int
    side: Side
    pre_rope: bool = False

    @property
    def name(self) -> str:
        """Name of the tensors in files."""
        return f"layers.{self.layer}.{self.side}{'.pre_rope' if self.pre_rope else ''}"


SeeGradient = Callable[[Source, Tensor, Tensor], object]


def layer_gradients(
    model: PreTrainedModel, ids: Tensor, sources: Collection[Source], sinks: int = 0
) -> dict[str, Tensor]:
    """Return activations and gradients of the loss for ids [1, T], without the first `sinks`
    tokens.

    Each source gives `<name>.x` float32 and `<name>.gradient` bfloat16, both [1, H, T − sinks, D]
    on the CPU.

    Raises:
        CacheError: see `each_gradient`.
    """
    kept: dict[str, Tensor] = {}

    def keep(source: Source, x: Tensor, gradient: Tensor) -> None:
        kept[f"{source.name}.x"] = x.cpu().contiguous()
        kept[f"{source.name}.gradient"] = gradient.to(torch.bfloat16).cpu().contiguous()

    each_gradient(model, ids, sources, keep, sinks)
    return kept


def each_gradient(
    model: PreTrainedModel, ids: Tensor, sources: Collection[Source], see: SeeGradient, sinks: int = 0
) -> None:
    """Run the model on ids [1, T] and call `see(source, x, gradient)` for every source.

    x and gradient are float32 [1, H, T − sinks, D], on the model's device.

    Raises:
        CacheError: keys, values or gradients of a layer are not finite, or the loss does not depend
            on them.
    """
    seen: set[Source] = set()
    ropes = Ropes(text_config(model.config), AttentionShape.of(text_config(model.config)).key_dim)
    predictions = ids.shape[1] - 1

    def on_gradient(source: Source, x: Tensor, gradient: Tensor) -> None:
        gradient = gradient / predictions  # the loss is summed, because means would underflow in small types
        if source.pre_rope:
            rope = ropes.of(source.layer)
            cos_sin = angles_at_once(rope, x.shape[2], x.device).cos_sin()
            x, gradient = rope.invert(x.float(), *cos_sin), rope.vjp(gradient.float(), *cos_sin)
        x, gradient = x[:, :, sinks:].float(), gradient[:, :, sinks:].float()
        _check(source, x, gradient)
        seen.add(source)
        see(source, x, gradient)

    def through(layer: int, keys: Tensor, values: Tensor) -> LayerTokens:
        for source in sources:
            if source.layer == layer:
                x = keys if source.side == "keys" else values
                x.register_hook(partial(on_gradient, source, x.detach()))
        return LayerTokens(keys, values)

    with _only_activations_have_gradients(model):
        cache = OnePassCache(model.config, through)
        logits = model(input_ids=ids, use_cache=True, **cache_argument(model, cache)).logits
        logits.backward(_sum_gradient(logits.detach(), ids))
    for source in sources:
        if source not in seen:
            raise CacheError(
                f"the loss does not depend on the {source.side} of layer {source.layer}, so there is nothing to fit"
            )


def _sum_gradient(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the gradient of the summed cross-entropy of ids [1, T] with respect to logits [1, T,
    vocabulary]."""
    gradient = torch.zeros_like(logits)
    targets = ids[0, 1:].to(logits.device)
    for start in range(0, len(targets), POSITIONS_AT_A_TIME):
        wanted = targets[start : start + POSITIONS_AT_A_TIME]
        p = logits[0, start : start + len(wanted)].float().softmax(-1)
        p[torch.arange(len(wanted), device=p.device), wanted] -= 1
        gradient[0, start : start + len(wanted)] = p
    return gradient


@contextmanager
def _only_activations_have_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Compute gradients from the embeddings on, but for no weight; restore the settings
    afterwards."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    embeddings: Any = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, args, out: out.detach().requires_grad_(True))
    try:
        for p in learnt:
            p.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        hook.remove()
        for p in learnt:
            p.requires_grad_(True)


def _check(source: Source, x: Tensor, gradient: Tensor) -> None:
    for tensor, what in ((x, source.side), (gradient, f"gradients of {source.side}")):
        if not bool(tensor.isfinite().all()):
            raise CacheError(
                f"layer {source.layer}: {what} hold NaN or Inf; the model's own computation has overflowed "
                "(try bfloat16 or float32 weights)"
            )
