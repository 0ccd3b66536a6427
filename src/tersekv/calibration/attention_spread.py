"""Measurement of how attention spreads over ranked tokens, for the policy `mixed` with `allot=model`.

`mixed` ranks a prompt's tokens by predicted importance. How much that helps differs between layers.
In some a few tokens get nearly all later attention, and the ranking finds them. In others later
tokens read what no earlier one had read.

Both are measured on texts: the first three quarters are the prompt, and are ranked. The remaining
tokens show which tokens are read. An error in a token's key or value reaches the output in proportion
to its attention, so squared weights are summed, in order of rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.attention import masks
from tersekv.attention.importance import importance
from tersekv.attention.read import AttentionCall
from tersekv.attention.spread import in_order
from tersekv.attention.weights import attention_weights
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import STEPS
from tersekv.calibration.calibrate import Corpus
from tersekv.calibration.calibration import SCORES, Calibration
from tersekv.calibration.capture import LayerTokens, watch_calls
from tersekv.errors import UserError
from tersekv.models.config import AttentionShape, attention_layers, longest_context, text_config
from tersekv.models.fingerprint import fingerprint
from tersekv.models.rope import Ropes
from tersekv.recipe import Recipe

RANKED = "mixed:sinks=0+trellis:bits=4,centre=false,calibration=prompt"
"""A recipe whose stores rank tokens. They store none here."""

SINKS = 4
"""First tokens left out: caches keep them exact."""

FEWEST = 48
"""Minimum tokens of a text."""

TILE = 128
"""Number of queries whose weights are in memory at a time."""


def profile_on(
    model: PreTrainedModel,
    recipe: Recipe,
    corpus: Corpus,
    progress: Callable[[int], object] = lambda done: None,
    begun: Sequence[Tensor] = (),
    keep: Callable[[Sequence[Tensor]], object] = lambda begun: None,
) -> Calibration:
    """Return the measurement that a recipe with `mixed` needs, on a corpus.

    begun: sums of its first samples, from a run that was stopped. keep: called with them after each.
    """
    policy = recipe.policy()
    spread = measure(model, corpus.windows, policy.reads_twice, progress, begun, keep)
    made = corpus.made(str(policy.profile), model.config, fingerprint(model), SINKS)
    return Calibration(made, {SCORES: spread})


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    reread: bool,
    progress: Callable[[int], object] = lambda done: None,
    begun: Sequence[Tensor] = (),
    keep: Callable[[Sequence[Tensor]], object] = lambda begun: None,
) -> Tensor:
    """Return the attention that the tokens of the first ranks receive later.

    ids: int64 [samples, T], texts. reread: rank tokens by a second reading, see `attention/importance.py`.
    Without effect if RoPE depends on the length, as in caches. begun, keep: see `profile_on`.

    The result is float32 [layers, KV heads, STEPS + 1]. Entry k is the sum of squared softmax weights
    of the k/STEPS most important tokens of a prompt, per query of the tokens that follow; mean over
    samples, queries and the query heads of a KV head. It is −1 in layers without global attention.

    Raises:
        UserError: the texts are too short, or this process has only some of the heads.
    """
    if ids.shape[1] < FEWEST:
        raise UserError(
            f"attention is measured on texts of {FEWEST} tokens or more, got {ids.shape[1]}: give longer ones"
        )
    first, context = 3 * ids.shape[1] // 4, longest_context(model.config)
    kinds = attention_layers(text_config(model.config))
    whole = [kind.type == "attention" and kind.window is None for kind in kinds]
    reader = _Reader(model, first, whole)
    reread = reread and not reader.ropes.vary(i for i, kind in enumerate(kinds) if kind.type == "attention")
    longest = 2 * first if reread else ids.shape[1]
    if context is not None and longest > context:
        twice = "; with reread=true three quarters of it are read twice" if reread else ""
        raise UserError(
            f"the model has {context} positions, and a text of {ids.shape[1]} tokens takes {longest}{twice}: make the "
            "measurement with `tersekv calibrate --length` and fewer tokens"
        )
    read = list(begun)
    for sample in ids[len(read) :].to(model.device):
        progress(len(read))
        one = torch.zeros(len(kinds), reader.kv_heads, STEPS + 1)
        for layer, sums in reader.read(sample, reread).items():
            one[layer] = sums.cpu()
        read.append(one)
        keep(read)
    return torch.where(torch.tensor(whole)[:, None, None], sum(read) / len(ids), -1.0)


class _Reader:
    """Ranks the first tokens of a text, and sums the attention that they receive later.

    first: number of these tokens. whole: for each layer, does it have global attention?
    """

    def __init__(self, model: PreTrainedModel, first: int, whole: list[bool]) -> None:
        config = text_config(model.config)
        shape = AttentionShape.of(config)
        self.model, self.first, self.whole, self.kv_heads = model, first, whole, shape.kv_heads
        self.ropes, self.recipe = Ropes(config, shape.key_dim), Recipe.parse(RANKED)
        self.ranks: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}

    def read(self, sample: Tensor, reread: bool) -> dict[int, Tensor]:
        """Return the sums of a text [T] in order of rank, [H, STEPS + 1] by layer."""
        seen = [self._later] if reread else [self._rank, self._later]
        self._watch(sample, seen)
        if reread:
            self._watch(sample[: self.first].repeat(2), [functools.partial(self._rank, again=self.first)])
        return {layer: in_order(sums, self.ranks[layer]) for layer, sums in self.received.items()}

    def _watch(self, ids: Tensor, each: Sequence[Callable[[int, Tensor, AttentionCall], None]]) -> None:
        def see(layer: int, tokens: LayerTokens, call: AttentionCall) -> None:
            if tokens.keys.shape[1] != self.kv_heads:
                raise UserError("attention is measured in one process; run it without tensor parallelism")
            for function in each if self.whole[layer] else ():
                function(layer, tokens.keys, call)

        watch_calls(self.model, ids[None], see)

    def _rank(self, layer: int, keys: Tensor, call: AttentionCall, again: int = 0) -> None:
        n = keys.shape[2] if again else self.first
        plan, nothing = self.recipe.plan(layer, len(self.whole)), keys[:, :, :0]
        store = LayerStore(plan, nothing, nothing, query_rope=self.ropes.known(layer))
        call = call.without_last(keys.shape[2] - n)
        self.ranks[layer] = importance(store, keys[:, :, :n], call, again)[0, :, SINKS:]

    def _later(self, layer: int, keys: Tensor, call: AttentionCall) -> None:
        T = keys.shape[2]
        mask = masks.causal(T, T, keys.device) if call.mask is None else call.mask
        total = torch.zeros(call.query.shape[1], self.first - SINKS, device=keys.device)
        for start in range(self.first, T, TILE):
            tile = slice(start, start + TILE)
            own = replace(call, query=call.query[:, :, tile].float(), mask=mask[:, tile])
            total += attention_weights(None, keys, own)[0, :, :, SINKS : self.first].square().sum(1)
        self.received[layer] = total.unflatten(0, (self.kv_heads, -1)).mean(1) / (T - self.first)
