"""Codecs of a layer inside vLLM: from the recipe, the calibration and the model's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tersekv.codecs import Codec
from tersekv.codecs.exact import Exact
from tersekv.errors import UserError
from tersekv.plan import LayerPlan
from tersekv.serving.slots import Slots
from tersekv.serving.vllm.options import EXAMPLE, Choice
from tersekv.transforms.rope import Rope


class LayerPages(NamedTuple):
    """Layout of one layer's pages. rope: of its keys, if their codec needs it."""

    slots: Slots
    rope: Rope | None


def pages_of(choice: Choice, vllm_config: Any, layer: int, kv_heads: int) -> LayerPages | None:
    """Return the pages of one layer with `kv_heads` KV heads in this process; None if vLLM's own
    cache serves it (`…;0=exact`).

    Raises:
        UserError: the recipe needs a calibration that is missing or of another model, or a codec
            cannot be served.
    """
    from tersekv.models.config import AttentionShape, text_config
    from tersekv.models.rope import Ropes

    model = vllm_config.model_config
    config = text_config(model.hf_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    with _float32():
        plan = layer_plan(choice, model.hf_config, layer)
        if isinstance(plan.keys, Exact) and isinstance(plan.values, Exact):
            return None
        slots = Slots(plan.keys, plan.values, model.get_head_size())
        all_heads = AttentionShape.of(config).kv_heads if ranks > 1 else kv_heads
        keys, values = (_of_rank(codec, kv_heads, ranks, all_heads) for codec in (plan.keys, plan.values))
        return LayerPages(dataclasses.replace(slots, keys=keys, values=values), _rope(keys, config, layer, Ropes))


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    """Make float32 the default type. vLLM loads models with that of the weights as default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def layer_plan(choice: Choice, config: Any, layer: int) -> LayerPlan:
    """Return the codecs of a layer with their calibration. config: of transformers.

    Raises:
        UserError: the recipe needs a calibration that is missing or of another model.
    """
    from tersekv.calibration.find import calibrated_plans
    from tersekv.calibration.needs import attention_plans, needs_corpus

    if not needs_corpus(choice.recipe, config):
        return attention_plans(choice.recipe, config)[layer]
    if choice.calibration is None:
        example = EXAMPLE.replace("kivi:bits=4", str(choice.recipe)).replace('"}}', '", "calibration": "FILE"}}')
        raise UserError(
            f"recipe '{choice.recipe}' needs a calibration: make one with `tersekv calibrate --model MODEL --recipe "
            f"'{choice.recipe}' --out FILE` and give it as {example}"
        )
    return calibrated_plans(choice.recipe, config, choice.calibration)[layer]


def _of_rank(codec: Codec, kv_heads: int, ranks: int, all_heads: int) -> Codec:
    """Return the codec for this rank's heads under tensor parallelism."""
    if ranks == 1:
        return codec
    if codec.encode_spans_heads:
        raise UserError(
            f"{codec.label} for {codec.side} codes all heads of a token together, which tensor parallelism "
            "divides; use one process"
        )
    from vllm.distributed import get_tensor_model_parallel_rank

    return codec.of_heads(get_tensor_model_parallel_rank() * all_heads // ranks, kv_heads)


def _rope(keys: Codec, config: Any, layer: int, ropes: Any) -> Rope | None:
    """Return the RoPE that a layer's key codec needs. Layers of a config share one object."""
    if not keys.needs_rope:
        return None
    if _ropes.get("config") is not config:
        _ropes.update(config=config, ropes=ropes(config, keys_dim(config)))
    found: Rope | None = _ropes["ropes"].needed_by(keys, layer)
    return found


_ropes: dict[str, Any] = {}


def keys_dim(config: Any) -> int:
    """Return the head dim of a model's keys."""
    from tersekv.models.config import AttentionShape

    return AttentionShape.of(config).key_dim
