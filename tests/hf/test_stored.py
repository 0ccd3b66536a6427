"""Storage files: what they hold, what loads from them, and that damaged and forged ones are refused.

For more of the latter run `python tests/hf/test_stored.py 3000 [seed]`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import random
import sys
import tempfile
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
from tersekv.cli.prompt_cache import add_divergence, info
from tersekv.errors import UserError
from tersekv.hf.cache import CompressedCache
from tersekv.hf.layer import CompressedLayer
from tersekv.hf.stored import StoredFile
from tersekv.models.fingerprint import fingerprint
from tersekv.storage import codec

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


def test_tokens_that_a_window_has_evicted_are_like_the_others(stored, monkeypatch):
    """The file lacks them, and no codec may be fitted on zeros in their place."""
    model, cache, path = stored
    cache.save(path, prompt(TOKENS), storage=8)
    given, append = {}, CompressedLayer.append
    monkeypatch.setattr(CompressedLayer, "append", lambda x, *new: (given.setdefault(x.index, new), append(x, *new))[1])
    loaded = CompressedCache.load(path, model, recipe="exact")
    for index, layer in enumerate(loaded.layers):
        keys, values = given[index]
        missing = TOKENS - cache.layers[index].store.decoded(torch.float32)[0].shape[2]
        own = values[:, :, missing:]
        assert torch.equal(values[:, :, :missing], own[:, :, torch.arange(missing) % own.shape[2]])
        cos, sin = loaded.ropes.known(index).angles(0, TOKENS).cos_sin()
        plain = loaded.ropes.known(index).invert(keys, cos, sin)
        own = plain[:, :, missing:]
        torch.testing.assert_close(plain[:, :, :missing], own[:, :, torch.arange(missing) % own.shape[2]])
        assert layer.store.num_tokens == TOKENS


def test_pieces_follow_each_other(stored, monkeypatch):
    model, _, path = stored
    whole = tokens_of(CompressedCache.load(path, model, recipe="exact"))
    monkeypatch.setattr("tersekv.hf.stored.PIECE", 1)
    pieces = CompressedCache.load(path, model, recipe="exact")
    assert {layer.first_tokens for layer in pieces.layers} == {TOKENS}
    for one, other in zip(whole, tokens_of(pieces), strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=0)


def test_policies_that_need_queries_are_refused(stored):
    model, _, path = stored
    with pytest.raises(UserError, match="chooses by the prompt's queries"):
        CompressedCache.load(path, model, recipe="snapkv:budget=64+exact")


def test_codes_of_all_sixteen_bits_are_counted():
    codes = torch.tensor([[-20000, 20000, 0, 0]], dtype=torch.int16)
    assert codec._bits(codes) == pytest.approx(6.0)


def test_a_short_prompt_is_exact(llama, tmp_path):
    cache = read(llama, 100)
    cache.save(tmp_path / "a", storage=1)
    assert errors(cache, CompressedCache.load(tmp_path / "a", llama, recipe="exact")) == [0.0] * 2 * len(cache.layers)


def test_the_measured_loss_stays_with_the_tokens(stored):
    model, _, path = stored
    assert CompressedCache.load(path, model).stored_kl is None
    add_divergence(path, 0.25)
    loaded = CompressedCache.load(path, model, recipe="kivi:bits=4")
    loaded.save(path.with_name("packed"))
    again = CompressedCache.load(path.with_name("packed"), model)
    assert loaded.stored_kl == again.stored_kl == 0.25
    again.reset()
    assert again.stored_kl is None


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
    padded = CompressedCache(llama, "kivi:bits=4")
    mask = torch.ones(1, 300, dtype=torch.long)
    mask[0, :9] = 0
    with torch.no_grad(), tersekv.compress(llama, padded):
        llama(prompt(300), attention_mask=mask, past_key_values=padded)
    with pytest.raises(UserError, match="the prompt was padded"):
        padded.save(path, storage=2)
    evicting = CompressedCache(llama, "h2o:budget=64,recent=16+kivi:bits=4")
    with torch.no_grad(), tersekv.compress(llama, evicting):
        llama(prompt(300), past_key_values=evicting)
    with pytest.raises(UserError, match="evicts tokens, and a storage file holds them all"):
        evicting.save(path, storage=2)
    sliding = build("mistral")
    sliding.config.max_position_embeddings = 512
    with pytest.raises(UserError, match="holds at most the model's context of 512 tokens, not 600"):
        read(sliding, 600).save(path, storage=4)
    cache.save(path, prompt(300), storage=2)
    with pytest.raises(UserError, match="must begin with the 300 tokens"):
        CompressedCache.load(path, llama, prompt(300, seed=1))
    with pytest.raises(UserError, match="another architecture"):
        CompressedCache.load(path, models["gemma3"])
    cache.save(path, prompt(300))
    with pytest.raises(UserError, match=r"holds a cache packed with exact, not with kivi:bits=2: leave the recipe out"):
        CompressedCache.load(path, llama, recipe="kivi:bits=2")


@pytest.fixture(params=MODELS)
def attacked(request, models, tmp_path, monkeypatch) -> tuple[Any, Path, Any]:
    """Return a model, a storage file, and the tokens that it holds."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return attack_target(models[request.param], tmp_path)


def attack_target(model: Any, folder: Path) -> tuple[Any, Path, Any]:
    read(model, 400).save(folder / "a", prompt(400), storage=2)
    add_divergence(folder / "a", 0.25)
    return model, folder / "a", tokens_of(CompressedCache.load(folder / "a", model, recipe="exact"))


def outcome(model: Any, path: Path, wanted: Any) -> str:
    """Return the outcome of loading a file: "refused", "equal" tokens to the wanted ones, or "other" finite ones.

    A refusal is one sentence that names the file. `prompt-cache info` reads it, too.
    """
    for as_json in (True, False):
        with contextlib.suppress(UserError), contextlib.redirect_stdout(io.StringIO()):
            info(path, as_json)
    try:
        found = tokens_of(CompressedCache.load(path, model, recipe="exact"))
    except UserError as error:
        said = str(error)
        assert str(path) in said
        assert said.isprintable()
        assert len(said) < len(str(path)) + 500
        return "refused"
    pairs = [(a, b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)]
    assert all(a.shape == b.shape and bool(a.isfinite().all()) for a, b in pairs)
    return "equal" if all(torch.equal(a, b) for a, b in pairs) else "other"


def damage(data: bytes, draw: random.Random) -> bytes:
    """Return a file with flipped, missing, inserted, overwritten, repeated or exchanged bytes."""
    first, middle, last = sorted(draw.sample(range(len(data) + 1), 3))
    noise = draw.randbytes(draw.choice([1, 8, 64]))
    at = draw.randrange(len(data))
    return draw.choice(
        [
            data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :],
            data[:at],
            data[:first] + data[last:],
            data[:at] + noise + data[at:],
            (data[:at] + noise + data[at + len(noise) :])[: len(data)],
            data[:last] + data[first:],
            data[:first] + data[middle:last] + data[first:middle] + data[last:],
        ]
    )


def damaged(model: Any, path: Path, wanted: Any, seed: int, count: int) -> Counter[str]:
    """Damage a file without computing digests again."""
    data, draw, other = path.read_bytes(), random.Random(seed), path.with_name("damaged")
    found: Counter[str] = Counter()
    while found.total() < count:
        if (changed := damage(data, draw)) != data:
            other.write_bytes(changed)
            found[outcome(model, other, wanted)] += 1
    return found


def forged_header(data: bytes, draw: random.Random) -> bytes:
    """Return a file whose header has changed text and the digest of it."""
    start = 8 + int.from_bytes(data[:8], "little")
    head = data[8:start].replace(tensor_file._digest(data[:start]), tensor_file.NO_DIGEST.encode(), 1)
    at = draw.randrange(24, len(head.rstrip()))
    some = draw.choice(
        [b"", b"9", b"-", b"1e308", b"null", b"[" * 9999, b'"', b",", b"}", bytes([draw.randrange(256)])]
    )
    head = head[:at] + some + head[at + draw.choice([0, 1, 1, 4]) :]
    head = len(head).to_bytes(8, "little") + head
    digest = hashlib.sha256(head).hexdigest().encode()
    return head.replace(tensor_file.NO_DIGEST.encode(), digest, 1) + data[start:]


def forgeries(model: Any, path: Path, wanted: Any, seed: int, count: int) -> Counter[str]:
    """Change metadata, tensors, bytes of streams or the header's text, and compute all digests again."""
    said, tensors = forged.read(path)
    other, draw, data = path.with_name("forged"), random.Random(seed), path.read_bytes()
    found: Counter[str] = Counter()
    for what, changed, held in forged.mutants(said, tensors, seed, count // 3):
        tensor_file.write(other, held, changed)
        found[outcome(model, other, wanted)] += 1
        assert what
    names = [name for name, x in tensors.items() if x.dtype == torch.uint8 and x.numel()]
    for _ in range(count // 3):
        name = draw.choice(names)
        stream = tensors[name].clone()
        at = draw.randrange(len(stream))
        stream[at : at + draw.choice([1, 1, 4])] ^= draw.randrange(1, 256)
        tensor_file.write(other, {**tensors, name: stream[: draw.choice([len(stream), at])]}, said)
        found[outcome(model, other, wanted)] += 1
    while found.total() < count:
        other.write_bytes(forged_header(data, draw))
        found[outcome(model, other, wanted)] += 1
    return found


def test_damaged_files_are_refused(attacked):
    assert damaged(*attacked, seed=0, count=35) == {"refused": 35}


def test_forged_files_are_refused_or_hold_other_tokens(attacked):
    """Digests need no key, so somebody who computes them again can write other tokens."""
    found = forgeries(*attacked, seed=0, count=45)
    assert found["refused"] > 25


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"storage": {}}, "lacks the metadata of a cache file: storage lacks bases"),
        ({"recipe": "kivi:bits=4"}, "recipe is 'kivi:bits=4', and must be storage"),
        ({"storage.rate": 99}, "storage=99 is not allowed"),
        ({"cache.bytes": 5}, "cache.bytes must be"),
        ({"cache.ratio_bf16": 1e308}, "cache.ratio_bf16"),
        *(({"kl": kl}, "kl is .*, and must be a finite number of at least 0") for kl in (-1, math.nan, "0", None)),
    ],
)
def test_false_metadata_is_refused(llama, tmp_path, changed, words):
    read(llama, 300).save(tmp_path / "a", storage=2)
    said, tensors = forged.read(tmp_path / "a")
    for place, value in changed.items():
        *path, key = place.split(".")
        forged.at(said, tuple(path))[key] = value
    tensor_file.write(tmp_path / "b", tensors, said)
    with pytest.raises(UserError, match=words):
        CompressedCache.load(tmp_path / "b", llama)
    with contextlib.suppress(UserError):
        info(tmp_path / "b")


if __name__ == "__main__":
    os.fsync = lambda handle: None
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            target = attack_target(build(name), Path(folder))
            print(name, "damaged", dict(damaged(*target, seed, count // 4)))
            print(name, "forged", dict(forgeries(*target, seed, count // 4)))
