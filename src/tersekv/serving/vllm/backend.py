"""Attention backends that replace vLLM's own of a platform: packed pages if a recipe is set, else
vLLM's attention.

`cpu.py` and `cuda.py` name the vLLM backend that is replaced. Pools and kernels work on the device
of their memory.

A layer becomes packed in these steps, all called by vLLM:

1. `Attention.__init__` asks the backend for its implementation. If a recipe is set it is
`PackedImpl`, which checks the options of the layer.
2. After the weights are loaded, `process_weights_after_loading` finds the layer and its part of the
recipe. A packed layer gets a backend for its slot size; other layers get vLLM's own implementation
back.
3. vLLM asks each packed layer's backend (`OfSlots`) for the size of a page. `customize_spec` sets
`state_content_bytes`, bytes per token and KV head. Capacity, block tables and prefix caching follow
from it.
4. At every step `PackedBuilder` plans destinations and reads, once for all layers with one block table.
`PackedImpl.forward` writes tokens and attends.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

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
from tersekv.serving.dense import AttentionKind, DenseAttention, attend_dense
from tersekv.serving.pages import PagePool
from tersekv.serving.steps import EngineStep, Rows
from tersekv.serving.vllm.options import Choice, configured, note, why_not_engine, why_not_layer
from tersekv.serving.vllm.plans import LayerPages, pages_of


class ByRecipe:
    """Mixin for a backend that replaces vLLM's backend `native`."""

    native: ClassVar[type[AttentionBackend]]
    dense: ClassVar[DenseAttention] = staticmethod(attend_dense)
    """Attention of prompts over unpacked tokens."""

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """Return `PackedImpl` if a recipe is set, else vLLM's own implementation."""
        return cls.native.get_impl_cls() if configured(get_current_vllm_config()) is None else PackedImpl


class OfSlots(AttentionBackend):
    """Base class of the backends of packed layers, which `of_slots` creates."""

    name: ClassVar[str]
    token_bytes: ClassVar[int]
    """Bytes per token and KV head."""

    @classmethod
    def get_name(cls) -> str:
        """Return the name of the replaced vLLM backend, because layers look it up in vLLM's
        registry."""
        return cls.name

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return `PackedImpl`."""
        return PackedImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return `PackedBuilder`."""
        return PackedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the supported page sizes: multiples of a block of 32 tokens."""
        return [MultipleOf(BLOCK_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the supported layout: a layer's pages are contiguous, with heads before tokens."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec with the size of packed tokens."""
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.token_bytes)


@functools.cache
def of_slots(name: str, token_bytes: int) -> type[OfSlots]:
    """Create the backend of packed layers with slots of `token_bytes` bytes, which replaces vLLM's
    `name`. Class names differ by size, because vLLM distinguishes backends by them."""
    return type(f"Packed{token_bytes}Backend", (OfSlots,), {"name": name, "token_bytes": token_bytes})


@dataclass
class PackedMetadata(AttentionMetadata):
    """Plan of one step for a group of layers."""

    num_actual_tokens: int
    step: EngineStep


class Plans:
    """Rows and the latest step of one block table. vLLM makes a builder for each size of slots; they share this."""

    of_tables: ClassVar[WeakValueDictionary[tuple[int, ...], Plans]] = WeakValueDictionary()
    """By engine, the table's memory at first and the tokens of a page. Each is kept by its builders."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.asked: tuple[object, ...] | None = None
        self.made: PackedMetadata | None = None

    def plan(self, batch: CommonAttentionMetadata, page_tokens: int, device: torch.device) -> PackedMetadata:
        """Plan the step of a batch, or return the plan of another builder for the same step."""
        n = batch.num_reqs
        starts, seen = batch.query_start_loc_cpu[: n + 1].numpy(), batch.seq_lens[:n].cpu().numpy()
        most = -(-int(seen.max(initial=1)) // page_tokens)
        pages = batch.block_table_tensor[:n, :most].to("cpu", copy=True)  # vLLM overwrites it in the next step
        asked = batch.num_actual_tokens, starts.tobytes(), seen.tobytes(), pages.numpy().tobytes()
        if self.made is None or self.asked != asked:
            self.asked = None  # until the plan is whole
            step = EngineStep.plan(starts, seen, pages, page_tokens, self.rows)
            self.asked, self.made = asked, PackedMetadata(batch.num_actual_tokens, step.to(device))
        return self.made


class PackedBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Plans a step, once for all layers with the same block table."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_tokens = kv_cache_spec.block_size
        self.plans: Plans | None = None
        # drafts and halves of a batch have plans between those of other builders for one step
        apart = vllm_config.speculative_config is not None or vllm_config.parallel_config.use_ubatching
        self.sharing = id(self) if apart else 0

    def _rows(self) -> Rows:
        # twice as many, because a request may be left out of a step and return in the next one
        most = 2 * self.vllm_config.scheduler_config.max_num_seqs
        return Rows(most, self.vllm_config.speculative_config is not None)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        """Plan the step of a batch: destinations of its tokens, and the tokens that each query
        reads.

        Raises:
            UserError: the batch does not use causal attention.
        """
        batch = common_attn_metadata
        if batch.causal is not True:
            raise UserError("packed pages serve causal attention only; this batch asks for another")
        if self.plans is None:
            memory = batch.block_table_tensor.untyped_storage().data_ptr()
            table = id(self.vllm_config), memory, self.page_tokens, self.sharing
            self.plans = Plans.of_tables.get(table) or Plans(self._rows())
            Plans.of_tables[table] = self.plans
        return self.plans.plan(batch, self.page_tokens, self.device)


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
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.sliding_window = sliding_window
        sinks = other.pop("sinks", None)
        self._kind = AttentionKind(float(scale), logits_soft_cap or None, sliding_window, sinks)
        asked = {"ALiBi": alibi_slopes} | other
        self._vllm_config = get_current_vllm_config()
        note(self._vllm_config)
        cache = self._vllm_config.cache_config
        # vLLM chooses the size later, from those of `OfSlots`, unless the user sets it
        page_tokens = cache.block_size if cache.user_specified_block_size else BLOCK_TOKENS
        self._why_not = why_not_engine(self._vllm_config) or why_not_layer(
            head_size, asked, kv_cache_dtype, getattr(attn_type, "value", attn_type), kv_sharing_target_layer_name,
            page_tokens,
        )  # fmt: skip
        self._choice: Choice | None = None
        self._pages: LayerPages | None = None
        self._dense: DenseAttention = attend_dense
        self._pool: tuple[int, PagePool] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer its packed backend, or vLLM's own implementation if the recipe keeps it
        exact.

        Raises:
            UserError: the recipe packs this layer, but the layer or engine does not support that.
        """
        if self._pages is not None:  # the weights of a running engine are loaded again
            return
        layers = self._vllm_config.compilation_config.static_forward_context
        name, layer = next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        self._choice = configured(self._vllm_config)
        assert self._choice is not None
        recipe = self._choice.recipe
        self._pages = pages_of(self._choice, self._vllm_config, extract_layer_index(name), layer.num_kv_heads)
        if self._pages is None:
            layer.impl = layer.attn_backend.native.get_impl_cls()(**self._own)
            layer.impl.process_weights_after_loading(act_dtype)
        elif self._why_not is not None:
            raise UserError(f"recipe '{recipe}' cannot pack {name}: {self._why_not}")
        elif layer.head_size_v != self.head_size:
            raise UserError(f"recipe '{recipe}' cannot pack {name}: values have another head dim than keys")
        elif "native" not in vars(layer.attn_backend):
            raise UserError(f"recipe '{recipe}' cannot pack {name}: its attention is {layer.attn_backend.__name__}")
        else:
            self._dense = layer.attn_backend.dense
            layer.attn_backend = of_slots(layer.attn_backend.get_name(), self._pages.slots.token_bytes)

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
        """Write new tokens to the pool and attend; the result is stored in `output`, which is
        returned.

        query: [T, Hq, D]. key, value: [T, H, D]. kv_cache: uint8 [S, H, p, token_bytes].
        """
        if attn_metadata is None:  # vLLM profiles a step without a cache
            return output.zero_()
        n, step = attn_metadata.num_actual_tokens, attn_metadata.step
        pool = self._pool_of(kv_cache)
        if n < len(query):  # the rest fills up a graph's size
            query, key, value = query[:n], key[:n], value[:n]
        pool.write(key, value, step)
        own = output if n == len(output) else output[:n]
        own.copy_(pool.attend(query, key, value, step).view_as(own))
        return output

    def _pool_of(self, memory: Tensor) -> PagePool:
        if self._pool is None or self._pool[0] != memory.data_ptr():
            assert self._pages is not None
            assert self._choice is not None
            slots, rope = self._pages
            sinks = self._kind.sink_logits
            if sinks is not None and sinks.dtype != torch.bfloat16:
                sinks = sinks.float()  # vLLM's kernel reads these two types
            made = PagePool(
                slots, memory, self._kind._replace(sink_logits=sinks), rope, self._dense, self._choice.exact
            )
            self._pool = memory.data_ptr(), made
        return self._pool[1]
