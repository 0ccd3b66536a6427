"""Attention over a store's segments equals dense attention over the decoded tokens on every path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tersekv.attention import read
from tersekv.attention.read import AttentionCall, attend_chunk, attend_store
from tersekv.attention.weights import attention_weights
from tersekv.errors import UserError
from tersekv.kernels import backends, cpu
from tersekv.kernels.softmax import attend_scores, merge_segments
from test_store import fed, store, tokens

RECIPES = [
    *("kivi:bits=2", "kivi:bits=4", "kivi:bits=3/int4", "uniform:bits=6", "exact"),
    *("kivi:bits=2/exact", "exact/int4", "qjl", "qjl:outliers_per=group"),
]


def dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
    """Compute attention in float64: [B, q, Hq, D]."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    q, T = scores.shape[-2:]
    if mask is None:
        mask = (torch.arange(T) <= torch.arange(T - q, T)[:, None])[None]
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    if call.sink_logits is not None:
        extra = call.sink_logits.double().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :T]
    return (weights @ values).transpose(1, 2).float()


def check(got: Tensor, expected: Tensor, signs: bool = False) -> None:
    """Compare with a tolerance. signs: larger one for scores from 16-bit tables (see
    test_ops_packed.py)."""
    share = 3e-4 if signs else 3e-5
    torch.testing.assert_close(got, expected, atol=share * float(expected.abs().max()) + 1e-6, rtol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("q", [1, 3, 16, 40, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_store_equals_dense(recipe, q, softcap):
    keys, values = tokens(700, B=2)
    s = fed(recipe, keys, values, [0, 700])
    query = torch.randn(2, 6, q, 64, generator=torch.Generator().manual_seed(q))
    call = AttentionCall(query, None, 0.125, softcap, torch.randn(6))
    check(attend_store(s, call), dense(query, *s.decoded(torch.float32), None, call), recipe.startswith("qjl"))


@pytest.mark.parametrize("recipe", ["kivi:bits=4", "qjl"])
@pytest.mark.parametrize("q", [2, 17, 600])
def test_chunk_attends_past_and_itself(recipe, q):
    keys, values = tokens(500 + q, B=2)
    s = fed(recipe, keys[:, :, :500], values[:, :, :500], [0, 500])
    query = torch.randn(2, 4, q, 64)
    call = AttentionCall(query, None, 0.125)
    past = s.decoded(torch.float32)
    both = [torch.cat([p, x[:, :, 500:]], dim=2) for p, x in zip(past, (keys, values), strict=True)]
    got = attend_chunk(s, keys[:, :, 500:], values[:, :, 500:], call)
    check(got, dense(query, *both, None, call), recipe.startswith("qjl"))


def test_masks_reach_every_segment():
    """A random mask over sinks, packed tokens and the recent window, and a fully masked row."""
    keys, values = tokens(500, B=2)
    s = fed("kivi:bits=4", keys, values, [0, 500])
    query = torch.randn(2, 4, 3, 64)
    mask = torch.rand(2, 3, 500, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[1, 2] = False
    call = AttentionCall(query, mask, 0.125)
    got = attend_store(s, call)
    check(got, dense(query, *s.decoded(torch.float32), mask, call))
    assert got[1, 2].abs().max() == 0


@pytest.mark.parametrize("q", [1, 5])
def test_left_padding_is_masked(q):
    keys, values = tokens(400, B=3)
    padding = torch.tensor([50, 0, 2])
    s = store("kivi:bits=4", keys, values)
    s.append(keys, values, padding)
    query = torch.randn(3, 4, q, 64)
    visible = torch.arange(400) >= padding[:, None]
    mask = visible[:, None] & (torch.arange(400) <= torch.arange(400 - q, 400)[:, None])[None]
    call = AttentionCall(query, mask, 0.125)
    check(attend_store(s, call), dense(query, *s.decoded(torch.float32), mask, call))


def test_unmasked_call_after_a_padded_start():
    """Without a mask, rows still do not read their sinks twice."""
    keys, values = tokens(400, B=2)
    s = store("kivi:bits=4", keys, values)
    s.append(keys, values, torch.tensor([0, 30]))
    query = torch.randn(2, 4, 1, 64)
    mask = torch.ones(2, 1, 400, dtype=torch.bool)
    mask[1, 0, :30] = False
    call = AttentionCall(query, None, 0.125)
    check(attend_store(s, call), dense(query, *s.decoded(torch.float32), mask, call))


def test_unmasked_long_chunk_after_a_padded_start():
    """A later turn without a mask, with more queries than one tile."""
    keys, values = tokens(1000, B=2)
    s = store("kivi:bits=4", keys, values)
    s.append(keys[:, :, :400], values[:, :, :400], torch.tensor([0, 30]))
    query = torch.randn(2, 4, 600, 64)
    mask = (torch.arange(1000) <= torch.arange(400, 1000)[:, None]).repeat(2, 1, 1)
    mask[1, :, :30] = False
    call = AttentionCall(query, None, 0.125)
    both = [torch.cat([p, x[:, :, 400:]], dim=2) for p, x in zip(s.decoded(torch.float32), (keys, values), strict=True)]
    check(attend_chunk(s, keys[:, :, 400:], values[:, :, 400:], call), dense(query, *both, mask, call))


def test_reading_block_by_block_never_decodes_everything(monkeypatch):
    keys, values = tokens(3000)
    s = fed("qjl", keys, values, [0, 3000])
    asked = []
    original = type(s).packed_segment

    def watch(self, first=0, tokens=None):
        segment = original(self, first, tokens)
        if segment is not None:
            asked.append(segment.tokens)
        return segment

    monkeypatch.setattr(type(s), "packed_segment", watch)
    monkeypatch.setattr(read, "MOST_READ", 1024 * 2 * 64)
    with backends.forced("reference"):
        attend_store(s, AttentionCall(torch.randn(1, 2, 1, 64), None, 0.125))
    assert max(asked) <= 1024
    assert sum(asked) == s.packed_tokens


def test_reference_backend_gives_the_same():
    keys, values = tokens(500)
    s = fed("kivi:bits=4", keys, values, [0, 500])
    call = AttentionCall(torch.randn(1, 6, 1, 64), None, 0.125)
    with backends.forced("reference"):
        expected = attend_store(s, call)
    check(attend_store(s, call), expected)


@pytest.mark.skipif(cpu.why_not_built() is not None, reason="the C++ extension is not built")
def test_a_forced_kernel_runs_or_raises():
    keys, values = tokens(500)
    call = AttentionCall(torch.randn(1, 6, 1, 64), None, 0.125)
    with backends.forced("cpu"):
        attend_store(fed("kivi/exact", keys, values, [0, 500]), call)
        attend_store(fed("qjl", keys, values, [0, 500]), call)
        query = call.query.clone().requires_grad_()
        with pytest.raises(UserError, match="'cpu' is forced and cannot run attend: query needs a gradient"):
            attend_store(fed("uniform:bits=6", keys, values, [0, 500]), AttentionCall(query, None, 0.125))


def test_weights_sum_to_one():
    keys, values = tokens(300)
    s = fed("kivi:bits=4", keys, values, [0, 300])
    new = torch.randn(1, 2, 2, 64)
    weights = attention_weights(s, new, AttentionCall(torch.randn(1, 4, 2, 64), None, 0.125, 3.0))
    assert weights.shape == (1, 4, 2, 302)
    assert weights[:, :, 0, 301].abs().max() == 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 2))


def test_merge_is_associative_and_ignores_empty_segments():
    scores, value = torch.randn(1, 2, 3, 90), torch.randn(1, 2, 90, 16)
    whole, lse = attend_scores(scores, value, None, 0.5, None)
    cuts = [(0, 10), (10, 64), (64, 90)]
    parts = [attend_scores(scores[..., a:b], value[:, :, a:b], None, 0.5, None) for a, b in cuts]
    parts.append((torch.zeros_like(whole), torch.full_like(lse, -torch.inf)))
    out, merged = merge_segments.reference([p[0] for p in parts], [p[1] for p in parts])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(merged, lse)


def test_a_chunk_is_read_by_a_forced_backend():
    """Exact tokens in packed pages need no kernel."""
    keys, values = tokens(600)
    s = fed("kivi:bits=4/exact", keys, values, [0, 400])
    call = AttentionCall(torch.randn(1, 4, 200, 64), None, 0.125)
    expected = attend_chunk(s, keys[:, :, 400:], values[:, :, 400:], call)
    with backends.forced("cpu"):
        check(attend_chunk(s, keys[:, :, 400:], values[:, :, 400:], call), expected)
