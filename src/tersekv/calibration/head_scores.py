"""Importance of a model's KV heads, measured on prompts whose answer is a part of the text.

The score is that of HeadKV (arXiv 2410.19258, §3.2), for token policies with `needs_scores`. While
the answer is produced, the k tokens with most attention of a query head are compared with the k
tokens of the answer in the text. The weights of those that are among them are summed, and divided by
k and by the tokens of the answer. Scores are averaged over the query heads of a KV head.

Different here: the right answer is fed, so that one forward pass gives all queries, and no prompt is
lost because the model answers wrongly. The authors' code generates the answer and drops prompts with
wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.attention.read import AttentionCall
from tersekv.attention.weights import attention_weights
from tersekv.calibration.capture import LayerTokens, watch_calls
from tersekv.errors import UserError
from tersekv.models.config import AttentionShape, attention_layers, text_config


class AnsweredPrompt(NamedTuple):
    """A prompt that ends with its answer.

    ids: int64 [T].
    source: indices of the tokens of the text that hold the answer.
    answer_tokens: number of last ids that are the answer.
    """

    ids: Tensor
    source: list[int]
    answer_tokens: int


def measure(
    model: PreTrainedModel, prompts: Iterable[AnsweredPrompt], progress: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Return the mean scores over the prompts, float32 [layers, KV heads]; −1 where no head evicts.

    Layers with a sliding window evict nothing under a token policy.

    Raises:
        UserError: this process has only some of the heads.
    """
    config = text_config(model.config)
    kinds, heads = attention_layers(config), AttentionShape.of(config).kv_heads
    total, done = torch.zeros(len(kinds), heads), 0
    for prompt in prompts:
        progress(done)
        total += _scores(model, prompt, len(kinds), heads)
        done += 1
    evicts = torch.tensor([kind.type == "attention" and kind.window is None for kind in kinds])
    return torch.where(evicts[:, None], total / max(1, done), -1.0)


def _scores(model: PreTrainedModel, prompt: AnsweredPrompt, layers: int, heads: int) -> Tensor:
    T, k = len(prompt.ids), len(prompt.source)
    asking = slice(T - prompt.answer_tokens - 1, T - 1)  # queries whose outputs are the answer
    source = torch.zeros(T, dtype=torch.bool, device=model.device)
    source[prompt.source] = True
    scores = torch.zeros(layers, heads)

    def see(layer: int, tokens: LayerTokens, call: AttentionCall) -> None:
        if tokens.keys.shape[1] != heads:
            raise UserError("the importance of heads is measured in one process; run it without tensor parallelism")
        places = torch.arange(T, device=source.device)
        mask = places <= places[asking, None] if call.mask is None else call.mask[0, asking]
        own = replace(call, query=call.query[:, :, asking].float(), mask=mask[None])
        values, at = attention_weights(None, tokens.keys, own)[0].topk(k, dim=-1)  # [Hq, answer tokens, k]
        hits = (values * source[at]).sum((1, 2)) / (k * prompt.answer_tokens)
        scores[layer] = hits.unflatten(0, (heads, -1)).mean(1).cpu()

    watch_calls(model, prompt.ids[None].to(model.device), see)
    return scores
