"""Division of a call into programs: the choice for each GPU."""

from __future__ import annotations

import pytest
import torch

from packed_views import packed, tokens
from tersekv.errors import UserError
from tersekv.kernels import backends, triton

pytestmark = pytest.mark.skipif(triton.why_not_installed() is not None, reason=str(triton.why_not_installed()))
CPU = torch.device("cpu")


@pytest.fixture
def tuning(monkeypatch):
    """Return the module with a separate tuning table."""
    from tersekv.kernels.triton import tuning

    monkeypatch.setattr(tuning, "TABLE", {})
    chosen = tuning.chosen
    chosen.cache_clear()
    yield tuning
    chosen.cache_clear()


def key(tuning, **changes):
    return tuning.Key("sm_90", ((1, 4),), ((1, 4),), False, 8, 128, tuning.SLICES)._replace(**changes)


def test_wide_heads_many_rows_and_rope_take_fewer_tokens(tuning):
    def tokens_of(**changes):
        return 32 * tuning.chosen(key(tuning, **changes)).blocks

    assert tokens_of() == tokens_of(slices=0) == 128
    integers = {"slices": tuning.INTEGERS}
    assert tokens_of(**integers) == tokens_of(**integers, channels=64) == 256
    assert tokens_of(**integers, channels=256) == tokens_of(**integers, rows=16) == 128
    assert tokens_of(**integers, keys=((2, 4),)) == 128, "signs beside them need registers"
    assert tokens_of(channels=256) == tokens_of(rows=32) == 64
    assert tuning.chosen(key(tuning, rows=16)) == tuning.Shape(4, 4, 1)  # two stages would spill
    assert tokens_of(has_rope=True) == tokens_of(channels=256, has_rope=True) == 32
    assert tokens_of(keys=((3, 4),), channels=64) == 64


def test_unknown_gpus_use_the_smallest_program_except_for_grids_and_single_elements(tuning):
    from tersekv.kernels.triton.leaves import POLAR, SIGNS

    for name in ("sm_80", "sm_89", "sm_100", "gfx942"):
        for change in ({"has_rope": True}, {"rows": 32}):
            assert tuning.chosen(key(tuning, architecture=name, **change)) == tuning.LEAST
        signs = tuning.chosen(key(tuning, architecture=name, keys=((SIGNS.value, 4),), channels=256))
        assert signs == (tuning.LEAST if name == "gfx942" else tuning.Shape(2, 4, 2))
        polar = tuning.chosen(key(tuning, architecture=name, values=((POLAR.value, 4),)))
        assert polar == (tuning.LEAST if name == "gfx942" else tuning.Shape(2, 4, 1))
        grids = tuning.chosen(key(tuning, architecture=name))
        assert grids == (tuning.LEAST if name == "gfx942" else tuning.chosen(key(tuning)))
    assert tuning.chosen(key(tuning, architecture="")) == tuning.chosen(key(tuning))
    other = [tuning.chosen(key(tuning, architecture=name, slices=0)).stages for name in ("sm_80", "sm_120", "sm_90")]
    assert other == [1, 1, 2]  # two stages would spill


def test_how_grids_are_read(tuning):
    from tersekv.codecs import methods
    from tersekv.kernels.triton import trees

    def slices(method, has_rope=False, **options):
        pair = methods()[method].build(**options)
        codecs = zip((pair.keys, pair.values), ("keys", "values"), strict=True)
        views = [(codec.view(codec.encode(tokens(1, 1, 64, 64)), 64).inner.operand, side) for codec, side in codecs]
        leaves = [getattr(trees, side)(operand, CPU).leaves for operand, side in views]
        return tuning.key_of(4, *leaves, CPU, has_rope).slices

    assert slices("kivi", bits=4) == tuning.INTEGERS
    assert slices("uniform", bits=4, axis="token", group=0) == slices("turboquant", bits=4.0) == tuning.SLICES
    assert slices("kivi", bits=3) == slices("kivi", bits=4, has_rope=True) == slices("polarquant") == 0


def test_measured_choices_have_priority(tuning):
    own, any_ = tuning.Shape(2, 8, 3), tuning.Shape(1, 2, 1)
    tuning.TABLE[key(tuning)] = own
    tuning.TABLE[key(tuning, architecture="")] = any_
    assert tuning.chosen(key(tuning)) == own
    assert tuning.chosen(key(tuning, architecture="sm_80")) == any_
    tuning.TABLE.clear()
    assert tuning.chosen(key(tuning)) == own, "a choice is made once and kept"


def test_a_plan_asks_for_its_layouts(tuning, monkeypatch):
    from tersekv.kernels.triton import trees

    asked = []
    monkeypatch.setattr(tuning, "chosen", lambda key: asked.append(key) or tuning.LEAST)
    x = tokens(1, 2, 64, 96)
    keys, values = (packed(name, side, x).inner.operand for name, side in (("grid 3", "keys"), ("polar", "values")))
    leaves = trees.keys(keys, CPU).leaves, trees.values(values, CPU).leaves
    plan = tuning.plan(2, 9, 64, *leaves, CPU, has_rope=True)
    assert asked == [tuning.Key("", ((1, 3),), ((3, 4),), True, 16, 128)]
    assert (plan.rows, plan.blocks, plan.splits * plan.split_tokens) == (16, 1, 64)


@pytest.mark.parametrize(("name", "of_amd", "hip"), [("sm_90", "", None), ("gfx942", "gfx942:sramecc+:xnack-", "6.4")])
def test_architectures(tuning, monkeypatch, name, of_amd, hip):
    from types import SimpleNamespace

    properties = SimpleNamespace(major=9, minor=0, gcnArchName=of_amd)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert tuning.architecture.__wrapped__(torch.device("cuda")) == name


def test_a_matrix_before_rope_fits_shared_memory(tuning, monkeypatch):
    """If another architecture's program lacks shared memory, the reference computes the result."""
    from packed_views import roped

    torch.manual_seed(0)
    x = tokens(1, 2, 64, 128)
    keys, values = roped(packed("signs", "keys", x), "halves", 128, 64), packed("grid", "values", x)
    call = torch.randn(1, 2, 1, 128), keys.operand, values.operand, None, 1.0, None
    assert "before RoPE, more" not in str(triton.why_not_attend_packed(*call))
    monkeypatch.setattr(tuning, "architecture", lambda device: "sm_86")
    assert "256 × 128 before RoPE, more than 16,384" in str(triton.why_not_attend_packed(*call))


@pytest.mark.skipif(not triton.interpreted(), reason="kernels run on the GPU here")
def test_a_kernel_that_does_not_fit_is_made_smaller(monkeypatch):
    from triton.runtime.errors import OutOfResources

    from tersekv.kernels.triton import launch, tuning

    kernel, tried = launch.kernels.attend, []

    class Large:
        def __getitem__(self, grid):
            def refuse(*args, NB, num_stages, **options):
                tried.append((NB, num_stages))
                if num_stages > 1 or fits < NB:
                    raise OutOfResources(300_000, 232_448, "shared memory")
                kernel[grid](*args, NB=NB, num_stages=num_stages, **options)

            return refuse

    monkeypatch.setattr(launch.kernels, "attend", Large())
    monkeypatch.setattr(tuning, "TABLE", {})
    tuning.chosen.cache_clear()
    keys, values = (packed("grid", side, tokens(1, 2, 96, 64)).inner.operand for side in ("keys", "values"))
    call = torch.randn(1, 2, 3, 64), keys, values, None, 0.125, None
    for fits in (0, 1):
        with backends.forced("triton"):
            if fits:
                backends.attend_packed(*call)
            else:
                with pytest.raises(UserError, match="cannot run attend_packed: out of resource"):
                    backends.attend_packed(*call)
        assert tried == [(8, 2), (8, 1), (4, 1), (2, 1), (1, 1)]
        tried.clear()
        tuning.TABLE.clear()
        tuning.chosen.cache_clear()
