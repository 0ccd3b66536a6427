"""Chunks in the storage codec: sizes, errors, positions found from keys, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from random_calibration import stored_model
from tersekv.errors import CacheError, UserError
from tersekv.serving.chunks import HEADER, header
from tersekv.serving.stored_chunks import StoredChunkCoder


@pytest.fixture
def made(tmp_path) -> tuple[dict, Tensor]:
    """Return the options of a model, and its tokens [2, 3, 512, 128] before RoPE."""
    return stored_model(tmp_path)


def chunk(coder: StoredChunkCoder, x: Tensor, at: int) -> Tensor:
    """Return tokens [2, L, T, H·D] with RoPE applied to keys. at: position of the first."""
    keys = [coder._rotated(keys, layer, at, -1) for layer, keys in enumerate(x[0])]
    return torch.stack([torch.stack(keys), x[1]])


def read(coder: StoredChunkCoder, packed: Tensor, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    coder.unpack(packed, [out])
    return out


@pytest.mark.parametrize("at", [0, 256, 1040, 3840])
@pytest.mark.parametrize("tokens", [256, 70, 3])
def test_a_chunk_at_any_position(made, at, tokens):
    """Positions are found, sizes are those of the rate, and errors are those of the codec."""
    options, x = made
    errors = []
    for rate in (1, 2, 4):
        coder = StoredChunkCoder(rate, **options)
        source = chunk(coder, x[:, :, :tokens], at)
        assert tokens < 70 or coder._position(source[0]) == at
        if at == 0 and tokens < 70:
            with pytest.raises(UserError, match="no room for its first tokens"):
                coder.pack([source])
            return
        packed = coder.pack([source])
        assert len(packed) == coder.size([source.shape])
        assert len(packed) - HEADER.size - coder._fixed() == -(-source.numel() * rate // 8)
        found = read(coder, torch.cat([packed, torch.ones(9, dtype=torch.uint8)]), source)  # buffers may be longer
        errors.append(float((found - source).square().sum() / (source - source.mean(2, keepdim=True)).square().sum()))
        if at == 0:
            assert torch.equal(found[:, :, :4].bfloat16(), source[:, :, :4].bfloat16())
    assert errors == sorted(errors, reverse=True)
    assert tokens < 256 or errors[-1] < 1e-3


def test_wrong_positions_cost_accuracy_alone(made, monkeypatch):
    options, x = made
    coder = StoredChunkCoder(4, **options)
    source = chunk(coder, x[:, :, :256], 512)
    error = []
    for at in (512, 1024):
        monkeypatch.setattr(coder, "_position", lambda keys, at=at: at)
        error.append(float((read(coder, coder.pack([source]), source) - source).norm() / source.norm()))
    assert error[0] < error[1] < 0.2


def test_damaged_and_forged_chunks_are_refused(made):
    options, x = made
    coder = StoredChunkCoder(2, **options)
    source = chunk(coder, x[:, :, :256], 256)
    packed = coder.pack([source])
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        changed = packed.clone()
        changed[int(torch.randint(len(packed), (), generator=generator))] ^= 5
        with pytest.raises(CacheError, match=r"damaged|another recipe|not a chunk"):
            read(coder, changed, source)
    for length in (0, 15, len(packed) // 2, len(packed) - 1):
        with pytest.raises(CacheError, match=r"has .* bytes, got"):
            read(coder, packed[:length], source)
    refused = 0
    for _ in range(100):  # with a correct checksum: refused, or other finite tokens
        body = packed[HEADER.size :].clone()
        body[int(torch.randint(200, (), generator=generator))] ^= 5
        try:
            found = read(coder, torch.cat([header(coder._what([source.shape]), body), body]), source)
            assert found.isfinite().all()
        except CacheError:
            refused += 1
    assert refused > 20


def test_refusals(made, tmp_path):
    options, x = made
    coder = StoredChunkCoder(2, **options)
    source = chunk(coder, x[:, :, :64], 256)
    packed = coder.pack([source])
    other = tmp_path / "other"
    other.mkdir()
    for changed in (StoredChunkCoder(4, **options), StoredChunkCoder(2, **stored_model(other, seed=1)[0])):
        with pytest.raises(CacheError, match="another recipe, calibration"):
            read(changed, torch.cat([packed] * 2), source)
    with pytest.raises(UserError, match=r"storage=0.1 is not allowed; give 0.5 to 8"):
        StoredChunkCoder(0.1, **options)
    with pytest.raises(UserError, match="are not the shapes of a chunk of this model"):
        coder.size([(2, 2, 256, 128)])
    with pytest.raises(UserError, match="there is no calibration at"):
        StoredChunkCoder(2, options["model"], tmp_path / "none")
    with pytest.raises(UserError, match="no room for its first tokens"):
        StoredChunkCoder(0.5, **options).pack([chunk(coder, x[:, :, :8], 0)])
