"""Saved caches: with every method and policy in the folders, a loaded cache continues like the
original."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors import safe_open

import tersekv
from conftest import MODELS, SHAPE, build, prompt
from tersekv.cache import tensor_file
from tersekv.calibration.calibrate import Calibrator, Corpus
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.needs import needs_corpus
from tersekv.codecs import methods
from tersekv.errors import UserError
from tersekv.policies import policies
from tersekv.recipe import Recipe, written

pytestmark = pytest.mark.usefixtures("scored_heads")

KINDS = [
    name + (":" + ",".join(f"{k}={written(v)}" for k, v in options.items()) if options else "")
    for name, method in methods().items()
    for options in ({}, *method.variants)
]
DROPPING = [name for name, policy in policies().items() if policy.drops]
SELECTED = [
    f"{policy}budget=0.5,recent=16+{codec}"
    for policy in (*(f"{name}:" for name in DROPPING), "subgen:variant=stream,")
    for codec in ("kivi:bits=4,pre_rope=true", "kvquant:calibration=prompt")
]
OTHERS = [
    "subgen:variant=stream,budget=0.5,recent=16+polarquant:codebook=online",
    "h2o:budget=0.5,recent=16+exact",
    "h2o:budget=0.5,recent=16,evict=block+exact",
    "h2o:budget=0.8,recent=16,rest=2+trellis:bits=4,calibration=prompt",
    "window:exact=fp32,sinks=0,recent=3+qjl/turboquant:bits=2.5;0=exact;-1=int4",
    "kivi:bits=3,pre_rope=true",
    "window:recent=16+kvarn:tile=64",
    "turboquant:bits=2.5,centre=true",
    "h2o:budget=0.5,recent=16+polarquant:centre=true,calibration=corpus",
    "kvquant:centre=true",
]


@pytest.fixture(scope="module")
def wide():
    """Return a model with heads of 64 channels, which every method supports."""
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE | {"num_hidden_layers": 2}, head_dim=64)).eval()


def calibration(model, recipe: str, folder: Path) -> Calibration | None:
    parsed = Recipe.parse(recipe)
    if not needs_corpus(parsed, model.config):
        return None
    corpus = Corpus("random", "0" * 64, prompt(64, batch=2), 3)
    (found,) = Calibrator(model, [parsed], corpus, work=folder / "work").run()
    return found


@torch.no_grad()
def read(model, cache, steps: list[torch.Tensor], mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the logits of each call."""
    logits = []
    for ids in steps:
        kwargs = {}
        if mask is not None:
            seen = cache.get_seq_length() + ids.shape[1]
            kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), seen)], dim=1)[:, :seen]
        logits.append(model(ids, past_key_values=cache, **kwargs).logits)
    return logits


def singles(n: int, batch: int = 1, seed: int = 1) -> list[torch.Tensor]:
    return list(prompt(n, batch, seed).split(1, dim=1))


def alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


def goes_on_alike(model, cache, path: Path, later: list[torch.Tensor], mask=None) -> None:
    """Check that a loaded cache gives the same logits and bytes as the original, which saving does
    not change."""
    cache.save(path)
    loaded = tersekv.CompressedCache.load(path, model)
    assert loaded.footprint() == cache.footprint()
    loaded.save(path.with_suffix(".again"))
    assert same(path, path.with_suffix(".again"))
    expected = read(model, cache, later, mask)
    got = read(model, loaded, later, mask)
    assert alike(expected, got)
    assert loaded.footprint() == cache.footprint()
    for name, one in (("a", cache), ("b", loaded)):
        one.save(path.with_name(name))
    assert same(path.with_name("a"), path.with_name("b"))


@pytest.mark.parametrize("recipe", [*KINDS, *SELECTED, *OTHERS])
def test_a_loaded_cache_continues_like_the_original(wide, recipe, tmp_path):
    learnt = calibration(wide, recipe, tmp_path)
    with tersekv.compress(wide, recipe, learnt):
        cache = tersekv.CompressedCache(wide.config, recipe, learnt)
        read(wide, cache, [prompt(200), *singles(5)])
        later = [*singles(26, seed=2), prompt(70, seed=3)]  # a block is full after 23
        goes_on_alike(wide, cache, tmp_path / "cache", later)


def test_a_loaded_layer_follows_the_device_of_its_keys(llama, tmp_path, monkeypatch):
    """A model may be distributed over devices."""
    cache = tersekv.CompressedCache(llama, "kivi:bits=4")
    with tersekv.compress(llama, cache), torch.no_grad():
        llama(prompt(200), past_key_values=cache)
    for storage in (None, 8):
        cache.save(tmp_path / "a", storage=storage)
        layer = tersekv.CompressedCache.load(tmp_path / "a", llama, recipe=None if storage is None else "exact").layers[
            0
        ]
        moved: list[torch.device] = []
        monkeypatch.setattr(layer.store, "to", moved.append)
        keys = torch.empty(1, 2, 1, 32, device="meta")
        for _ in range(2):
            layer.pending(keys, keys)
        assert moved == [keys.device]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["kivi:bits=2", "h2o:budget=64,recent=16+polarquant"])
def test_sliding_windows_and_padded_batches(models, name, recipe, tmp_path):
    """Pages with evicted tokens at their front, and rows with their own sinks."""
    model, mask = models[name], torch.ones(2, 330, dtype=torch.long)
    mask[0, :37] = 0
    with tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model.config, recipe)
        read(model, cache, [prompt(330, 2), *singles(100, 2)], mask)
        goes_on_alike(model, cache, tmp_path / "cache", [*singles(40, 2, 2), prompt(50, 2, 3)], mask)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_short_caches_and_rows_that_are_all_padding(llama, tokens, tmp_path):
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :50] = 0
    with tersekv.compress(llama, "kivi:bits=2,pre_rope=true"):
        cache = tersekv.CompressedCache(llama.config, "kivi:bits=2,pre_rope=true")
        read(llama, cache, [prompt(tokens, 2)], mask)
        goes_on_alike(llama, cache, tmp_path / "cache", [prompt(200, 2), *singles(40, 2)], mask)


@pytest.mark.parametrize("recipe", ["kivi:bits=4", "kvquant:calibration=prompt", "turboquant:bits=2.5"])
def test_operations_on_a_loaded_cache(llama, recipe, tmp_path):
    """Rollback into packed pages of the mapped file, row selection, and a reset. The file does not
    change."""
    path = tmp_path / "cache"
    with tersekv.compress(llama, recipe):
        cache = tersekv.CompressedCache(llama.config, recipe)
        read(llama, cache, [prompt(300, 2)])
        cache.save(path)
        before = path.read_bytes()
        loaded = tersekv.CompressedCache.load(path, llama)
        for one in (cache, loaded):
            one.crop(-180)
        assert alike(*(read(llama, one, singles(90, 2)) for one in (cache, loaded)))
        loaded = tersekv.CompressedCache.load(path, llama)
        loaded.batch_select_indices(torch.tensor([1, 1, 0]))
        assert loaded.layers[0].batch_size == 3
        loaded.reset()
        read(llama, loaded, [prompt(250)])
        fresh = tersekv.CompressedCache(llama.config, recipe)
        read(llama, fresh, [prompt(250)])
        assert alike(*(read(llama, one, singles(3)) for one in (fresh, loaded)))
        assert path.read_bytes() == before


def test_a_page_of_the_file_is_not_copied(llama, tmp_path):
    """Full pages stay in the mapped file."""
    with tersekv.compress(llama, "kivi:bits=4"):
        cache = llama(prompt(300)).past_key_values
        cache.save(tmp_path / "cache")
        loaded = tersekv.CompressedCache.load(tmp_path / "cache", llama)
        layer = loaded.layers[0].store
        page = layer.keys.packed.pages[0]
        assert not any(plane.untyped_storage().resizable() for plane in page.planes.values())  # memory of others
        assert layer.recent.keys.untyped_storage().resizable()
        memory = {name: plane.data_ptr() for name, plane in page.planes.items()}
        read(llama, loaded, singles(40))
        assert memory == {name: plane.data_ptr() for name, plane in layer.keys.packed.pages[0].planes.items()}


@torch.no_grad()
def test_a_file_holds_its_calibration(wide, tmp_path):
    """A loaded cache has its recipe and calibration: new caches encode as with the calibration
    itself."""
    recipe = "kvquant:bits=3"
    learnt = calibration(wide, recipe, tmp_path)
    with tersekv.compress(wide, recipe, learnt):
        cache = wide(prompt(200)).past_key_values
        cache.save(tmp_path / "cache")
        expected = read(wide, cache, singles(3))
    loaded = tersekv.CompressedCache.load(tmp_path / "cache", wide)
    with tersekv.compress(wide, loaded):
        again = wide(prompt(200)).past_key_values
        assert again is not loaded
        assert alike(read(wide, again, singles(3)), expected)
        assert alike(read(wide, loaded, singles(3)), expected)
    with pytest.raises(UserError, match="another architecture"), tersekv.compress(build("llama"), loaded):
        pass


@torch.no_grad()
def test_inference_mode_and_other_types(tmp_path):
    model = build("llama").to(torch.bfloat16)
    with tersekv.compress(model, "kivi:bits=4"), torch.inference_mode():
        cache = model(prompt(200)).past_key_values
        cache.save(tmp_path / "cache")
        loaded = tersekv.CompressedCache.load(tmp_path / "cache", model)
    assert loaded.layers[0].store.recent.keys.dtype == torch.bfloat16
    with tersekv.compress(model, "kivi:bits=4"):
        goes_on_alike(model, loaded, tmp_path / "more", singles(40))


# ---------------------------------------------------------------- what a file says, and what does not fit it


@pytest.fixture
def saved(llama, tmp_path) -> Path:
    ids = prompt(200)
    with tersekv.compress(llama, "polarquant"), torch.no_grad():
        llama(ids).past_key_values.save(tmp_path / "cache", ids)
    return tmp_path / "cache"


def test_it_is_a_safetensors_file_with_a_header(llama, saved):
    with safe_open(saved, "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("ids").tolist() == prompt(200).tolist()
    said, size = tensor_file.read_said(saved)
    assert size == saved.stat().st_size
    assert names == set(tensor_file.read(saved).tensors) == set(said["crc32"])
    assert said["recipe"] == "polarquant"
    assert said["cache"]["tokens"] == 200
    assert said["model_type"] == "llama"


def test_another_model_and_another_prompt(llama, models, saved):
    load = tersekv.CompressedCache.load
    with pytest.raises(UserError, match=r"another architecture \(llama\) than this qwen2"):
        load(saved, models["qwen2"])
    other = build("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight[0] *= 2
    with pytest.raises(UserError, match="other weights"):
        load(saved, other)
    longer = torch.cat([prompt(200), prompt(5, seed=9)], dim=1)
    assert load(saved, llama, longer).get_seq_length() == 200
    with pytest.raises(UserError, match="the prompt has 150 tokens and must begin with all 200"):
        load(saved, llama, longer[:, :150])
    longer[0, 17] += 1
    with pytest.raises(UserError, match="differs from token 17 on"):
        load(saved, llama, longer)
    with pytest.raises(UserError, match="holds 1 sequences, and the prompt has 2"):
        load(saved, llama, prompt(200, batch=2))


def test_a_rotation_with_other_values(llama, saved, monkeypatch):
    """As another version of torch might."""
    from tersekv.codecs import polarquant

    make = polarquant.random_rotation
    monkeypatch.setattr(polarquant, "random_rotation", lambda *a: make(*a).flip(0))
    with pytest.raises(UserError, match="other tables, rotations or sketches"):
        tersekv.CompressedCache.load(saved, llama)


def test_unsaveable_caches_are_refused(llama, tmp_path):
    cache = tersekv.CompressedCache(llama.config, "kivi")
    with pytest.raises(UserError, match="the model of this cache is unknown"):
        cache.save(tmp_path / "cache")
    with pytest.raises(UserError, match="the cache is empty"):
        cache.save(tmp_path / "cache", model=llama)
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        cache = llama(prompt(50)).past_key_values
    with pytest.raises(UserError, match=r"holds 1 × 50 tokens, and ids have shape \(1, 40\)"):
        cache.save(tmp_path / "cache", prompt(40))
    with pytest.raises(UserError, match="cannot write"):
        cache.save(tmp_path / "none" / "cache")
    cache.save(tmp_path / "cache", prompt(50)[0])
    cache.save(tmp_path / "cache")
    with pytest.raises(UserError, match="was saved without token ids"):
        tersekv.CompressedCache.load(tmp_path / "cache", llama, prompt(50))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_architecture(models, name, tmp_path):
    """The allowed contents of a file follow from the config, whose shapes are the cache's."""
    cache = tersekv.CompressedCache(models[name].config, "uniform:group=16")
    with tersekv.compress(models[name], "uniform:group=16"):
        read(models[name], cache, [prompt(200), *singles(3)])
        goes_on_alike(models[name], cache, tmp_path / "cache", singles(2))
