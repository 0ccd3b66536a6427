"""The dispatcher: forced backends, refusals with a reason, the report, and use without the
extension."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from native_calls import why_not
from tersekv.errors import UserError
from tersekv.kernels import backends, cpu, registry
from tersekv.kernels.attend_grid import GridSide
from tersekv.kernels.attend_packed import attend_packed as reference
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.kernels.lanes import pack_lanes
from tersekv.kernels.registry import OPERATORS, NotTaken

native = pytest.mark.skipif(cpu.why_not_built() is not None, reason="the native extension is not built")


def make_side(side="keys", bits=4, group=32, t=32, D=64, axis=None, N=2):
    axis = axis or ("channel" if side == "keys" else "token")
    P, L = (D, t) if side == "keys" else (t, D)
    codes = pack_lanes.reference(torch.randint(0, 2**bits, (1, 2, N, P, L)), bits)
    shape = (1, 2, N, D // group, t) if axis == "token" else (1, 2, N, t // group, D)
    scale, offset = torch.rand(shape).half(), torch.randn(shape).half()
    return GridSide(side, bits, axis, group, t, D, codes, scale, offset, torch.randn(2**bits))


@pytest.fixture
def call():
    torch.manual_seed(0)
    return [torch.randn(1, 2, 3, 64), make_side("keys"), make_side("values"), None, 0.125, None]


@pytest.fixture
def without_extension(monkeypatch):
    monkeypatch.setattr(cpu, "_module", None)
    monkeypatch.setitem(sys.modules, "tersekv.kernels.cpu._native", None)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)


@native
def test_auto_takes_the_kernels(call):
    assert backends.explain(*call[:3]) == f"cpu/{cpu.isa()}"
    out, lse = backends.attend_packed(*call)
    expected, expected_lse = reference.reference(*call)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "auto"])
def test_forced_runs_every_op(call, name):
    with backends.forced(name):
        out, lse = backends.attend_packed(*call)
        key = torch.randn(1, 2, 5, 64)
        more, more_lse = backends.attend_exact(call[0], key, key, None, 0.125, None)
        merged, _ = backends.merge_segments([out, more], [lse, more_lse])
    assert merged.shape == out.shape


def test_forced_is_undone_after_an_error():
    with pytest.raises(KeyError), backends.forced("reference"):
        raise KeyError
    assert backends.chosen() == "auto"


def test_unknown_name():
    with (
        pytest.raises(ValueError, match="'cuda' is not a valid backend; allowed are auto, cpu, triton, reference"),
        backends.forced("cuda"),
    ):
        pass


@native
def test_forced_raises_if_a_kernel_refuses(call):
    call[1] = call[1]._replace(scale=call[1].scale.float())
    assert backends.explain(*call[:3]) == "reference: scale is torch.float32, not float16 or bfloat16"
    text = "'cpu' is forced and cannot run attend_packed: scale is torch.float32"
    with pytest.raises(UserError, match=text), backends.forced("cpu"):
        backends.attend_packed(*call)
    backends.attend_packed(*call)


REFUSALS = {
    "bits": (lambda c: [c[0], make_side("keys", bits=4)._replace(bits=9), *c[2:]], "9 bits"),
    "group": (
        lambda c: [c[0], c[1], make_side("values", group=8), *c[3:]],
        "groups have 8 lanes, neither a multiple of 16",
    ),
    "block": (lambda c: [c[0], make_side("keys", t=24, group=24), *c[2:]], "blocks have 24 tokens"),
    "query": (lambda c: [c[0].double(), *c[1:]], "query is torch.float64"),
    "grad": (lambda c: [c[0].clone().requires_grad_(), *c[1:]], "query needs a gradient"),
    "scale": (lambda c: [c[0], c[1]._replace(scale=c[1].scale.float()), *c[2:]], "scale is torch.float32"),
    "offset": (
        lambda c: [c[0], c[1]._replace(offset=c[1].offset.bfloat16()), *c[2:]],
        "offset is torch.bfloat16, not float16",
    ),
    "codes": (lambda c: [c[0], c[1]._replace(codes=c[1].codes.long()), *c[2:]], "codes is torch.int64"),
    "device": (lambda c: [c[0].to("meta"), *c[1:]], "query is on meta"),
    "side device": (lambda c: [c[0], c[1]._replace(codes=c[1].codes.to("meta")), *c[2:]], "codes is on meta"),
    "mask": (
        lambda c: [*c[:3], torch.ones(1, 1, 64), *c[4:]],
        "positions is torch.float32, not int64 or int32 or bool",
    ),
}


@native
@pytest.mark.parametrize("what", REFUSALS)
def test_why_not_grid(call, what):
    change, text = REFUSALS[what]
    assert why_not(cpu_attend.attend_packed, *call) is None
    assert text in why_not(cpu_attend.attend_packed, *change(call))


@native
def test_why_not_exact_and_merge():
    q, k = torch.randn(1, 1, 2, 32), torch.randn(1, 1, 5, 32)
    assert why_not(cpu_attend.attend_exact, q, k, k, None, 1.0, None) is None
    assert "torch.float64" in why_not(cpu_attend.attend_exact, q, k.double(), k, None, 1.0, None)
    transposed = torch.randn(1, 1, 32, 5).mT
    assert "along their last axis" in why_not(cpu_attend.attend_exact, q, transposed, k, None, 1.0, None)
    assert "gradient" in why_not(cpu_attend.attend_exact, q, k.clone().requires_grad_(), k, None, 1.0, None)
    assert "not float32" in why_not(cpu_attend.merge_segments, [q.half()] * 2, [q[..., 0]] * 2)
    with torch.no_grad():
        assert why_not(cpu_attend.attend_exact, q.clone().requires_grad_(), k, k, None, 1.0, None) is None


CONTRACT = {
    "words": (lambda s: s._replace(codes=s.codes[..., :7, :]),
              r"codes: expected \[B, H, N, Lg, W, 16\] with W = 8, got 7"),
    "lanes": (lambda s: s._replace(codes=s.codes[:, :, :, :1]), "with Lg = 2, got 1"),
    "batch": (lambda s: s._replace(codes=s.codes.expand(2, -1, -1, -1, -1, -1)), "with B = 2, got 1"),
    "packed": (lambda s: s._replace(codes=s.codes.mT.contiguous().mT), "with stride 1 along 16"),
    "scale": (lambda s: s._replace(scale=s.scale[..., :63]), "scale: .* with per group = 64, got 63"),
    "offset": (lambda s: s._replace(offset=s.offset[:, :1]), "offset: .* with H = 2, got 1"),
    "table": (lambda s: s._replace(table=s.table[:15]), r"table: .* with 2\*\*bits = 16, got 15"),
    "group": (lambda s: s._replace(group=48), "group: expected a divisor of 32, got 48"),
    "head dim": (lambda s: make_side("keys", D=128), "head_dim"),
    "side": (lambda s: make_side("values"), "expected a grid of keys"),
}  # fmt: skip


@native
@pytest.mark.parametrize("what", CONTRACT)
def test_contract_names_the_size(call, what):
    change, text = CONTRACT[what]
    call[1] = change(call[1])
    with pytest.raises(ValueError, match=text):
        cpu_attend.attend_packed(*call)


@native
def test_contract_of_the_other_arguments(call):
    with pytest.raises(ValueError, match="values: expected T = 64 tokens like the keys, got 96"):
        cpu_attend.attend_packed(call[0], call[1], make_side("values", N=3), None, 1.0, None)
    with pytest.raises(ValueError, match="with T = 64, got 63"):
        cpu_attend.attend_packed(*call[:3], torch.ones(1, 1, 63, dtype=torch.bool), 1.0, None)
    with pytest.raises(ValueError, match="q to divide R = 3, got 2"):
        cpu_attend.attend_packed(*call[:3], torch.ones(1, 2, 64, dtype=torch.bool), 1.0, None)
    k = torch.randn(1, 2, 5, 64)
    with pytest.raises(ValueError, match="values: expected T = 5 tokens like the keys, got 4"):
        cpu_attend.attend_exact(call[0], k, k[:, :, :4], None, 1.0, None)
    with pytest.raises(ValueError, match="expected"):
        cpu_attend.merge_segments([k, k], [k[..., 0], k[:, :1, :, 0]])
    with pytest.raises(ValueError, match="got 2 and 1"):
        cpu_attend.merge_segments([k, k], [k[..., 0]])


def test_without_the_extension(call, without_extension):
    assert "not built" in backends.explain(*call[:3])
    torch.testing.assert_close(backends.attend_packed(*call)[0], reference.reference(*call)[0])
    rows = backends.report()
    assert [row["available"] for row in rows if row["backend"] == "cpu"] == [False] * len(OPERATORS)
    with pytest.raises(UserError, match="native kernels are not built"), backends.forced("cpu"):
        backends.attend_packed(*call)
    with pytest.raises(NotTaken, match="native kernels are not built"):
        cpu.isa()


def test_report():
    rows = backends.report()
    attention = {"attend_packed", "attend_pages", "attend_segments", "attend_exact", "merge_segments"}
    assert attention <= {row["op"] for row in rows if row["backend"] == "reference"}
    assert attention <= {row["op"] for row in rows if row["backend"] == "cpu"}
    assert all(set(row) == {"backend", "op", "available", "detail"} for row in rows)
    assert all(row["available"] for row in rows if row["backend"] == "reference")


@native
def test_report_says_why_a_better_instruction_set_is_not_used():
    cpu.set_isa("scalar")
    try:
        detail = backends.report()[0]["detail"]
        assert detail.startswith("scalar")
        for name in list(cpu.isas())[:-1]:
            assert name in detail
    finally:
        cpu.set_isa("auto")


@native
def test_unknown_isa():
    with pytest.raises(ValueError, match="got sse9, this build knows auto"):
        cpu.set_isa("sse9")


def test_environment_variables():
    done = run_python("from tersekv.kernels import backends; print(backends.chosen())", TERSEKV_BACKEND="reference")
    assert done.stdout.strip() == "reference", done.stderr
    done = run_python("from tersekv.kernels import backends; backends.chosen()", TERSEKV_BACKEND="gpu")
    assert "TERSEKV_BACKEND: 'gpu' is not a valid backend; allowed are auto, cpu, triton, reference" in done.stderr


@native
def test_isa_variable():
    done = run_python("from tersekv.kernels import cpu; print(cpu.isa())", TERSEKV_CPU_ISA="scalar")
    assert done.stdout.strip() == "scalar", done.stderr
    done = run_python("from tersekv.kernels import cpu; cpu.isa()", TERSEKV_CPU_ISA="mmx")
    assert "TERSEKV_CPU_ISA: isa: got mmx" in done.stderr


def test_import_loads_nothing():
    code = "import sys, tersekv.kernels.backends; print('tersekv.kernels.cpu._native' in sys.modules)"
    assert run_python(code).stdout.strip() == "False"


def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_logged", set())
    matrix = torch.eye(16, dtype=torch.float64)
    with caplog.at_level("INFO", "tersekv"):
        for _ in range(2):
            backends.rotate_dense(torch.ones(3, 16, dtype=torch.float64), matrix)
        monkeypatch.setattr(backends.cpu, "_module", None)
        monkeypatch.setattr(backends.cpu, "why_not_built", lambda: f"{registry.NOT_BUILT}: no file")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                backends.rotate_dense(torch.ones(3, 16, dtype=torch.float64), matrix)
    (first,) = caplog.records
    assert (first.levelname, first.name) == ("INFO", "tersekv.kernels.registry")
    assert first.getMessage().startswith("rotate_dense runs on the torch reference (cpu: ")
    assert [str(w.message) for w in warned] == [
        "tersekv runs on torch, which is many times slower: native kernels are not built: no file"
    ]
