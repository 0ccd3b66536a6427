"""The attention backend that vLLM's CPU platform gets: packed pages where a recipe is set, else its own.

How a layer becomes packed, all in vLLM's own steps:

1. `Attention.__init__` asks the backend for its implementation: ours, if a recipe is set (`PackedImpl`), which checks
   what the layer wants of it.
2. When the weights are loaded, each implementation looks which layer it belongs to, reads in the recipe what that layer
   does, and gives it the backend of its slot size, or vLLM's own implementation back (`process_weights_after_loading`).
3. vLLM asks each layer's backend what a page weighs: `customize_spec` states `state_content_bytes`, bytes per token
   and KV head. From here on capacity, block tables and prefix caching follow from it.
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
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import AttentionSpec

from tersekv.errors import UserError
from tersekv.formats.base import BLOCK_TOKENS
from tersekv.serving.pages import Pool
from tersekv.serving.slots import Slots
from tersekv.serving.steps import Rows, Step
from tersekv.serving.vllm.options import configured, note, slots_of, why_not_layer


class PackedBackend(CPUAttentionBackend):
    """What vLLM resolves for a layer on a CPU; `of_slots` makes that of a packed layer."""

    forward_includes_kv_cache_update = False
    token_bytes: ClassVar[int | None] = None
    """Bytes per token and KV head; None: vLLM's own layout."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Ours if a recipe is set."""
        return CPUAttentionBackendImpl if configured(get_current_vllm_config()) is None else PackedImpl

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A page of packed tokens weighs what they weigh."""
        if cls.token_bytes is None:
            return spec
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.token_bytes)

    @staticmethod
    @functools.cache
    def of_slots(token_bytes: int) -> type[PackedBackend]:
        """The backend of packed layers with slots of so many bytes. vLLM tells backends apart by their names."""
        return type(f"Packed{token_bytes}Backend", (_OfSlots,), {"token_bytes": token_bytes})


class _OfSlots(PackedBackend):
    """What packed layers have in common."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Ours."""
        return PackedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Whole blocks."""
        return [MultipleOf(BLOCK_TOKENS)]


@dataclass
class PackedMetadata(AttentionMetadata):
    """One step of a group of layers."""

    num_actual_tokens: int
    step: Step


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
        step = Step.plan(
            batch.query_start_loc_cpu[: n + 1].tolist(),
            batch.seq_lens[:n].tolist(),
            batch.block_table_tensor[:n].clone(),
            batch.slot_mapping[:T].long(),
            self.page_tokens,
            self.rows,
        )
        return PackedMetadata(T, step)


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
        self._why_not = why_not_layer(
            head_size, asked, kv_cache_dtype, getattr(attn_type, "value", attn_type), kv_sharing_target_layer_name,
            self._vllm_config.cache_config.block_size,
        )  # fmt: skip
        self._slots: Slots | None = None
        self._pool: tuple[int, Pool] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Become what the recipe says of this layer.

        Raises:
            UserError: the recipe packs the layer, and it is none that can be.
        """
        layers = self._vllm_config.compilation_config.static_forward_context
        name, layer = next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        recipe = configured(self._vllm_config)
        assert recipe is not None
        if self._vllm_config.kv_transfer_config is not None:
            raise UserError(f"recipe '{recipe}' is set, and so is a KV connector, which has not been tried with it")
        count = self._vllm_config.model_config.hf_text_config.num_hidden_layers
        self._slots = slots_of(recipe, extract_layer_index(name), count, self.head_size)
        if self._slots is None:
            layer.impl, layer.attn_backend = CPUAttentionBackendImpl(**self._own), CPUAttentionBackend
        elif self._why_not is not None:
            raise UserError(f"recipe '{recipe}' cannot pack {name}: {self._why_not}")
        elif layer.head_size_v != self.head_size:
            raise UserError(f"recipe '{recipe}' cannot pack {name}: values have another head dim than keys")
        else:
            layer.attn_backend = PackedBackend.of_slots(self._slots.token_bytes)

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

    def _pool_of(self, memory: Tensor) -> Pool:
        if self._pool is None or self._pool[0] != memory.data_ptr():
            assert self._slots is not None
            self._pool = memory.data_ptr(), Pool(self._slots, memory, self.scale, self._softcap)
        return self._pool[1]
