"""Attention backends that stand for vLLM's own of a platform: packed pages where a recipe is set, else its own.

What differs by platform is the backend they stand for (`cpu.py`, `cuda.py`); pools and kernels work on the device of
their memory.

How a layer becomes packed, all in vLLM's own steps:

1. `Attention.__init__` asks the backend for its implementation: ours, if a recipe is set (`PackedImpl`), which checks
   what the layer wants of it.
2. When the weights are loaded, each implementation looks which layer it belongs to, reads in the recipe what that layer
   does, and gives it the backend of its slot size, or vLLM's own implementation back (`process_weights_after_loading`).
3. vLLM asks each packed layer's backend (`OfSlots`) what a page weighs: `customize_spec` states `state_content_bytes`,
   bytes per token and KV head. From here on capacity, block tables and prefix caching follow from it.
4. At every step `PackedBuilder` plans where tokens go and who reads what, once for all layers; `PackedImpl.forward`
   writes and reads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from tersekv.errors import UserError
from tersekv.layouts.base import BLOCK_TOKENS
from tersekv.serving.pages import PagePool
from tersekv.serving.slots import Slots
from tersekv.serving.steps import EngineStep, Rows
from tersekv.serving.vllm.options import configured, note, slots_of, why_not_engine, why_not_layer


class ByRecipe:
    """What vLLM resolves for a layer, beside the backend `native` that it stands for."""

    native: ClassVar[type[AttentionBackend]]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """Ours if a recipe is set."""
        return cls.native.get_impl_cls() if configured(get_current_vllm_config()) is None else PackedImpl


class OfSlots(AttentionBackend):
    """The backend of packed layers, made by `of_slots`."""

    name: ClassVar[str]
    token_bytes: ClassVar[int]
    """Bytes per token and KV head."""

    @classmethod
    def get_name(cls) -> str:
        """That of vLLM's own, which layers look up among the names it knows."""
        return cls.name

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Ours."""
        return PackedImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Ours."""
        return PackedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Whole blocks."""
        return [MultipleOf(BLOCK_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A layer's pages one after the other, heads before tokens."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A page of packed tokens weighs what they weigh."""
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.token_bytes)


@functools.cache
def of_slots(name: str, token_bytes: int) -> type[OfSlots]:
    """The backend of packed layers with slots of so many bytes, in place of vLLM's `name`. vLLM tells backends apart by
    the names of their classes."""
    return type(f"Packed{token_bytes}Backend", (OfSlots,), {"name": name, "token_bytes": token_bytes})


@dataclass
class PackedMetadata(AttentionMetadata):
    """One step of a group of layers."""

    num_actual_tokens: int
    step: EngineStep


class PackedBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Plans a step, once for all layers with the same slots."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_tokens = kv_cache_spec.block_size
        # a request may be left out of a step, and is still there for the next one
        self.rows = Rows(2 * vllm_config.scheduler_config.max_num_seqs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        """Requests with one query, requests with more, and where their tokens go."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise UserError("packed pages serve causal attention only; this batch asks for another")
        n, T = batch.num_reqs, batch.num_actual_tokens
        step = EngineStep.plan(
            batch.query_start_loc_cpu[: n + 1].tolist(),
            batch.seq_lens[:n].tolist(),
            batch.block_table_tensor[:n].to("cpu", copy=True),  # vLLM writes the next step's over it
            batch.slot_mapping[:T].to("cpu", torch.int64),
            self.page_tokens,
            self.rows,
        )
        return PackedMetadata(T, step.to(self.device))


class PackedImpl(AttentionImpl[PackedMetadata]):
    """Attention of one layer over packed pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **other: Any,
    ) -> None:
        self._own = dict(
            num_heads=num_heads, head_size=head_size, scale=scale, num_kv_heads=num_kv_heads, alibi_slopes=alibi_slopes,
            sliding_window=sliding_window, kv_cache_dtype=kv_cache_dtype, logits_soft_cap=logits_soft_cap,
            attn_type=attn_type, kv_sharing_target_layer_name=kv_sharing_target_layer_name, **other,
        )  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype, self.sliding_window = num_kv_heads, kv_cache_dtype, None
        self._softcap = logits_soft_cap or None
        asked = {"a sliding window": sliding_window, "ALiBi": alibi_slopes} | other
        self._vllm_config = get_current_vllm_config()
        note(self._vllm_config)
        cache = self._vllm_config.cache_config
        # a size that is not the user's is chosen later, among those of `OfSlots`
        page_tokens = cache.block_size if cache.user_specified_block_size else BLOCK_TOKENS
        self._why_not = why_not_engine(self._vllm_config) or why_not_layer(
            head_size, asked, kv_cache_dtype, getattr(attn_type, "value", attn_type), kv_sharing_target_layer_name,
            page_tokens,
        )  # fmt: skip
        self._slots: Slots | None = None
        self._pool: tuple[int, PagePool] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Become what the recipe says of this layer.

        Raises:
            UserError: the recipe packs the layer, and it is none that can be.
        """
        layers = self._vllm_config.compilation_config.static_forward_context
        name, layer = next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        recipe = configured(self._vllm_config)
        assert recipe is not None
        count = self._vllm_config.model_config.hf_text_config.num_hidden_layers
        self._slots = slots_of(recipe, extract_layer_index(name), count, self.head_size)
        if self._slots is None:
            layer.impl = layer.attn_backend.native.get_impl_cls()(**self._own)
            layer.impl.process_weights_after_loading(act_dtype)
        elif self._why_not is not None:
            raise UserError(f"recipe '{recipe}' cannot pack {name}: {self._why_not}")
        elif layer.head_size_v != self.head_size:
            raise UserError(f"recipe '{recipe}' cannot pack {name}: values have another head dim than keys")
        elif "native" not in vars(layer.attn_backend):
            raise UserError(f"recipe '{recipe}' cannot pack {name}: its attention is {layer.attn_backend.__name__}")
        else:
            layer.attn_backend = of_slots(layer.attn_backend.get_name(), self._slots.token_bytes)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PackedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, H, D], kv_cache uint8 [S, H, p, token_bytes]; output is written."""
        if attn_metadata is None:  # vLLM measures a step without a cache
            return output.zero_()
        n, step = attn_metadata.num_actual_tokens, attn_metadata.step
        pool = self._pool_of(kv_cache)
        pool.write(key[:n], value[:n], step)
        output[:n] = pool.attend(query[:n], key[:n], value[:n], step).view_as(output[:n])
        return output

    def _pool_of(self, memory: Tensor) -> PagePool:
        if self._pool is None or self._pool[0] != memory.data_ptr():
            assert self._slots is not None
            self._pool = memory.data_ptr(), PagePool(self._slots, memory, self.scale, self._softcap)
        return self._pool[1]
