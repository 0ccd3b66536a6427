"""Keys and values of a text with the gradients of the loss with respect to them: what calibration learns from.

The loss is the mean cross-entropy of the next token; squared gradients of it are the diagonal Fisher information that
KVQuant (arXiv 2401.18079, §3.3) weighs k-means with. Weights are frozen, so that the backward pass keeps nothing for
them. A key's gradient before RoPE is its gradient after RoPE, pulled back by the rotation's transpose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.cache.rotary import Rotary
from tersekv.errors import CacheError
from tersekv.hf.capture import LayerTokens, OnePassCache
from tersekv.hf.config import AttentionShape, text_config
from tersekv.hf.rope import Ropes
from tersekv.layouts.base import Side

POSITIONS_AT_A_TIME = 256
"""Positions whose distributions over the vocabulary are made at a time, which bounds the copies of logits."""


class Source(NamedTuple):
    """What a codec learns from: one side of one layer; keys before RoPE or after it."""

    layer: int
    side: Side
    pre_rope: bool = False

    @property
    def name(self) -> str:
        """As in files."""
        return f"layers.{self.layer}.{self.side}{'.pre_rope' if self.pre_rope else ''}"


def layer_gradients(
    model: PreTrainedModel, ids: Tensor, sources: Collection[Source], sinks: int = 0
) -> dict[str, Tensor]:
    """For each source, `<name>.x` float32 and `<name>.gradient` bfloat16, both [1, H, T − sinks, D] on the CPU: the
    activations of ids [1, T] without the first `sinks` tokens, and the gradients of the loss with respect to them.

    Raises:
        CacheError: a layer's keys or values are not finite, or nothing depends on them.
    """
    kept: dict[str, Tensor] = {}
    ropes = Ropes(text_config(model.config), AttentionShape.of(text_config(model.config)).key_dim)
    predictions = ids.shape[1] - 1

    def keep(source: Source, x: Tensor, gradient: Tensor) -> None:
        gradient = gradient / predictions  # the backward pass begins with the sum, which small types can hold
        if source.pre_rope:
            rotary = Rotary(ropes.of(source.layer))
            rotary.note(0, x.shape[2])
            cos_sin = rotary.angles(0, x.shape[2], x.device).cos_sin()
            x = rotary.rope.invert(x.float(), *cos_sin)
            gradient = rotary.rope.vjp(gradient.float(), *cos_sin)
        kept[f"{source.name}.x"] = x[:, :, sinks:].float().cpu().contiguous()
        kept[f"{source.name}.gradient"] = gradient[:, :, sinks:].to(torch.bfloat16).cpu().contiguous()

    def through(layer: int, keys: Tensor, values: Tensor) -> LayerTokens:
        for source in sources:
            if source.layer == layer:
                x = keys if source.side == "keys" else values
                x.register_hook(partial(keep, source, x.detach()))
        return LayerTokens(keys, values)

    with _only_activations_have_gradients(model):
        cache = OnePassCache(model.config, through)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        logits.backward(_sum_gradient(logits.detach(), ids))
    for source in sources:
        _check(source, kept)
    return kept


def _sum_gradient(logits: Tensor, ids: Tensor) -> Tensor:
    """Gradient of the summed cross-entropy of ids [1, T] with respect to logits [1, T, vocabulary]."""
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
    """Gradients flow from the embeddings on and to no weight; all is put back on leaving."""
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


def _check(source: Source, kept: dict[str, Tensor]) -> None:
    if f"{source.name}.x" not in kept:
        raise CacheError(f"the loss does not depend on the {source.side} of layer {source.layer}; nothing to learn")
    for part in ("x", "gradient"):
        if not bool(kept[f"{source.name}.{part}"].isfinite().all()):
            what = source.side if part == "x" else f"gradients of {source.side}"
            raise CacheError(
                f"layer {source.layer}: {what} hold NaN or Inf; the model's own computation has overflowed "
                "(try bfloat16 or float32 weights)"
            )
