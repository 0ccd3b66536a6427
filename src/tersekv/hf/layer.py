"""One attention layer of a `CompressedCache`: a store with transformers' cache layer interface."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from tersekv.cache.head_tokens import UNREADABLE
from tersekv.cache.layer import LayerStore
from tersekv.cache.schema import Check, anything, each, flag, of_spec, one_of, optional, record, require, tensor, whole
from tersekv.cache.segments import UNSEEN, Observed
from tersekv.cache.state import State, own
from tersekv.cache.together import Call, encode_ahead
from tersekv.calibration.key_error import STEP
from tersekv.errors import CacheError, UserError
from tersekv.hf.base import ModelCache, options
from tersekv.hf.handle import Pending, PendingTokens
from tersekv.hf.progress import checked_crop
from tersekv.hf.traced import NewTokens, is_traced, num_tokens, register
from tersekv.malloc_trim import malloc_trim
from tersekv.recipe import LayerPlan
from tersekv.sizes.rate_allotment import with_rates
from tersekv.tensors import plain, type_name

FLOATS = {type_name(t): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
"""Types of keys and values by their names in files."""

MUCH_MEMORY, MANY_TOKENS = 1 << 26, 128
"""Bytes of exact prompts, and tokens of a call, from which freed memory is returned to the system after packing: at
every 8 MB, prompts took 10 % longer. Decode steps of a large batch have fewer tokens."""

PARTS = "keys", "values", "policy"
"""Parts of a plan whose options a state names."""


class CompressedLayer(CacheLayerMixin):
    """One attention layer: a `LayerStore` with transformers' cache layer interface."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: ModelCache, index: int, plan: LayerPlan, window: int | None) -> None:
        super().__init__()
        # Without a cycle, a cache that is dropped is freed at once. `torch.compile` can trace a reference, not a proxy.
        self.cache, self.reference = weakref.proxy(cache), weakref.ref(cache)
        self.index, self.plan, self.sliding_window = index, plan, window
        self.is_sliding = window is not None
        self.asked: LayerPlan | None = None  # the plan without rates that were chosen on the prompt
        self.store: LayerStore | None = None
        self.record_past = self.loaded = False
        self.first_tokens = 0  # tokens of the first call, on which codecs may depend
        self.home: torch.device | None = None
        self.measured = not plan.keys.has_rates  # True once the error of packed keys was measured
        self.handle = register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a copy and register a new handle for it."""
        self.__dict__.update(state)
        self.handle = register(self)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # a constant of transformers' own classes
        """True if a compiled forward pass can call the operators on this layer."""
        return (cache := self.reference()) is not None and cache.is_traceable

    # ------------------------------------------------------------------ growing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create the store with the shapes of the first tokens."""
        self.first_tokens = self.first_tokens or key_states.shape[2]
        plan = self.plan.in_layer(self.first_tokens, self.sliding_window, key_states.shape[-1], value_states.shape[-1])
        rope = self.cache.ropes.needed_by(plan.keys, self.index)
        heads = self.cache.heads(key_states.shape[1], self.index)
        known = self.cache.ropes.known(self.index) if plan.policy.observes and rope is None else rope
        shared = self.cache.context_parallel
        self.store = LayerStore(plan, key_states, value_states, self.sliding_window, rope, heads, shared, known)
        self.store.record_past(self.record_past)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @plain
    def choose_rates(self, plan: LayerPlan) -> None:
        """Use a plan with rates that were chosen on the prompt. Nothing is packed yet."""
        assert self.store is not None
        held, self.asked, self.plan = self.store.live_state(), self.plan, plan
        self.lazy_initialization(*(x[:, :, :0].to(self.dtype) for x in self.store.recent.data))
        self.store.restore(held | {"tiers": self.store.live_state()["tiers"]})

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Accept new tokens [B, H, n, D]. Return handles if our attention is installed, else all tokens decoded."""
        progress = self.cache.progress
        if progress.handles is None:
            progress.handles = self.cache.hands_out_handles
        if progress.handles:
            return self.pending(key_states, value_states)
        self._prepare(key_states, value_states)
        self.cache.warn_decoding()
        return self.append_and_decode(key_states, value_states)

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Append new keys [B, n, D] of the model's indexer and return those of all tokens. `update` comes first."""
        assert self.store is not None
        new = 0 if self.cache.progress.handles else keys.shape[1]  # handles are appended later
        return self.store.index(keys, self.get_seq_length() - new)

    def traced(self, keys: Tensor, values: Tensor) -> tuple[NewTokens, NewTokens]:
        """Do the work of `update` in a traced forward pass. Tokens are appended when the compiled pass runs."""
        return NewTokens(self.handle, keys), NewTokens(self.handle, values)

    def pending(self, keys: Tensor, values: Tensor) -> tuple[PendingTokens, PendingTokens]:
        """Return handles of new tokens [B, H, n, D]; our attention function appends them later."""
        store = self.store
        held: tuple[int, ...] = () if store is None or self.loaded or not store.num_tokens else store.shape
        if held[:2] != keys.shape[:2] or held[3] != keys.shape[3]:
            self._prepare(keys, values)
        pending = Pending(self, keys, values)
        return PendingTokens(pending, False), PendingTokens(pending, True)

    def _prepare(self, keys: Tensor, values: Tensor) -> None:
        store = self.store
        if store is not None and not store.num_tokens and not self.cache.waiting.tokens(self.index):
            like = store.device, self.dtype, store.shape[:2], self.first_tokens, store.shape[3]
            if not self.loaded or like != (keys.device, keys.dtype, keys.shape[:2], *keys.shape[2:]):
                self.reset()  # it was made for another call, or a first pass that was interrupted
        self._check(keys, values)
        if self.store is None:
            self.lazy_initialization(keys, values)
            shape = self.cache.shape_of(self.index)
            # all at once takes less time; outside a forward pass the other layers may not follow
            for layer in self.cache.waiting.layers.values() if self.cache.progress.handles else ():
                if layer.store is None and self.cache.shape_of(layer.index) == shape:
                    layer.lazy_initialization(keys, values)
                    layer.loaded = True
        elif self.loaded and self.store.device != keys.device:  # the model is distributed over devices
            self.store.to(keys.device)
        self.loaded = False

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if self.store is None:
            return
        B, H, D = self.store.batch_size, self.store.kv_heads, self.store.keys.head_dim
        if keys.shape[:2] != (B, H) or keys.shape[-1] != D:
            raise CacheError(
                f"layer {self.index} holds batch {B} × {H} heads × {D}, got keys {tuple(keys.shape)}; "
                "use a new cache for another batch, or batch_repeat_interleave / batch_select_indices"
            )

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, observed: Observed = UNSEEN) -> None:
        """Append tokens to the store, see `LayerStore`, or let them wait for those of other layers."""
        if not self.cache.waiting.take(self.index, call := Call(keys, values, padding, observed)):
            self.add(*call)

    def add(self, keys: Tensor, values: Tensor, padding: Tensor | None, observed: Observed) -> None:
        """Append tokens to the store. Errors name the layer."""
        assert self.store is not None
        progress, seen = self.cache.progress, self.store.num_tokens
        if keys.shape[2] == 1 > self.store.room and progress.encoded != seen and self.store.leaves():
            progress.encoded = seen
            encode_ahead([layer.store for layer in compressed_layers(self.cache) if layer.index >= self.index])
        progress.torn = True
        try:
            self.store.append(keys, values, padding, observed)
        except (CacheError, UserError) as error:
            progress.torn = False
            raise type(error)(f"layer {self.index}: {error}") from error
        except BaseException:  # also KeyboardInterrupt, which may come before anything has changed
            progress.torn = not self.store.is_whole(seen)
            raise
        progress.torn = False
        if not self.measured and (keys.shape[2] > 1 or not self.store.num_tokens % STEP):
            progress.keep_keys(self.index, keys)
        if progress.linear:
            progress.end(self.index)
        if (progress.unchecked or keys.shape[2] > 1) and self.index == max(progress.attention):  # the pass ends
            progress.check_keys()
            self.cache.ropes.forget()
        if keys.is_cpu and keys.shape[2] >= MANY_TOKENS:
            progress.freed += keys.nbytes + values.nbytes
            if progress.freed >= MUCH_MEMORY:
                progress.freed = 0
                malloc_trim()

    def append_and_decode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens and return all [B, H, tokens, D]: earlier tokens decoded, new tokens exact.

        Raises:
            UserError: the layer's policy evicts tokens.
        """
        assert self.store is not None
        if self.store.by_head:
            raise UserError(f"{self.cache.recipe}: {UNREADABLE}")
        past = self.store.decoded(keys.dtype) if self.store.num_tokens else None
        seen, offset = self.cache.mask_offsets.get(self.sliding_window, (-1, 0))
        missing = self.store.num_evicted - offset if seen == self.store.num_tokens else 0
        self.append(keys, values)
        if past is None:
            return keys, values
        # All layers with this window share one mask, but may have evicted different numbers of
        # tokens that it hides.
        old_keys, old_values = (torch.nn.functional.pad(x, (0, 0, missing, 0)) for x in past)
        return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)

    def state(self) -> State:
        """Return a copy of the layer's state, see `Stateful`. Entry `plan`: calibrated tensors, and options."""
        return own(self.live_state())

    def live_state(self) -> State:
        """Return the same state as `state`, without copying its tensors."""
        packed = {name: options(getattr(self.plan, name)) for name in PARTS}
        plan: State = {"keys": self.plan.keys.fitted, "values": self.plan.values.fitted, "options": packed}
        if self.plan.policy.needs_scores:
            plan["scores"] = self.plan.scores
        if self.plan.rates is not None:
            plan["rates"] = self.plan.rates
        common = {"plan": plan, "record_past": self.record_past, "first_tokens": self.first_tokens, "store": None}
        if self.store is None:
            return common
        B, H = self.store.batch_size, self.store.kv_heads
        common["heads"] = self._place_of_heads(H)
        shapes = [[B, H, 0, side.head_dim] for side in self.store.sides]
        dtype = type_name(self.dtype)
        return common | {"shapes": shapes, "dtype": dtype, "store": self.store.live_state()}

    @property
    def _rates(self) -> Check:
        """Check of `LayerPlan.rates` in a state."""
        return tensor(torch.float32, self.cache.kv_heads[self.index], 3, low=0)

    def adopt_rates(self, state: Any, place: str) -> None:
        """Give the layer the rates in a state, if they were chosen for it (`LayerPlan.rates`)."""
        held = state.get("plan") if isinstance(state, dict) else None
        rates = held.get("rates") if isinstance(held, dict) else None
        if rates is None or not self.plan.policy.allots:
            return
        self._rates(rates, f"{place}.plan.rates")
        try:
            self.asked = self.plan if self.plan.policy.waits else None
            self.plan = with_rates(self.plan, own(rates))
        except UserError as error:
            raise UserError(f"{place}.plan.rates do not fit the codec: {error}") from error

    def restore(self, state: State, batch: int, device: torch.device, place: str) -> None:
        """Restore what `state()` returned, for `batch` rows. place: name of the state in error messages.

        Raises:
            UserError: the state does not fit this model and recipe, or holds other heads than this
                process.
        """
        self.loaded = True
        self.adopt_rates(state, place)
        shape, plan = self.cache.shape_of(self.index), self.plan
        learns = {
            "keys": plan.keys.learns(1, shape.kv_heads, shape.key_dim),
            "values": plan.values.learns(1, shape.kv_heads, shape.value_dim),
        }
        fitted: dict[str, Check] = {
            side: record({name: of_spec(spec) for name, spec in specs.items()}, may_lack=True)
            for side, specs in learns.items()
        }
        if plan.policy.needs_scores:
            fitted["scores"] = optional(tensor(torch.float32, plan.layers, shape.kv_heads, low=-1))
        if plan.rates is not None:
            fitted["rates"] = self._rates
        packed = {name: {k: one_of(text) for k, text in options(getattr(plan, name)).items()} for name in PARTS}
        fitted["options"] = record({name: record(wanted) for name, wanted in packed.items()})
        head = {
            "plan": record(fitted),
            "record_past": flag,
            "first_tokens": whole(),
            "heads": each(whole(0, shape.kv_heads), 3),
        }
        record({**head, "dtype": one_of(*FLOATS), "shapes": anything, "store": anything})(state, place)
        _, held, _ = state["heads"]
        shapes = [[batch, held, 0, shape.key_dim], [batch, held, 0, shape.value_dim]]
        require(held > 0 and state["shapes"] == shapes, f"{place}.shapes", f"must be {shapes}")
        if state["heads"] != (ours := self._place_of_heads(held)):
            raise UserError(
                f"the file holds key-value heads (first, number, of) {state['heads']}, and this process has "
                f"{ours}: with tensor parallelism each process saves and loads a file of its own"
            )
        for side, dim in (("keys", shape.key_dim), ("values", shape.value_dim)):
            codec = replace(getattr(plan, side), fitted=own(state["plan"][side]))
            fault = codec.learnt_fault(1, shape.kv_heads, dim)
            fault = fault or ("does not fit the codec" if codec.needs_fit == "corpus" else None)
            require(fault is None, f"{place}.plan.{side}", fault or "")
            self.plan = self.plan._replace(**{side: codec})
        self.plan = self.plan._replace(scores=own(state["plan"].get("scores")))
        if (asked := self.asked) is not None:
            both = {side: getattr(self.plan, side).at_rate(getattr(asked, side).bits) for side in ("keys", "values")}
            self.asked = asked._replace(**both)
        self.record_past, self.first_tokens = state["record_past"], state["first_tokens"]
        self.lazy_initialization(*(torch.empty(s, dtype=FLOATS[state["dtype"]], device=device) for s in shapes))
        assert self.store is not None
        self.store.restore(state["store"], f"{place}.store")
        self.measured |= self.store.packed_tokens > 0  # by the cache that packed them

    def _place_of_heads(self, held: int) -> list[int]:
        heads = self.cache.heads(held, self.index)
        return [0, held, held] if heads is None else [heads.first, held, heads.total]

    # ------------------------------------------------------------------ sizes for transformers

    def get_seq_length(self) -> int:
        """Return the number of tokens seen. During tracing it is a tensor, read when the compiled pass runs."""
        if is_traced() and self.is_compileable:
            return num_tokens(self.handle)  # type: ignore[return-value]  # as transformers' static layers do
        of = self.cache.waiting
        waiting = of.tokens(self.index) if of.calls or of.rating else 0
        return 0 if self.store is None else self.store.num_tokens + waiting

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys, offset) of the mask. With handles the mask spans all tokens seen,
        and attention slices it; without them evicted tokens are cut off at the start. During
        tracing the size is 0, which `attention_mask_for` interprets as unknown."""
        if is_traced() and self.is_compileable:
            return 0, 0
        seen = self.get_seq_length()
        dropped = 0 if self.store is None or self.cache.hands_out_handles else self.store.num_evicted
        self.cache.mask_offsets[self.sliding_window] = seen, dropped
        return seen + query_length - dropped, dropped

    def get_max_length(self) -> int:
        """Return the sliding window, or -1 for no maximum."""
        return -1 if self.sliding_window is None else self.sliding_window

    @property
    def batch_size(self) -> int:
        """Number of rows in the batch, or -1 before the first tokens."""
        return -1 if self.store is None else self.store.batch_size

    # ------------------------------------------------------------------ changing

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the latest tokens; `tokens_to_remove` is minus their number. Without tokens the layer is new."""
        tokens = -checked_crop(tokens_to_remove)
        self.check_crop(tokens)
        if self.store is not None:
            self.store.crop(tokens - self.cache.waiting.drop(self.index))
            if not self.store.num_tokens:
                self.reset()

    def check_crop(self, tokens: int) -> None:
        """Raise CacheError unless the latest `tokens` tokens can be removed."""
        if self.store is not None:
            try:
                self.store.check_crop(tokens - self.cache.waiting.tokens(self.index))
            except CacheError as error:
                raise CacheError(f"layer {self.index}: {error}") from error

    def activate_past_recording(self, past: bool = True) -> None:
        """Let a sliding window evict tokens only at a `crop`, so that any number of draft tokens can be removed."""
        self.record_past = past
        if past:
            self.cache.warn_assisted(self.index, self.plan.keys.has_rates)
        if self.store is not None:
            self.store.record_past(past)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows `beam_idx` that beam search continues."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self.store is not None:
            rows = torch.arange(self.batch_size, device=self.store.device)
            self.store.select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows. indices: row numbers or a bool mask."""
        if self.store is not None:
            rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
            self.store.select(rows)

    def reset(self) -> None:
        """Remove all tokens and everything that was fitted on them, or chosen by them."""
        self.store, self.plan, self.asked = None, self.asked or self.plan, None
        self.cache.waiting.drop(self.index)
        self.first_tokens = 0
        self.is_initialized = False

    def offload(self) -> None:
        """Move the store to host memory."""
        if self.store is not None:
            self.home = self.store.device
            self.store.to("cpu")

    def prefetch(self) -> None:
        """Move the store back to the device it was on before `offload`."""
        if self.store is not None and self.home is not None:
            self.store.to(self.home)


def compressed_layers(cache: ModelCache) -> list[CompressedLayer]:
    """Return the layers of a cache that hold packed keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
