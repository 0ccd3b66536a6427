"""Operators as torch sees them: schemas, fake results, names in profiles, and the calls of a decode
step."""

from __future__ import annotations

import pytest
import torch

from conftest import benchmark
from tersekv.kernels import backends, cpu
from tersekv.kernels.basis import packed_basis
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.registry import OPERATORS

X = torch.randn(1, 2, 64, 32)
PLACE = GridPlace("keys", 4, "token", 32, 32)
TRELLIS = torch.randn(2, 3, 16), torch.rand(2, 16), torch.full((2, 16), 2, dtype=torch.uint8), torch.randn(9, 256)
CALLS = {
    "rotate_dense": (X, torch.eye(32)),
    "rotate_hadamard": (X, torch.eye(32), torch.arange(32, dtype=torch.int32), torch.ones(32)),
    "basis_product": (X, torch.zeros(1, 2, 768, dtype=torch.uint8), torch.ones(1, 2, 32).half(), True),
    "basis_components": (X, *packed_basis(torch.randn(1, 2, 32, 32).double(), torch.ones(1, 2, 32).double()).values()),
    "fitted_basis": (torch.eye(16).expand(1, 2, 16, 16).double(), torch.ones(1, 2, 16).double()),
    "observed_loss": (X[:, :, :6], X, X, torch.ones(1, 3, 64).bool(), torch.ones(1, 64), 0.2, None, torch.ones(2, 6)),
    "squared_weights": (X[:, :, :6], X, torch.ones(1, 3, 64).bool(), 0.2, None, torch.ones(2, 6)),
    "weighted_sums": (X, torch.rand(1, 2, 64)),
    "relative_weights": (torch.rand(1, 2, 64), 0.5),
    "fitted_components": (*torch.rand(2, 1, 2, 16).double(), torch.linspace(1, 0, 8).double(), 32, 8.0),
    "search_arguments": (
        *packed_basis(torch.randn(1, 2, 32, 32).double(), torch.ones(1, 2, 32).double()).values(),
        *torch.ones(2, 1, 2, 32).half(),
        torch.ones(1, 2, 32, dtype=torch.uint8),
        torch.rand(9),
    ),
    "rotated_sums": (X, X[:, :1], X[:, :1]),
    "without_rotated_mean": (X, X[:, :, :1], X[:, :, :1], X[:, :1], X[:, :1]),
    "encode_trellis": TRELLIS,
    "pack_trellis": (*TRELLIS, 2, [3], torch.zeros(2)),
    "pack_vectors": (
        TRELLIS[0],
        torch.zeros(2, 16),
        torch.eye(16)[None],
        torch.zeros(2, dtype=torch.int64),
        *TRELLIS[1:],
        2,
        [3],
        torch.zeros(2),
    ),
    "group_ranges": (X, *PLACE),
    "encode_grid": (X, *PLACE, torch.ones(1, 1, 1, 1, 1), None, None),
    "pack_lanes": (torch.randint(0, 8, (2, 32, 16)), 3),
    "encode_signs": (X, torch.randn(40, 32)),
    "encode_polar": (X, [3, 2], [torch.linspace(0, 6, 8), torch.linspace(0, 1.5, 4)]),
    "quantiles": (torch.randn(3, 100), 0.02),
    "pack_outliers": (X, X > 1),
    "merge_segments": ([X, X + 1], [X[..., 0], X[..., 1]]),
}
RECIPES = ["default", "kivi:bits=4", "trellis:bits=2,calibration=prompt", "kvquant:bits=3,calibration=prompt",
           "polarquant", "qjl", "turboquant:bits=4", "int4", "normalfloat"]  # fmt: skip


def test_every_operator_of_tensors_is_one_of_torch():
    assert set(CALLS) == {name for name, made in OPERATORS.items() if made.torch_operator is not None}


@pytest.mark.parametrize("name", CALLS)
def test_schema_and_fake_results(name):
    torch.library.opcheck(OPERATORS[name].torch_operator, CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_is_its_reference(name):
    made = OPERATORS[name]
    with backends.forced("reference"):
        out = made.torch_operator(*CALLS[name])
    expected = made._unflattened.__func__(made, *CALLS[name]) if made._tuples else made.reference(*CALLS[name])
    for x, y in zip(*((z if isinstance(z, (tuple, list)) else [z]) for z in (out, expected)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_profiles_name_operators():
    with torch.profiler.profile() as profile:
        backends.encode_signs(X, torch.randn(40, 32))
    assert "tersekv::encode_signs" in {event.name for event in profile.events()}


@pytest.mark.skipif(cpu.why_not_built() is not None, reason="the C++ extension is not built")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_is_few_calls(recipe):
    python, native = benchmark("layer_step").calls(recipe)
    assert 10 < python <= 40
    assert native == 2  # writes the token, and attends


@pytest.mark.skipif(cpu.why_not_built() is not None, reason="the C++ extension is not built")
@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        ("snapkv:budget=128+kivi:bits=4", 60),
        ("snapkv:budget=128,rest=2+kivi:bits=4", 60),
        ("mixed:rest=2+trellis:bits=4,calibration=prompt", 46),
    ],
)
def test_a_step_of_a_policy_that_ranks_is_few_calls(recipe, most):
    python, native = benchmark("layer_step").calls(recipe)
    assert 10 < python <= most
    assert native == 2
