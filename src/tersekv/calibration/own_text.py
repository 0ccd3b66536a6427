"""Text that a model writes itself, for calibration without a corpus.

Sampling at temperature 1 gives the text that the model itself expects, in the languages and forms
that it was trained on. LLM-QAT (arXiv 2305.17888, §2.1) makes training data in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from tersekv.errors import UserError
from tersekv.models.config import text_config
from tersekv.versions import cache_argument

NAME = "own text"
"""Name of this corpus in calibrations."""


class Begun(NamedTuple):
    """A text that is not whole yet: its ids, and the state of the generator that draws tokens."""

    ids: Tensor
    chance: Tensor


@torch.no_grad()
def own_text(
    model: PreTrainedModel,
    samples: int,
    length: int,
    seed: int = 0,
    progress: Callable[[int], object] = lambda done: None,
    begun: Begun | None = None,
    keep: Callable[[Begun], object] = lambda begun: None,
) -> Tensor:
    """Return ids int64 [samples, length] that the model writes, sampled at temperature 1.

    Each sample begins with the model's start token, or with a random token if there is none. Tokens
    that end a text are not written, so that every sample has its full length.

    progress: called with the number of tokens per sample that are done.
    begun: the state of a run that was stopped, to go on from it. keep: called with it at a stop.

    Raises:
        UserError: logits are not finite.
    """
    config = text_config(model.config)
    chance = torch.Generator().manual_seed(seed)
    start = config.bos_token_id
    if start is None:
        ids = torch.randint(config.vocab_size, (samples, 1), generator=chance)
    else:
        ids = torch.full((samples, 1), int(start))
    ends = _end_tokens(model)
    cache = DynamicCache(config=model.config)
    parts, state = [ids], chance.get_state()
    if begun is not None:
        parts, state = [begun.ids], begun.chance
        chance.set_state(state)
    try:
        for done in range(parts[0].shape[1], length):
            progress(done)
            # forward itself, because the hook of `compress` warns of a cache that is not compressed
            given = cache_argument(model, cache)
            out = model.forward(input_ids=parts[-1].to(model.device), use_cache=True, **given)
            logits = out.logits[:, -1].float().cpu()
            logits[:, ends] = -torch.inf
            p = logits.softmax(-1)
            if not bool(p.isfinite().all()):
                raise UserError(
                    "the model's logits hold NaN or Inf, so it cannot write a text to calibrate on (try bfloat16 or "
                    "float32 weights)"
                )
            parts.append(torch.multinomial(p, 1, generator=chance))
            state = chance.get_state()
    except KeyboardInterrupt:
        keep(Begun(torch.cat(parts, dim=1), state))
        raise
    progress(length)
    return torch.cat(parts, dim=1)


def _end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the ids of tokens that end a text."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    ids = text_config(model.config).eos_token_id if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
