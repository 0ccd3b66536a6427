"""Program for test_context_parallel.py, run by `torchrun` on two ranks.

A cache whose packed tokens are distributed must give the same answer as one process.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import tersekv
from conftest import build, prompt
from ranks import process_group

RECIPES = ["kvquant:calibration=prompt", "kivi:bits=2,pre_rope=true"]


def compare(tokens: int) -> None:
    model, ids = build("llama"), prompt(tokens)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    for recipe in RECIPES:
        said, caches = [], []
        for group in (None, dist.group.WORLD):
            with tersekv.compress(model, recipe, context_parallel=group):
                out = model.generate(ids, attention_mask=torch.ones_like(ids), prefill_chunk_size=100, **options)
            said.append(out.sequences.tolist())
            caches.append(out.past_key_values)
        assert said[0] == said[1], recipe
        one, own = (cache.layers[0].store for cache in caches)
        packed = torch.tensor([own.packed_tokens])
        dist.all_reduce(packed)
        assert int(packed) == one.packed_tokens
        assert abs(own.packed_tokens - one.packed_tokens / 2) <= 96


if __name__ == "__main__":
    with process_group():
        compare(int(sys.argv[1]))
