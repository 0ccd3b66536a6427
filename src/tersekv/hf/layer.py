"""One attention layer of a `CompressedCache`: a store behind transformers' layer interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from tersekv.cache.evicting import UNREADABLE, EvictingStore
from tersekv.cache.layer import LayerStore
from tersekv.cache.schema import anything, each, flag, of_spec, one_of, record, require, whole
from tersekv.cache.scored_eviction import new_store
from tersekv.cache.state import State, own
from tersekv.errors import CacheError, UserError
from tersekv.hf.base import ModelCache
from tersekv.hf.handle import Pending, PendingTokens
from tersekv.hf.progress import checked_crop
from tersekv.hf.traced import NewTokens, is_traced, num_tokens, register
from tersekv.malloc_trim import malloc_trim
from tersekv.recipe import LayerPlan

FLOATS = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
"""Types of keys and values by the names that files have for them."""

MUCH_MEMORY, MANY_TOKENS = 1 << 20, 128
"""Bytes of new keys, and how many tokens they are of, from which on packing them leaves memory behind that is worth
asking for: a prompt, not a step of a large batch."""


class CompressedLayer(CacheLayerMixin):
    """One attention layer: a `LayerStore` behind transformers' layer interface."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: ModelCache, index: int, plan: LayerPlan, window: int | None) -> None:
        super().__init__()
        self.cache, self.index, self.plan, self.sliding_window = cache, index, plan, window
        self.is_sliding = window is not None
        self.store: LayerStore | EvictingStore | None = None
        self.record_past = False
        self.home: torch.device | None = None
        self.handle = register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy gets a handle of its own."""
        self.__dict__.update(state)
        self.handle = register(self)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # a constant of transformers' own classes
        """True if a compiled forward pass can call the operators on this layer."""
        return self.cache.is_traceable

    # ------------------------------------------------------------------ growing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create the store with the shapes of the first tokens."""
        rope = self.cache.ropes.needed_by(self.plan.keys, self.index)
        heads = self.cache.heads(key_states.shape[1])
        self.store = new_store(
            self.plan, key_states, value_states, self.sliding_window, rope, heads, self.cache.context_parallel
        )
        self.store.record_past = self.record_past
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take new tokens [B, H, n, D]. Returns handles where our attention is installed, else all tokens decoded."""
        if self.cache.hands_out_handles:
            return self.pending(key_states, value_states)
        self._prepare(key_states, value_states)
        self.cache.warn_decoding()
        return self.append_and_decode(key_states, value_states)

    def traced(self, keys: Tensor, values: Tensor) -> tuple[NewTokens, NewTokens]:
        """`update` while a forward pass is traced: nothing is appended before the compiled pass runs."""
        return NewTokens(self.handle, keys), NewTokens(self.handle, values)

    def pending(self, keys: Tensor, values: Tensor) -> tuple[PendingTokens, PendingTokens]:
        """Handles of new tokens [B, H, n, D], which our attention function appends."""
        store = self.store
        if store is None or (held := store.keys.sinks.shape)[:2] != keys.shape[:2] or held[3] != keys.shape[3]:
            self._prepare(keys, values)
        pending = Pending(self, keys, values)
        return PendingTokens(pending, False), PendingTokens(pending, True)

    def _prepare(self, keys: Tensor, values: Tensor) -> None:
        self._check(keys, values)
        if self.store is None:
            self.lazy_initialization(keys, values)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if self.store is None:
            return
        B, H, D = self.store.batch_size, self.store.kv_heads, self.store.keys.head_dim
        if keys.shape[:2] != (B, H) or keys.shape[-1] != D:
            raise CacheError(
                f"layer {self.index} holds batch {B} × {H} heads × {D}, got keys {tuple(keys.shape)}; "
                "use a new cache for another batch, or batch_repeat_interleave / batch_select_indices"
            )

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, votes: Tensor | None = None) -> None:
        """Add tokens to the store, with the attention that it has asked to see; errors name the layer."""
        assert self.store is not None
        progress, seen = self.cache.progress, self.store.num_tokens
        progress.torn = True
        try:
            self.store.append(keys, values, padding, *(() if votes is None else (votes,)))
        except (CacheError, UserError) as error:
            progress.torn = False
            raise type(error)(f"layer {self.index}: {error}") from error
        except BaseException:  # also KeyboardInterrupt: what was only prepared has changed nothing
            progress.torn = not self.store.is_whole(seen)
            raise
        progress.torn = False
        if progress.linear:
            progress.end(self.index)
        if keys.is_cpu and keys.nbytes >= MUCH_MEMORY and keys.shape[2] >= MANY_TOKENS:
            malloc_trim()

    def append_and_decode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens and return [B, H, tokens, D]: those held before decoded, the new ones exact.

        Raises:
            UserError: the layer's policy drops tokens.
        """
        assert self.store is not None
        if isinstance(self.store, EvictingStore):
            raise UserError(f"{self.cache.recipe}: {UNREADABLE}")
        past = self.store.decoded(keys.dtype) if self.store.num_tokens else None
        seen, offset = self.cache.mask_offsets.get(self.sliding_window, (-1, 0))
        missing = self.store.num_evicted - offset if seen == self.store.num_tokens else 0
        self.append(keys, values)
        if past is None:
            return keys, values
        # one mask serves all layers with a window, and they may have forgotten different blocks that it hides
        old_keys, old_values = (torch.nn.functional.pad(x, (0, 0, missing, 0)) for x in past)
        return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)

    def state(self) -> State:
        """A copy of what the layer holds, see `Stateful`; `plan`: what its codecs learnt from a corpus."""
        return own(self.live_state())

    def live_state(self) -> State:
        """The same without copying."""
        plan = {"keys": self.plan.keys.fitted, "values": self.plan.values.fitted}
        common: State = {"plan": plan, "record_past": self.record_past, "store": None}
        if self.store is None:
            return common
        B, H = self.store.batch_size, self.store.kv_heads
        common["heads"] = self._place_of_heads(H)
        shapes = [[B, H, 0, side.head_dim] for side in self.store.sides]
        dtype = str(self.dtype).removeprefix("torch.")
        return common | {"shapes": shapes, "dtype": dtype, "store": self.store.live_state()}

    def restore(self, state: State, batch: int, device: torch.device, place: str) -> None:
        """Hold what `state()` gave for so many rows. place: where errors say it is.

        Raises:
            UserError: a state that no layer of this model and recipe has, or one of other heads than this process
                holds.
        """
        shape, plan = self.cache.shape, self.plan
        learns = {
            "keys": plan.keys.learns(1, shape.kv_heads, shape.key_dim),
            "values": plan.values.learns(1, shape.kv_heads, shape.value_dim),
        }
        fitted = {
            side: record({name: of_spec(spec) for name, spec in specs.items()}, may_lack=True)
            for side, specs in learns.items()
        }
        head = {"plan": record(fitted), "record_past": flag, "heads": each(whole(0, shape.kv_heads), 3)}
        record({**head, "dtype": one_of(*FLOATS), "shapes": anything, "store": anything})(state, place)
        _, held, _ = state["heads"]
        shapes = [[batch, held, 0, shape.key_dim], [batch, held, 0, shape.value_dim]]
        require(held > 0 and state["shapes"] == shapes, f"{place}.shapes", f"must be {shapes}")
        if state["heads"] != (ours := self._place_of_heads(held)):
            raise UserError(
                f"the file holds key-value heads (first, number, of) {state['heads']}, and this process has "
                f"{ours}: processes that divide the heads save and load a file each"
            )
        for side, dim in (("keys", shape.key_dim), ("values", shape.value_dim)):
            codec = replace(getattr(plan, side), fitted=own(state["plan"][side]))
            fault = codec.learnt_fault(1, shape.kv_heads, dim)
            fault = fault or ("is not what the codec must have learnt" if codec.needs_fit == "corpus" else None)
            require(fault is None, f"{place}.plan.{side}", fault or "")
            self.plan = self.plan._replace(**{side: codec})
        self.record_past = state["record_past"]
        self.lazy_initialization(*(torch.empty(s, dtype=FLOATS[state["dtype"]], device=device) for s in shapes))
        assert self.store is not None
        self.store.restore(state["store"], f"{place}.store")

    def _place_of_heads(self, held: int) -> list[int]:
        heads = self.cache.heads(held)
        return [0, held, held] if heads is None else [heads.first, held, heads.total]

    # ------------------------------------------------------------------ transformers' questions

    def get_seq_length(self) -> int:
        """Tokens seen; while a forward pass is traced, a tensor that is read when the compiled pass runs."""
        if is_traced() and self.is_compileable:
            return num_tokens(self.handle)  # type: ignore[return-value]  # as transformers' static layers do
        return 0 if self.store is None else self.store.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks span all tokens seen; with handles the reader slices them, else dropped tokens are cut off in front.
        While a forward pass is traced the size is 0, which `attention_mask_for` takes for unknown."""
        if is_traced() and self.is_compileable:
            return 0, 0
        seen = self.get_seq_length()
        dropped = 0 if self.store is None or self.cache.hands_out_handles else self.store.num_evicted
        self.cache.mask_offsets[self.sliding_window] = seen, dropped
        return seen + query_length - dropped, dropped

    def get_max_length(self) -> int:
        """No maximum, or the sliding window."""
        return -1 if self.sliding_window is None else self.sliding_window

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return -1 if self.store is None else self.store.batch_size

    # ------------------------------------------------------------------ changing

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens; `tokens_to_remove` is minus their number."""
        tokens = -checked_crop(tokens_to_remove)
        self.check_crop(tokens)
        if self.store is not None:
            self.store.crop(tokens)

    def check_crop(self, tokens: int) -> None:
        """Raise CacheError unless that many of the latest tokens can be taken back."""
        if self.store is not None:
            try:
                self.store.check_crop(tokens)
            except CacheError as error:
                raise CacheError(f"layer {self.index}: {error}") from error

    def activate_past_recording(self) -> None:
        """From now on a sliding window forgets at a `crop` only, so that any number of proposals can be taken back."""
        self.record_past = True
        if self.store is not None:
            self.store.record_past = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.store is not None:
            rows = torch.arange(self.batch_size, device=self.store.device)
            self.store.select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: indices or a bool mask."""
        if self.store is not None:
            rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
            self.store.select(rows)

    def reset(self) -> None:
        """Forget all tokens and what was fitted on them."""
        self.store = None
        self.is_initialized = False

    def offload(self) -> None:
        """Move the bytes to the host."""
        if self.store is not None:
            self.home = self.store.device
            self.store.to("cpu")

    def prefetch(self) -> None:
        """Move the bytes back to where they were."""
        if self.store is not None and self.home is not None:
            self.store.to(self.home)
