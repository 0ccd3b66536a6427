"""Importance of tokens from the latest queries, see also `tests/policies/test_mixed_rates.py`."""

from __future__ import annotations

import torch

from tersekv.attention.importance import QUERIES, importance
from tersekv.attention.read import AttentionCall
from test_mixed_rates import OPTIONS, TRELLIS, fed, made


def test_a_call_of_many_queries_needs_no_earlier_ones():
    store, (keys, _, query) = fed(f"{OPTIONS}+{TRELLIS}", made(1, 400), [0, 400]), made(1, QUERIES, seed=5)
    ranks = []
    for _ in range(2):
        ranks.append(importance(store, keys, AttentionCall(query, None, 0.3)))
        store.ranked[0].queries = store.ranked[0].queries[:, :, :0]
    assert torch.equal(*ranks)
