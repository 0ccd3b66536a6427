"""Pages of an engine under sliding windows and attention sinks as logits."""

from __future__ import annotations

import pytest
import torch

from tersekv.serving.dense import AttentionKind
from tersekv.serving.steps import EngineStep, Rows
from test_serving_pages import ROPE, calibrated, decoded, expected, pool_of, slots_of
from test_serving_pages import backend as backend

STEPS = {
    "one prompt, then tokens": [[150], *[[1]] * 70],
    "chunks": [[40], [100], [5], [90], *[[1]] * 5, [3], [1]],
    "two requests": [[70, 33], [1, 90], [1, 1], [50, 1], *[[1, 1]] * 40, [4, 2]],
}


def check(slots, p, exactness, kind, counts_of_steps, rope=None):
    """Compare each step with the reference. Pages before the window are given away and hold NaN."""
    torch.manual_seed(0)
    n, D = len(counts_of_steps[0]), slots.head_dim
    total = [sum(counts[i] for counts in counts_of_steps) for i in range(n)]
    keys, values = ([torch.randn(t, 2, D) for t in total] for _ in range(2))
    queries = [torch.randn(t, 6, D) for t in total]
    each = -(-max(total) // p)
    pool, rows = pool_of(slots, 1 + n * each, p, exactness, rope, kind=kind), Rows(4)
    tables = 1 + torch.arange(n * each, dtype=torch.int32).view(n, each)
    for planes in pool.planes:
        for plane in planes.values():
            plane[:, :, 0] = float("nan") if plane.is_floating_point() else 127
    hats, lengths = [decoded(slots, *sides, rope) for sides in zip(keys, values, strict=True)], [0] * n
    for counts in counts_of_steps:
        if kind.window is not None:
            for i in range(n):
                tables[i, : max(0, lengths[i] - kind.window + 1) // p] = 0
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        step = EngineStep.plan(starts, lengths, tables, p, rows)
        key, value, query = (
            torch.cat([x[i][lengths[i] - m : lengths[i]] for i, m in enumerate(counts)])
            for x in (keys, values, queries)
        )
        pool.write(key, value, step)
        out = pool.attend(query, key, value, step)
        assert torch.isfinite(out).all()
        for i, m in enumerate(counts):
            t = lengths[i]
            want = expected(queries[i][t - m : t], keys[i][:t], values[i][:t], hats[i], p, exactness, kind)
            torch.testing.assert_close(out[starts[i] : starts[i + 1]], want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("window", [1, 20, 32, 50, 100, None])
@pytest.mark.parametrize(("p", "exactness"), [(32, "step"), (64, "page")])
def test_windows(window, p, exactness, steps, backend):
    kind = AttentionKind(0.125, window=window, sink_logits=torch.linspace(-1, 4, 6))
    check(slots_of("kivi"), p, exactness, kind, STEPS[steps])


@pytest.mark.parametrize("name", ["trellis", "trellis before RoPE"])
def test_windows_of_calibrated_codecs(name, backend):
    torch.manual_seed(1)
    kind = AttentionKind(0.125, window=50)
    check(calibrated(name), 32, "step", kind, STEPS["chunks"], ROPE)


def test_layers_with_and_without_a_window_share_a_step():
    """Also with a block table each, as in models whose layers are of two kinds."""
    torch.manual_seed(0)
    slots = slots_of("kivi")
    wide, narrow, own = (pool_of(slots, 24, 32, kind=AttentionKind(0.125, window=w)) for w in (None, 40, 40))
    one = torch.arange(16, dtype=torch.int32).view(2, 8)
    plans = (one, Rows(4), (wide, narrow)), (23 - one, Rows(4), (own,))
    keys, values, query = (torch.randn(2, 130, heads, 64) for heads in (2, 2, 6))
    hats = [decoded(slots, k, v) for k, v in zip(keys, values, strict=True)]
    for first, last in ((0, 100), (100, 128), (128, 129), (129, 130)):
        n = last - first
        new = [x[:, first:last].flatten(0, 1) for x in (query, keys, values)]
        steps = [EngineStep.plan([0, n, 2 * n], [last, last], table, 32, rows) for table, rows, _ in plans]
        assert steps[0].spans is steps[1].spans
        for step, (_, _, pools) in zip(steps, plans, strict=True):
            for pool in pools:
                pool.write(*new[1:], step)
                outs = pool.attend(*new, step).split(n)
                for i, out in enumerate(outs):
                    sides = keys[i, :last], values[i, :last]
                    want = expected(query[i, first:last], *sides, hats[i], 32, "step", pool.kind)
                    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
