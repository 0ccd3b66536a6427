"""Storage files: what they hold, what loads from them, and that damaged and forged ones are refused.

For more of the latter run `python tests/hf/test_stored.py 3000 [seed]`.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path += map(str, Path(__file__).resolve().parents[1].glob("**/"))  # as under pytest

import forged
import tersekv
from conftest import build, prompt
from tersekv.cache import tensor_file
from tersekv.calibration import find
from tersekv.calibration.calibrate import Corpus
from tersekv.calibration.storage_basis import NAME, basis_on
from tersekv.errors import UserError
from tersekv.hf.cache import CompressedCache
from tersekv.hf.stored import StoredFile
from tersekv.models.fingerprint import fingerprint

TOKENS = 600
MODELS = ("llama", "gemma3")  # full attention, and sliding windows beside it


@torch.no_grad()
def read(model: Any, tokens: int = TOKENS) -> CompressedCache:
    """Return an exact cache that has read a prompt."""
    cache = CompressedCache(model, "exact")
    with tersekv.compress(model, cache):
        model(prompt(tokens), past_key_values=cache)
    return cache


def tokens_of(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [layer.store.decoded(torch.float32) for layer in cache.layers]


def errors(one: Any, other: Any) -> list[float]:
    """Return the relative squared errors of keys and values of all layers."""
    pairs = zip(tokens_of(one), tokens_of(other), strict=True)
    held = [(a, b[:, :, -a.shape[2] :]) for x, y in pairs for a, b in zip(x, y, strict=True)]
    return [float((a - b).square().sum() / a.square().sum()) for a, b in held]


@pytest.fixture(params=MODELS)
def stored(request, models, tmp_path) -> tuple[Any, CompressedCache, Path]:
    model = models[request.param]
    cache = read(model)
    cache.save(tmp_path / "a.store", prompt(TOKENS), storage=2)
    return model, cache, tmp_path / "a.store"


def test_a_file_without_a_calibration_warns(models, tmp_path):
    with pytest.warns(UserWarning, match="calibrate --storage"):
        read(models["llama"]).save(tmp_path / "a.store", storage=2)


def test_errors_fall_with_the_rate(stored):
    model, cache, path = stored
    sizes, means = [], []
    for rate in (1, 2, 4, 8):
        cache.save(path, prompt(TOKENS), storage=rate)
        sizes.append(path.stat().st_size)
        means.append(max(errors(cache, CompressedCache.load(path, model, recipe="exact"))))
    assert sizes == sorted(sizes)
    assert means == sorted(means, reverse=True)
    assert means[-1] < 2e-4


def test_first_tokens_are_exact_and_last_ones_nearly(stored):
    """Steps of the last tokens are 4 times finer, and those of the tokens before them up to 2.8 times."""
    model, cache, path = stored
    cache.save(path, prompt(TOKENS), storage=4)
    loaded = CompressedCache.load(path, model, prompt(TOKENS), recipe="exact")
    assert loaded.get_seq_length() == TOKENS
    for (keys, values), (k, v) in zip(tokens_of(cache), tokens_of(loaded), strict=True):
        for a, b in ((keys, k), (values, v)):
            assert a.shape[2] < TOKENS or torch.equal(a[:, :, :4], b[:, :, :4])
            squares = (a - b[:, :, -a.shape[2] :])[:, :, 4:].square().mean((0, 1, 3))
            assert len(squares) < 256 or 3 * squares[-128:].mean() < squares[:-256].mean()


@pytest.mark.parametrize("recipe", ["kivi:bits=4", "default", "window:recent=16+kvquant:calibration=prompt"])
def test_it_loads_into_any_recipe(stored, recipe):
    model, cache, path = stored
    cache.save(path, prompt(TOKENS), storage=8)
    loaded = CompressedCache.load(path, model, recipe=recipe)
    straight = CompressedCache(model, recipe)
    with torch.no_grad(), tersekv.compress(model, straight):
        model(prompt(TOKENS), past_key_values=straight)
    assert [layer.store.packed_tokens for layer in loaded.layers] == [x.store.packed_tokens for x in straight.layers]
    with torch.no_grad(), tersekv.compress(model, loaded):
        out = model(prompt(3, seed=1), past_key_values=loaded)
    assert out.logits.isfinite().all()
    assert loaded.get_seq_length() == TOKENS + 3


def test_a_short_prompt_is_exact(llama, tmp_path):
    cache = read(llama, 100)
    cache.save(tmp_path / "a", storage=1)
    assert errors(cache, CompressedCache.load(tmp_path / "a", llama, recipe="exact")) == [0.0] * 2 * len(cache.layers)


def test_a_page_can_be_read_alone(stored):
    """Only its own tensors are mapped and checked; its tokens are those of the whole file."""
    model, _, path = stored
    whole = tokens_of(CompressedCache.load(path, model, recipe="exact"))
    said, tensors, _ = tensor_file.read(path, lambda name: name.endswith(".1") or name[:5] in ("bases", "table"))
    assert not any(name.startswith("exact.") for name in tensors)
    found = StoredFile(CompressedCache(model, "exact"), said, tensors).page(1)
    for index, (keys, values) in found.items():
        n, held = keys.shape[2], whole[index][0].shape[2]
        last = TOKENS - 128
        at = held - TOKENS + last - n
        assert torch.equal(whole[index][0][:, :, at : at + n], keys.half().float())
        assert torch.equal(whole[index][1][:, :, at : at + n], values.half().float())
    assert found


def test_with_a_calibration(llama, tmp_path):
    """The file has no bases; without the calibration that made it, it is refused."""
    corpus = Corpus("a test", "0" * 64, torch.cat([prompt(200, seed=s) for s in range(8)]), 0)
    place = find.profile_place(find.default_folder(fingerprint(llama)), NAME)
    cache = read(llama)
    cache.save(tmp_path / "own", storage=4)
    basis_on(llama, corpus, 1, lambda done, of: None).save(place)
    try:
        cache.save(tmp_path / "a", storage=4)
        said, tensors, _ = tensor_file.read(tmp_path / "a")
        assert said["storage"]["bases"] == "calibration"
        assert not any(name.startswith("bases.") for name in tensors)
        assert max(errors(cache, CompressedCache.load(tmp_path / "a", llama, recipe="exact"))) < 0.02
    finally:
        place.unlink()
    with pytest.raises(UserError, match=r"needs the model's storage calibration \w+, and this machine has none"):
        CompressedCache.load(tmp_path / "a", llama, recipe="exact")
    CompressedCache.load(tmp_path / "own", llama, recipe="exact")


def test_refusals(llama, models, tmp_path):
    cache, path = read(llama, 300), tmp_path / "a"
    for rate in (0.0, 9.0):
        with pytest.raises(UserError, match=r"storage=\d is not allowed; give 0.1 to 8 bits per number"):
            cache.save(path, storage=rate)
    batch = CompressedCache(llama, "exact")
    with torch.no_grad(), tersekv.compress(llama, batch):
        llama(prompt(300, 2), past_key_values=batch)
    with pytest.raises(UserError, match="a storage file holds one sequence, and the cache has 2"):
        batch.save(path, storage=2)
    evicting = CompressedCache(llama, "h2o:budget=64,recent=16+kivi:bits=4")
    with torch.no_grad(), tersekv.compress(llama, evicting):
        llama(prompt(300), past_key_values=evicting)
    with pytest.raises(UserError, match="evicts tokens, and a storage file holds them all"):
        evicting.save(path, storage=2)
    cache.save(path, prompt(300), storage=2)
    with pytest.raises(UserError, match="must begin with the 300 tokens"):
        CompressedCache.load(path, llama, prompt(300, seed=1))
    with pytest.raises(UserError, match="another architecture"):
        CompressedCache.load(path, models["gemma3"])
    cache.save(path, prompt(300))
    with pytest.raises(UserError, match=r"holds a cache packed with exact, not with kivi:bits=2: leave the recipe out"):
        CompressedCache.load(path, llama, recipe="kivi:bits=2")


def outcome(model: Any, path: Path) -> str:
    """Return "loaded" as a cache of finite tokens, "refused" in one sentence that names the file, or another error."""
    try:
        cache = CompressedCache.load(path, model, recipe="exact")
    except UserError as error:
        said = str(error)
        return "refused" if str(path) in said and "\n" not in said and len(said) < len(str(path)) + 500 else said
    assert all(bool(x.isfinite().all()) for both in tokens_of(cache) for x in both)
    return "loaded"


def damaged(model: Any, path: Path, seed: int, count: int) -> Counter[str]:
    """Flip bits of a file, or cut it."""
    data, draw, other = path.read_bytes(), random.Random(seed), path.with_name("damaged")
    found: Counter[str] = Counter()
    for _ in range(count):
        at = draw.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :]
        other.write_bytes(data[:at] if draw.random() < 0.2 else flipped)
        found[outcome(model, other)] += 1
    return found


def forgeries(model: Any, path: Path, seed: int, count: int) -> Counter[str]:
    """Change metadata, tensors or bytes of streams, and compute all digests again."""
    said, tensors = forged.read(path)
    other, draw = path.with_name("forged"), random.Random(seed)
    found: Counter[str] = Counter()
    for what, changed, held in forged.mutants(said, tensors, seed, count // 2):
        tensor_file.write(other, held, changed)
        found[outcome(model, other)] += 1
        assert what
    names = [name for name, x in tensors.items() if x.dtype == torch.uint8 and x.numel()]
    for _ in range(count - count // 2):
        name = draw.choice(names)
        stream = tensors[name].clone()
        at = draw.randrange(len(stream))
        stream[at : at + draw.choice([1, 1, 4])] ^= draw.randrange(1, 256)
        tensor_file.write(other, {**tensors, name: stream[: draw.choice([len(stream), at])]}, said)
        found[outcome(model, other)] += 1
    return found


@pytest.mark.parametrize("name", MODELS)
def test_damaged_and_forged_files(models, name, tmp_path, monkeypatch):
    """All damaged ones are refused. A forged one is refused, or its streams are those of other tokens."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    read(models[name], 400).save(tmp_path / "a", prompt(400), storage=2)
    assert damaged(models[name], tmp_path / "a", 0, 20) == {"refused": 20}
    found = forgeries(models[name], tmp_path / "a", 0, 40)
    assert found.keys() <= {"refused", "loaded"}
    assert found["refused"] > 20


if __name__ == "__main__":
    os.fsync = lambda handle: None
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    place = Path("/tmp/stored-forgeries")
    place.mkdir(exist_ok=True)
    for name in MODELS:
        network = build(name)
        read(network, 400).save(place / "a", prompt(400), storage=2)
        print(name, "damaged", dict(damaged(network, place / "a", seed, count // 4)))
        print(name, "forged", dict(forgeries(network, place / "a", seed, count // 4)))
