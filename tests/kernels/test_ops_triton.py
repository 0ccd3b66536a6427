"""Triton kernels against the torch reference: every layout, odd shapes, masks, RoPE, exact tokens,
merging.

On a machine without a GPU Triton interprets them on the CPU. `pytest -m gpu` runs the same tests on
a CUDA device. Products are in float16. An output is within 4e-3 of its norm and a log-sum-exp
within 2e-3 of the largest score. This is an order of magnitude below the error of dense attention
in bfloat16.
"""

from __future__ import annotations

import functools

import pytest
import torch

from packed_views import FORMATS, make_mask, packed, roped, tokens
from tersekv.kernels import backends, registry, triton
from tersekv.kernels.attend_packed import attend_packed as reference
from tersekv.kernels.softmax import attend_exact as exact_reference
from tersekv.kernels.softmax import merge_segments as merge_reference
from test_backends import make_side

pytestmark = pytest.mark.skipif(triton.why_not_installed() is not None, reason=str(triton.why_not_installed()))
OUT, LSE = 4e-3, 2e-3
DEVICES = [
    pytest.param("cpu", id="interpreted"),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
READ = list(FORMATS)


@pytest.fixture(params=DEVICES, autouse=True)
def device(request, monkeypatch):
    """Return the device of the kernels.

    Interpreted kernels run where they are forced. On a GPU, tensors on the CPU use torch, and a
    call with tensors on the GPU that no kernel takes fails.
    """
    if request.param == "cuda":
        monkeypatch.setattr(registry, "_log_fallback", fail_on_the_gpu)
    elif not triton.interpreted():
        pytest.skip("kernels run on the GPU here")
    with backends.forced("triton" if request.param == "cpu" else "auto"):
        yield request.param


def fail_on_the_gpu(name, reasons):
    """Raise if a call falls back to torch although its tensors are on the GPU."""
    taken = "triton: " not in reasons or "not on a CUDA device" in reasons
    assert taken, f"{name} ran on torch: {reasons}"


def right(op, *call):
    """Return the operator's result from torch alone, operators within it included."""
    with backends.forced("reference"):
        return op(*call)


_moved = {}
"""Tensors on a GPU by the place and form of the one they were copied from, which is kept alive."""


def moved(x, device):
    """Move a view, an operand or a tensor with all its tensors to a device. Pages that share a
    tensor share it there, too."""
    if isinstance(x, torch.Tensor):
        place = x.data_ptr(), x.dtype, x.shape, x.stride()
        if device == "cpu" or not x.numel():
            return x.to(device)
        if place not in _moved or not torch.equal(_moved[place][1].cpu(), x):
            _moved[place] = x, x.to(device)
        return _moved[place][1]
    if isinstance(x, tuple):
        return type(x)(*(moved(item, device) for item in x)) if hasattr(x, "_fields") else x
    if isinstance(x, list):
        return [moved(item, device) for item in x]
    if hasattr(x, "__dict__") and type(x).__module__.startswith("tersekv.layouts"):
        other = object.__new__(type(x))
        vars(other).update({name: moved(value, device) for name, value in vars(x).items()})
        return other
    return x


def compare(result, expected, scores):
    """Compare output and lse. scores: the largest absolute score."""
    out, lse = (x.cpu() for x in result)
    assert (out - expected[0]).norm() <= OUT * expected[0].norm()
    seen = expected[1].isfinite()
    assert torch.equal(lse[~seen], expected[1][~seen])
    assert bool((lse - expected[1])[seen].abs().le(LSE * max(1.0, scores)).all())


def run(device, keys, values, R, mask=None, softcap=None, op=reference):
    """Run the kernels on `device` and compare. keys, values: views or tensors on the CPU."""
    keys, values = (getattr(x, "operand", x) for x in (keys, values))
    key = keys if isinstance(keys, torch.Tensor) else keys.decode()
    query = torch.randn(*key.shape[:2], R, key.shape[-1]).bfloat16().float()  # as a model's are
    call = query, keys, values, mask, key.shape[-1] ** -0.5, softcap
    expected = right(op, *call)
    result = backends.attend_packed(*(moved(x, device) for x in call))
    compare(result, expected, float((query @ key.float().mT).abs().max()) * call[4])
    return result


@functools.cache
def view(name, side, B=1, H=2, T=96, D=64):
    torch.manual_seed(D + T + len(name))
    with backends.forced("auto"):  # encoding has its own kernels
        return packed(name, side, tokens(B, H, T, D)).inner


def length(name, T):
    """Return a length of whole blocks of a format."""
    return -(-T // 64) * 64 if "per channel" in name else T


SHAPES = [(1, 2, 96, 64, 3), (2, 1, 160, 96, 5), (1, 1, 64, 160, 17)]


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("number", range(len(READ)), ids=READ)
def test_every_layout(device, number, side):
    """Each layout in one of three shapes, on a GPU in all of them."""
    shapes = SHAPES if device == "cuda" else [SHAPES[(number + (side == "keys")) % 3]]
    for B, H, T, D, R in shapes:
        T = length(READ[number], T)
        torch.manual_seed(R)
        other = view("grid", "values" if side == "keys" else "keys", B, H, T, D)
        one = view(READ[number], side, B, H, T, D)
        run(device, *((one, other) if side == "keys" else (other, one)), R)


@pytest.mark.parametrize(("name", "D"), [("grid", 256), ("grid 7", 80), ("polar", 80), ("signs", 256)])
def test_head_dims(device, name, D):
    torch.manual_seed(D)
    run(device, view(name, "keys", D=D, T=64), view("grid 7", "values", D=D, T=64), 4)


@pytest.mark.parametrize(("q", "softcap"), [(1, None), (4, 20.0)])
def test_masks_softcap_and_splits(device, q, softcap, monkeypatch):
    from tersekv.kernels.triton import launch

    torch.manual_seed(q)
    plan = launch.plan
    monkeypatch.setattr(launch, "plan", lambda *call: plan(*call)._replace(splits=2, split_tokens=128))
    T = 192
    mask = make_mask(2, q, T)
    keys, values = view("grid", "keys", 2, 2, T), view("sparse", "values", 2, 2, T)
    out, lse = run(device, keys, values, 4 * q, mask, softcap)
    assert torch.equal(out[:, :, ::q], torch.zeros_like(out[:, :, ::q]))
    assert lse[:, :, ::q].isneginf().all()
    run(device, keys, values, 2 * q, mask[:, None].expand(-1, 2, -1, -1).clone().mT.contiguous().mT, softcap)


@pytest.mark.parametrize("T", [64, 288])
@pytest.mark.parametrize("name", ["grid", "signs", "joined"])
def test_scores_alone(device, name, T, monkeypatch):
    from tersekv.kernels.triton import launch

    torch.manual_seed(T)
    plan = launch.plan

    def one_tile_per_split(*call):
        chosen = plan(*call)
        tile = 32 * chosen.blocks
        return chosen._replace(splits=-(-T // tile), split_tokens=tile)

    monkeypatch.setattr(launch, "plan", one_tile_per_split)
    keys, query = view(name, "keys", 2, 2, T).operand, torch.randn(2, 2, 5, 64)
    expected = right(reference, query, keys, torch.zeros(2, 2, T, 8), None, 0.125, None)[1]
    lse = triton.score_keys(query.to(device), moved(keys, device), 0.125).cpu()
    torch.testing.assert_close(lse, expected, rtol=LSE, atol=LSE)


@pytest.mark.parametrize("number", range(len(READ)), ids=READ)
def test_keys_before_rope(device, number):
    """Each layout with one of two orders of pairs, and positions of one of three kinds."""
    kind, R = (("halves", 64), ("pairs", 48))[number % 2]
    rows, B, H = (("shared", 1, 2), ("per row", 2, 1), ("per head", 2, 3))[number % 3]
    torch.manual_seed(R)
    T = length(READ[number], 32)
    run(device, roped(view(READ[number], "keys", B, H, T), kind, R, T, rows), view("grid", "values", B, H, T), 5)


def test_channels_of_blocks_before_rope(device):
    """Channels differ between blocks. With one block, as above, all are the same."""
    torch.manual_seed(0)
    keys = roped(view("signs per group", "keys", T=64), "halves", 48, 64)
    run(device, keys, view("signs per group", "values", T=64), 3)


def test_loud_channels_that_differ_between_blocks(device):
    """Outlier channels dominate the score, so a kernel that used another block's channels would be
    far off."""
    from tersekv.codecs import methods

    torch.manual_seed(1)
    x = torch.randn(1, 2, 96, 64)
    for n in range(3):
        x[:, :, 32 * n : 32 * n + 32, 5 * n : 5 * n + 4] *= 20
    codec = methods()["qjl"].build(outliers_per="group", outliers=4, initial_layers=0).keys
    with backends.forced("auto"):
        keys = codec.view(codec.encode(x), 64)
    run(device, keys, view("grid", "values"), 5)


@pytest.mark.parametrize("method", ["polarquant", "turboquant"])
def test_rotated_keys_before_rope(device, method):
    from tersekv.codecs import methods

    torch.manual_seed(0)
    x = tokens(1, 2, 64, 64)
    with backends.forced("auto"):
        codec = methods()[method].build().keys.fit(x)
        rotated = codec.view(codec.encode(x), 64)
    assert rotated.kind == "rotated"
    run(device, roped(rotated, "halves", 64, 64), view("grid", "values", T=64), 3)


@pytest.mark.parametrize("axes", [("channel", "token"), ("token", "channel"), ("token", "token")], ids=str)
@pytest.mark.parametrize("group", [8, 32, 64])
@pytest.mark.parametrize("bits", [1, 4, 6])
def test_grids_of_any_table_and_group(device, axes, group, bits):
    torch.manual_seed(bits)
    sides = [
        make_side(side, bits, min(group, 64), 64 if axis == "channel" else 32, 64, axis, 2 if axis == "channel" else 4)
        for side, axis in zip(("keys", "values"), axes, strict=True)
    ]
    run(device, *sides, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "Dv", "T", "R"), [(64, 64, 129, 3), (80, 16, 40, 4), (256, 64, 3, 32), (7, 5, 33, 3)])
def test_exact(device, dtype, D, Dv, T, R):
    torch.manual_seed(D + T)

    def plane(D):
        # tokens before heads, with slack of NaN after each row and after the last token
        full = torch.full((2, T + 5, 2, D + 8), float("nan"), dtype=dtype)
        full[:, :T, :, :D] = torch.randn(2, T, 2, D)
        return full[:, :T, :, :D].transpose(1, 2)

    key, value = plane(D), plane(Dv)
    query = torch.randn(2, 2, R, D).to(dtype).float()  # as a model's are
    call = query, key, value, make_mask(2, R, T), D**-0.5, 20.0
    result = backends.attend_exact(*(moved(x, device) for x in call))
    out, lse = (x.cpu() for x in result)
    expected = right(exact_reference, *call)
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (out - expected[0]).norm() <= bound * expected[0].norm()
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-4)


def test_no_tokens_and_no_rows(device):
    for T, R in ((0, 3), (4, 0)):
        key = torch.randn(1, 2, T, 64, device=device)
        out, lse = backends.attend_exact(torch.randn(1, 2, R, 64, device=device), key, key, None, 1.0, None)
        assert out.shape == (1, 2, R, 64)
        assert torch.equal(out, torch.zeros_like(out))
        assert lse.isneginf().all()


@pytest.mark.parametrize("factor", [0.0, 1e-3, 1e3])
def test_extreme_scores(device, factor):
    torch.manual_seed(0)
    keys, values = view("grid", "keys"), view("grid", "values")
    query = factor * torch.randn(1, 2, 3, 64)
    call = query, keys.operand, values.operand, None, 0.125, None
    result = backends.attend_packed(*(moved(x, device) for x in call))
    assert result[0].isfinite().all()
    compare(result, right(reference, *call), float((query @ keys.decode().mT).abs().max()) * 0.125)


def test_nan_reaches_only_its_head(device):
    torch.manual_seed(0)
    keys = make_side("keys")
    keys.scale[:, 0, 1] = float("nan")
    call = torch.randn(1, 2, 3, 64), keys, make_side("values"), None, 0.125, None
    out, lse = backends.attend_packed(*(moved(x, device) for x in call))
    assert out[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


def test_every_element_is_written(device, monkeypatch):
    """Outputs and partial outputs of splits start as NaN."""
    empty = torch.Tensor.new_empty

    def poisoned(x, *size, **kwargs):
        made = empty(x, *size, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    torch.manual_seed(0)
    out, lse = run(device, view("joined and added", "keys", T=288), view("joined and added", "values", T=288), 5)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("segments", [1, 2, 4, 10])
@pytest.mark.parametrize("D", [16, 72])
def test_merge_segments(device, segments, D):
    torch.manual_seed(segments)
    outs = [torch.randn(2, 3, 5, D) for _ in range(segments)]
    lses = [torch.randn(2, 3, 5) * 30 for _ in range(segments)]
    lses[0][0] = float("-inf")
    for out, lse in zip(outs, lses, strict=True):
        lse[1, 1] = float("-inf")
        out[1, 1] = 0
    outs[-1] = outs[-1].mT.contiguous().mT
    out, lse = backends.merge_segments([x.to(device) for x in outs], [x.to(device) for x in lses])
    expected, expected_lse = right(merge_reference, [x.double() for x in outs], [x.double() for x in lses])
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-6, atol=1e-6)


def both_ways(view):
    """Return a view whose first sketch both uses and omits channels."""
    sketch = view.sketches[0]
    return type(view)([sketch._replace(channels=sketch.dropped)], view.head_dim)


def wide(name):
    """Return sketches of 256 or 200 rows before RoPE of 256 channels."""
    return roped(view(name, "keys", T=64, D=256), "halves", 256, 64).operand


REFUSALS = {
    "query": (lambda c: [c[0].double(), *c[1:]], "query is torch.float64"),
    "rows": (lambda c: [torch.randn(1, 2, 300, 64), *c[1:]], "query has 300 rows"),
    "grad": (lambda c: [c[0].clone().requires_grad_(), *c[1:]], "query needs a gradient"),
    "scale": (lambda c: [c[0], c[1]._replace(scale=c[1].scale.float()), *c[2:]], "a scale of torch.float32"),
    "block": (lambda c: [c[0], make_side("keys", t=16, group=16), *c[2:]], "blocks of 16 tokens"),
    "device": (lambda c: [c[0], c[1]._replace(codes=c[1].codes.to("meta")), *c[2:]], "keys have codes on meta"),
    "inner": (lambda c: [c[0], c[1]._replace(scale=c[1].scale.mT.contiguous().mT), *c[2:]], "along an inner axis"),
    "mask": (lambda c: [*c[:3], torch.ones(1, 1, 64), *c[4:]], "mask is torch.float32, not bool"),
    "matrix": (lambda c: [torch.randn(1, 2, 3, 256), wide("signs"), *c[2:]], "a matrix of 256 × 256"),
    "matrices": (lambda c: [torch.randn(1, 2, 3, 256), wide("signs per group"), *c[2:]], "a matrix of 200 × 256"),
    "sketch": (
        lambda c: [c[0], both_ways(view("signs per group", "keys", T=64)), *c[2:]],
        "both take and leave out channels",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_why_not(device, what):
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    call = [torch.randn(1, 2, 3, 64), make_side("keys"), make_side("values", D=64), None, 0.125, None]
    if what == "inner":
        call[1] = make_side("keys", t=64, group=32)
    change, text = REFUSALS[what]
    assert triton.why_not_attend_packed(*call) is None
    assert text in str(triton.why_not_attend_packed(*change(call)))


def test_interpreted_kernels_run_only_where_they_are_forced(device):
    if device == "cuda":
        pytest.skip("nothing is interpreted")
    call = torch.randn(1, 2, 3, 64), make_side("keys"), make_side("values"), None, 0.125, None
    assert backends.explain(*call[:3]) == "triton"
    with backends.forced("auto"):
        assert backends.explain(*call[:3]) != "triton"


def test_launches_of_a_step(device, monkeypatch):
    """One layer's attention for one token launches one kernel for packed tokens, one for exact
    tokens and one to merge."""
    from tersekv.attention.read import AttentionCall, attend_store
    from tersekv.kernels.triton import launch, maps
    from test_store import fed
    from test_store import tokens as inputs

    launched = []
    for module, name in ((launch.kernels, "attend"), (maps, "finish")):
        monkeypatch.setattr(module, name, Counted(getattr(module, name), name, launched))
    keys, values = inputs(100, B=1)
    store = fed("window:sinks=4,recent=32+kivi:bits=4", keys, values, [0, 100])
    store.to(device)
    attend_store(store, AttentionCall(torch.randn(1, 4, 1, 64, device=device), None, 0.125))
    assert (len(store.exact_segments()), len(list(store.packed_pages()))) == (2, 1)
    assert launched == ["attend"] * 2 + ["finish"]


class Counted:
    """A kernel that records its launches."""

    def __init__(self, kernel, name, launched):
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid):
        self.launched.append(self.name)
        return self.kernel[grid]
