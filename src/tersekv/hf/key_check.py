"""Error of a layer's keys, measured once the first ones are packed."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.cache.rotary import Rotary
from tersekv.cache.store import Store
from tersekv.calibration.key_error import LEAST_TOKENS, KeyFigures, key_error, sample_tokens
from tersekv.errors import UserError
from tersekv.tensors import plain
from tersekv.transforms.rope import NO_ROPE, Rope


@plain
def error_of_keys(store: Store, rope: Rope | None, keys: Tensor) -> tuple[bool, KeyFigures | None]:
    """Return if the error of coding was looked at, and the figures if it could be measured.

    keys: of the present call, which end with the store's latest token.
    """
    if not store.packed_tokens:
        return False, None
    if store.keys.codec.centred:  # the mean is gone, so it cannot drown differences
        return True, None
    keys = (keys if keys.shape[2] >= LEAST_TOKENS else store.latest_keys).detach()
    n = sample_tokens(keys.shape[2], keys.shape[0])
    if not n:  # later calls leave more tokens exact
        return False, None
    first = store.num_tokens - n
    positions = torch.arange(first, first + n, device=keys.device)
    sinks = torch.zeros_like(positions[:1]) if store.padding is None else store.padding.to(keys.device)
    counts = positions >= (sinks + store.policy.sink_tokens(store.window)).unsqueeze(1)
    rotary = store.rotary or Rotary(rope or NO_ROPE)
    if store.rotary is None:
        rotary.note(0, store.num_tokens, store.padding)
    try:
        x = keys[:, :, -n:].to(store.recent.keys.dtype)
        if missing := -n % store.keys.codec.layout(x.shape[-1]).block_tokens:  # whole blocks are coded
            x = torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
            counts = torch.nn.functional.pad(counts, (0, missing))
        angles = rotary.angles(first, n + missing, keys.device)
        return True, key_error(store.keys.codec, x, angles, counts, store.heads)
    except UserError:  # a scale of tokens that are packed later is too large
        return True, None
