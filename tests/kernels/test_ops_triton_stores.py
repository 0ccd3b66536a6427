"""A layer's store read by Triton kernels alone: model dtypes, query groups, several new tokens,
padded rows.

On a machine without a GPU Triton interprets the kernels. `pytest -m gpu` runs the same tests on a
CUDA device.
"""

from __future__ import annotations

import pytest
import torch

from conftest import benchmark
from tersekv.attention.read import AttentionCall, attend_new, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import Observed
from tersekv.cache.store import Store
from tersekv.kernels import backends
from tersekv.recipe import Recipe
from tersekv.sizes.rate_allotment import with_rates
from tersekv.transforms.rope import standard_rope
from test_ops_triton import OUT, Counted, compare, device, moved, pytestmark, right  # noqa: F401
from test_ragged_heads import CODECS, attended, fed
from test_store import store, tokens

RECIPE = "window:sinks=4,recent=32"


def filled(recipe, B, T, D, dtype, padding, options=""):
    """Return a store of T tokens, all but the latest five at once. Row r begins after padding[r]."""
    keys, values = (x.to(dtype) for x in tokens(T, B=B, D=D))
    s = store(f"{RECIPE}{options}+{recipe}", keys, values)
    with backends.forced("auto"):  # encoding has its own tests
        s.append(keys[:, :, :-5], values[:, :, :-5], padding)
        s.append(keys[:, :, -5:], values[:, :, -5:])
    assert s.packed_tokens >= 32
    return s


@pytest.mark.parametrize(
    ("recipe", "dtype", "D", "G", "q", "padding"),
    [
        ("kivi:bits=4", torch.bfloat16, 128, 4, 16, (9, 0)), ("kivi:bits=2", torch.float16, 64, 1, 1, None),
        ("polarquant", torch.float32, 64, 7, 9, (9, 0)), ("turboquant:bits=3", torch.bfloat16, 256, 2, 5, None),
        ("qjl:initial_layers=0", torch.float16, 96, 3, 2, (9, 0)), ("exact", torch.float32, 80, 8, 1, (9, 0)),
        ("kvquant:bits=4,calibration=prompt,pre_rope=false", torch.bfloat16, 64, 2, 3, None),
        ("turboquant:bits=4,centre=true", torch.bfloat16, 64, 2, 3, (9, 0)),
        ("polarquant:centre=true", torch.float32, 64, 2, 1, None), ("qjl:centre=true", torch.float16, 64, 1, 2, None),
    ],
    ids=str,
)  # fmt: skip
def test_stores(device, recipe, dtype, D, G, q, padding, monkeypatch):  # noqa: F811
    from tersekv.kernels.triton import launch

    padded, B = (None, 1) if padding is None else (torch.tensor(padding), 2)
    s = filled(recipe, B, 85, D, dtype, padded)
    mask = None
    if padded is not None:
        seen = torch.arange(85) <= torch.arange(85 - q, 85)[:, None]
        mask = seen & (torch.arange(85) >= padded[:, None, None])
    query = torch.randn(B, 2 * G, q, D, generator=torch.Generator().manual_seed(q)).to(dtype)
    with backends.forced("reference"):
        expected = attend_store(s, AttentionCall(query, mask, D**-0.5)).float()
    s.to(device)
    launched = []
    monkeypatch.setattr(launch.kernels, "attend", Counted(launch.kernels.attend, "attend", launched))
    got = attend_store(s, AttentionCall(query.to(device), moved(mask, device), D**-0.5))
    assert (got.dtype, got.shape) == (dtype, (B, q, 2 * G, D))
    assert len(launched) == 2  # packed tokens; sinks and the window
    bound = OUT + 2 * torch.finfo(dtype).eps  # both are rounded
    assert (got.cpu().float() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("recipe", ["kivi:bits=2", "turboquant:bits=2"])
def test_bias_correction(device, recipe):  # noqa: F811
    """The term is added to the log-sum-exp of the packed tokens, without and with a linear map."""
    query = 3 * torch.randn(2, 4, 2, 64, generator=torch.Generator().manual_seed(0))
    off, s = (filled(recipe, 2, 85, 64, torch.float32, None, o) for o in ("", ",bias_correction=full"))
    call = AttentionCall(query, None, 0.125)
    with backends.forced("reference"):
        expected, without = attend_store(s, call), attend_store(off, call)
    s.to(device)
    got = attend_store(s, AttentionCall(query.to(device), None, 0.125))
    assert (got.cpu() - expected).norm() <= OUT * expected.norm()
    assert (expected - without).norm() > 10 * OUT * expected.norm()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("padding", [None, [50, 0]], ids=["", "padded"])
def test_heads_with_listed_positions(device, codec, padding, monkeypatch):  # noqa: F811
    """Pages of heads with different numbers of tokens are read without a copy. One token, and several with a mask."""
    with backends.forced("auto"):
        s = fed(f"headkv:budget=0.5,recent=16+{codec}", [200, *range(201, 280)], padding)
    shown = torch.rand(s.batch_size, 5, s.num_tokens, generator=torch.Generator().manual_seed(5)) < 0.5
    with backends.forced("reference"):
        expected = [attended(s, q, mask) for q, mask in ((1, None), (5, shown))]
    s.to(device)
    monkeypatch.setattr(Store, "_padded", pytest.fail)  # would copy all packed tokens
    for out, call in expected:
        got = attend_store(s, AttentionCall(call.query.to(device), moved(call.mask, device), 0.1))
        assert (got.cpu() - out).norm() <= OUT * out.norm()


@pytest.mark.parametrize("padding", [None, torch.tensor([0, 20])], ids=["", "padded"])
@pytest.mark.parametrize("rates", [None, torch.tensor([[2, 1, 0.25], [3, 1, 0.6]])], ids=["", "by head"])
@pytest.mark.parametrize("recipe", ["kivi:bits=2", "trellis:bits=2,calibration=prompt"])
def test_bias_correction_of_rates(device, recipe, rates, padding, monkeypatch):  # noqa: F811
    """The pages of each rate have a launch and a term of their own, without and with a rotated mean.

    With rates by head, heads have different numbers of tokens in a page, which is read without a copy.
    """
    keys, values = tokens(200, B=2, D=64)
    ranking = Observed(importance=torch.rand(2, 2, 200, generator=torch.Generator().manual_seed(1)))
    stores, rope = [], standard_rope(64)
    for options in ("", ",bias_correction=full"):
        plan = Recipe.parse(f"mixed:sinks=4,recent=32,rest=1{options}+{recipe}").plan(0, 1)
        s = LayerStore(plan if rates is None else with_rates(plan, rates), keys, values, None, rope)
        with backends.forced("auto"):
            s.append(keys, values, padding, ranking)
        assert min(side.tokens for side in (s.keys.packed, s.tiers[1].keys.packed)) >= 32
        stores.append(s)
    off, s = stores
    query = 3 * torch.randn(2, 4, 2, 64, generator=torch.Generator().manual_seed(0))
    mask = None
    if padding is not None:
        mask = torch.ones(200, 200, dtype=torch.bool).tril()[-2:] & (torch.arange(200) >= padding[:, None])[:, None]
    call = AttentionCall(query, mask, 0.125)
    with backends.forced("reference"):
        expected, without = attend_store(s, call), attend_store(off, call)
    s.to(device)
    if rates is not None:
        monkeypatch.setattr(Store, "_padded", pytest.fail)  # would copy all packed tokens
    for _ in range(2):  # the second call has the page sets of the first
        got = attend_store(s, AttentionCall(query.to(device), None if mask is None else mask.to(device), 0.125))
        assert (got.cpu() - expected).norm() <= OUT * expected.norm()
    assert (expected - without).norm() > 10 * OUT * expected.norm()


def test_a_step_is_a_few_launches(device):  # noqa: F811
    """They also append the token. Torch computes nothing."""
    if device == "cuda":
        pytest.skip("only counted with interpreted kernels")
    step = benchmark("launches").decoding
    plain, rotated = step("kivi:bits=4"), step("turboquant:bits=4")
    assert plain == rotated == {"torch": 0, "kernels": ["attend", "attend", "finish"], "waits": 0}


@pytest.mark.parametrize("padding", [None, torch.tensor([0, 20])], ids=["", "padded"])
def test_attention_appends_the_token(device, padding):  # noqa: F811
    """Attention and the window are those of a token that was appended first, also after a window that moves."""
    ahead, first = (filled("turboquant:bits=4", 2, 85, 64, torch.bfloat16, padding) for _ in range(2))
    keys, values = (x.bfloat16().to(device) for x in tokens(40, B=2, D=64))
    query = torch.randn(2, 4, 40, 64, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    ahead.to(device)
    first.to(device)
    moved_at = 0
    for i in range(40):
        new = keys[:, :, i : i + 1], values[:, :, i : i + 1]
        mask = None if padding is None else (torch.arange(86 + i) >= padding[:, None, None]).to(device)
        call, room = AttentionCall(query[:, :, i : i + 1], mask, 0.125), ahead.room
        got = attend_new(ahead, *new, call) if i % 16 == 0 or not room else None
        assert (got is None) == (i % 16 > 0 or not room)
        moved_at = moved_at if room else i
        with backends.forced("auto"):  # encoding has its own tests
            ahead.append(*new)
            first.append(*new)
        if got is not None:
            compare((got.float(), torch.zeros(1)), (attend_store(first, call).float(), torch.zeros(1)), 10.0)
        assert all(torch.equal(a, b) for a, b in zip(ahead.recent.data, first.recent.data, strict=True))
    assert moved_at


def test_a_token_written_by_another_call_is_not_taken(device):  # noqa: F811
    """The copy of another call's keys is not used."""
    s = filled("kivi:bits=4", 1, 85, 64, torch.bfloat16, None)
    s.to(device)
    old, new = ([x.bfloat16().to(device) for x in tokens(1, D=64, seed=seed)] for seed in (1, 2))
    assert attend_new(s, *old, AttentionCall(torch.randn(1, 2, 1, 64).bfloat16().to(device), None, 0.125)) is not None
    with backends.forced("auto"):
        s.append(*new)
    assert torch.equal(s.recent.data[0][:, :, -1:], new[0])
    with backends.forced("auto"):
        s.append(*old)
    assert torch.equal(s.recent.data[1][:, :, -1:], old[1])


@pytest.mark.parametrize("recipe", ["kivi:bits=4", "polarquant", "trellis:bits=2,calibration=prompt"])
def test_packed_tokens_alone(device, recipe):  # noqa: F811
    """Without exact tokens, queries are mapped in a launch of their own. The output has sinks, or is returned with its
    log-sum-exp."""
    s = filled(recipe, 2, 85, 64, torch.float32, None)
    query = torch.randn(2, 4, 3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden, sinks = torch.tensor([0, 500]), torch.tensor([-1.0, 0.0, 1.0, 5.0])
    found = []
    for backend, on in (("reference", "cpu"), ("triton", device)):
        s.to(on)
        with backends.forced(backend):
            call = query.to(on), (), s.pages(), None, hidden.to(on), 0.125, None
            found.append((backends.attend(*call, sinks.to(on)).float().cpu(), *backends.attend(*call, None, True)))
    (whole, out, lse), (got, got_out, got_lse) = found
    assert (got - whole).norm() <= (OUT + 2**-7) * whole.norm()
    compare((got_out, got_lse), (out.cpu(), lse.cpu()), 10.0)
    assert torch.equal(got[1], torch.zeros_like(got[1]))


@pytest.mark.parametrize("name", ["grid", "polar"])
def test_a_call_of_static_capacity_is_replayed(device, name, monkeypatch):  # noqa: F811
    """Pages and mask have a fixed size and a variable number of tokens.

    As in a CUDA graph, the same launches are repeated over the current contents.
    """
    from tersekv.kernels.attend_pages import attend_pages as reference
    from test_ops_pages import call

    query, keys, values, pages, p, mask, *rest = call(name, 32)
    args = [moved(x, device) for x in (query, keys, values, pages, p, mask, *rest)]
    attend = backends.attend_pages.run
    replay, outs = captured(lambda: attend(*args), device, monkeypatch)
    query, pages = torch.randn_like(query), torch.tensor([[4, -1, -1, -1], [3, 0, 6, 2]]).int()
    held = (pages >= 0).repeat_interleave(p, dim=1)
    mask = held[:, None] & (torch.rand_like(mask, dtype=torch.float32) < 0.9)
    for there, now in zip((args[0], args[3], args[5]), (query, pages, mask), strict=True):
        there.copy_(now)
    replay()
    expected = right(reference, query, keys, values, pages, p, mask, *rest)
    compare(outs, expected, float((query @ keys.decode().mT).abs().max()) * rest[0])


def captured(run, device, monkeypatch):  # noqa: F811
    """Return a function that repeats the launches, and the outputs to which it writes.

    When interpreted, torch may only allocate or view. A first run makes constant tables.
    """
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = run()
        return graph.replay, outs
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from triton.runtime.interpreter import InterpretedFunction

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            assert op.is_view or "empty" in op.name(), f"{op} is no launch of ours"
            return op(*args, **(kwargs or {}))

    launches, launch = [], InterpretedFunction.run

    def noted(kernel, *args, **options):
        launches.append(lambda: launch(kernel, *args, **options))
        with _disable_current_modes():
            launch(kernel, *args, **options)

    with monkeypatch.context() as patch, Nothing():
        patch.setattr(InterpretedFunction, "run", noted)
        outs = run()
    assert launches
    return lambda: [again() for again in launches], outs


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [("kivi:bits=4,group=32", 3), ("uniform:bits=3,group=16", 41), ("turboquant:bits=4", 41),
     ("trellis:bits=3,calibration=prompt", 3), ("kivi:bits=4/exact", 3), ("exact:dtype=bf16", 257)],
)  # fmt: skip
def test_latents_are_decoded_once(device, recipe, rows):  # noqa: F811
    """Scales of groups, of tokens, of elements and of components; exact tokens wider than a power of two."""
    made = torch.Generator().manual_seed(0)
    latents, rotated = (torch.randn(2, 1, 230, width, generator=made) for width in (320, 64))
    plan = Recipe.parse(f"window:sinks=2,recent=8+{recipe}").plan(0, 1).of_latents(0)
    s = LayerStore(plan, latents[:, :, :0], rotated[:, :, :0], None, None)
    with backends.forced("auto"):
        s.append(latents[:, :, :180], rotated[:, :, :180])
        s.append(latents[:, :, 180:], rotated[:, :, 180:])
    assert len(list(s.packed_pages())) == 2
    mask = torch.ones(2, 1, 230, dtype=torch.bool)
    mask[0, :, :40] = False
    query = torch.randn(2, rows, 1, 384, generator=made)
    with backends.forced("reference"):
        expected = attend_store(s, AttentionCall(query, mask, 0.1))
    s.to(device)
    got = attend_store(s, AttentionCall(query.to(device), mask.to(device), 0.1))
    bound = 2**-7 if recipe.startswith("exact") else OUT  # products of bfloat16 tokens are in bfloat16
    assert (got.cpu() - expected).norm() <= bound * expected.norm()
