"""The calibration file: its binding to a model, the search for it, and an error for each fault."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import tersekv
from conftest import HEAD, MODELS, SHAPE, build, prompt
from tersekv import UserError
from tersekv.calibration.calibrate import Calibrator, Corpus
from tersekv.calibration.calibration import ENTRY, Calibration
from tersekv.calibration.find import calibration_for, default_folder, place
from tersekv.calibration.needs import calibrated_part, needs_corpus
from tersekv.hf.simulate import SimulatedCache
from tersekv.models.fingerprint import architecture, fingerprint
from tersekv.recipe import Recipe

RECIPE = Recipe.parse("kvquant:bits=2")


@pytest.fixture(scope="module")
def made(models, tmp_path_factory) -> Path:
    """Calibrate the llama for `RECIPE`."""
    folder = tmp_path_factory.mktemp("calibration")
    corpus = Corpus("random", "0" * 64, prompt(64, batch=2), 3)
    (found,) = Calibrator(models["llama"], [RECIPE], corpus, work=folder / "work").run()
    found.save(folder / "made.safetensors")
    return folder / "made.safetensors"


pytestmark = pytest.mark.usefixtures("empty_cache")


# ---------------------------------------------------------------- fingerprints


def test_fingerprint_depends_on_weights_and_architecture(llama) -> None:
    mark = fingerprint(llama)
    assert fingerprint(build("llama")) == mark
    assert architecture(build("llama").config) == architecture(llama.config)
    assert len({fingerprint(model) for model in (llama, build("qwen3"), build("mistral"))}) == 3
    for name in ("model.layers.2.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        changed = build("llama")
        with torch.no_grad():
            changed.get_parameter(name).mul_(1.02)
        assert fingerprint(changed) != mark, name
        assert architecture(changed.config) == architecture(llama.config)
    rotated = tf.LlamaConfig(**SHAPE, **HEAD, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert architecture(rotated) != architecture(llama.config)


def test_fingerprint_does_not_depend_on_the_dtype() -> None:
    model = build("llama").to(torch.bfloat16)
    assert fingerprint(model.float()) == fingerprint(model.to(torch.bfloat16))
    assert fingerprint(build("llama").to(torch.bfloat16)) == fingerprint(build("llama"))


# ---------------------------------------------------------------- recipes


def test_calibrated_part_is_canonical() -> None:
    same = ["kvquant", "kvquant:bits=3", "window:sinks=1+kvquant:outliers=0.01,bits=3", "kvquant:pre_rope=true"]
    assert len({calibrated_part(Recipe.parse(r)) for r in same}) == 1
    assert len({place(Path(), Recipe.parse(r)) for r in same}) == 1
    others = ["kvquant:bits=2", "kvquant:cap=3", "kvquant/kivi", "kvquant:pre_rope=false", "kvquant;0=exact"]
    assert len({place(Path(), Recipe.parse(r)) for r in ["kvquant", *others]}) == 6
    assert place(Path("a"), RECIPE).name.startswith("kvquant_bits=2-")


def test_recipes_that_need_a_corpus(models) -> None:
    for recipe, needed in [("kvquant", True), ("kivi", False), ("qjl", False), ("kivi/kvquant", True)]:
        assert needs_corpus(Recipe.parse(recipe), models["gemma3"].config) is needed
    assert not needs_corpus(Recipe.parse("kvquant;0-2=exact"), models["llama"].config)


# ---------------------------------------------------------------- the file


def test_save_and_load(made: Path, tmp_path: Path) -> None:
    found = Calibration.load(made)
    assert found.path == made
    assert (found.made.samples, found.made.length, found.made.seed, found.made.sinks) == (2, 64, 3, 1)
    assert found.made.corpus == "random"
    assert found.made.tersekv == tersekv.__version__
    assert found.tensors["layers.0.keys.lower"].shape == (1, 2, 32)
    assert found.tensors["layers.2.values.table"].shape == (1, 4)
    found.save(tmp_path / "new" / "again.safetensors")
    assert (tmp_path / "new" / "again.safetensors").read_bytes() == made.read_bytes()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["again.safetensors"]


def rewritten(made: Path, path: Path, **changes: object) -> Path:
    """Return a copy with a changed header."""
    from safetensors import safe_open

    with safe_open(made, framework="pt") as file:
        said = json.loads(file.metadata()[ENTRY])
    for name, value in changes.items():
        said.pop(name) if value is None else said.update({name: value})
    save_file(load_file(made), path, {ENTRY: json.dumps(said)})
    return path


def test_wrong_files(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrong.safetensors"
    with pytest.raises(UserError, match=r"there is no calibration at .*; make one with `tersekv calibrate`"):
        Calibration.load(path)
    path.write_bytes(made.read_bytes()[:-100])
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        Calibration.load(path)
    data = bytearray(made.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged: the hash of its contents differs"):
        Calibration.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="a safetensors file, but not a calibration"):
        Calibration.load(path)
    save_file({"x": torch.zeros(1)}, path, {ENTRY: "{"})
    with pytest.raises(UserError, match="its metadata is not readable"):
        Calibration.load(path)
    with pytest.raises(UserError, match="has format 0; this version reads format 2"):
        Calibration.load(rewritten(made, path, format=0))
    with pytest.raises(UserError, match="unexpected fields"):
        Calibration.load(rewritten(made, path, corpus=None))


def test_a_flip_anywhere_in_the_header_is_noticed(made: Path, tmp_path: Path) -> None:
    """The header holds the metadata, and the names and shapes of tensors."""
    data, path = made.read_bytes(), tmp_path / "flipped.safetensors"
    for i in range(8 + int.from_bytes(data[:8], "little")):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(UserError, match=r"calibrate again|not a calibration"):
            Calibration.load(path)


def test_bound_to_recipe_and_model(llama, models, made: Path) -> None:
    with pytest.raises(UserError, match=r"made for recipe '.*bits=2.*', not for '.*bits=4"):
        tersekv.CompressedCache(llama.config, "kvquant:bits=4", calibration=made)
    with pytest.raises(UserError, match="another architecture than this qwen3"):
        tersekv.CompressedCache(models["qwen3"].config, RECIPE, calibration=made)
    other = build("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.v_proj.weight.add_(0.1)
    tersekv.CompressedCache(other.config, RECIPE, calibration=made)  # a config has no weights
    with pytest.raises(UserError, match="a model with other weights"), tersekv.compress(other, RECIPE, made):
        pass
    found = Calibration.load(made)
    some = {name: t for name, t in found.tensors.items() if name != "layers.1.keys.table"}
    with pytest.raises(UserError, match="lacks tensors for the keys of layer 1"):
        tersekv.CompressedCache(llama.config, RECIPE, dataclasses.replace(found, tensors=some))


# ---------------------------------------------------------------- use


def test_missing_calibration_says_what_to_do(llama) -> None:
    said = (
        r"make one with `tersekv calibrate --model MODEL --recipe 'kvquant:bits=2'`, which later runs find \(or "
        r"give calibration=FILE\), or use 'kvquant:bits=2,calibration=prompt', which is fitted on the prompt"
    )
    for use in (tersekv.CompressedCache, SimulatedCache):
        with pytest.raises(UserError, match=said):
            use(llama.config, RECIPE)
    with pytest.raises(UserError, match=said), tersekv.compress(llama, RECIPE):
        pass
    assert llama.config._attn_implementation != "tersekv"


def test_file_folder_object_and_default_place(llama, made: Path, tmp_path: Path) -> None:
    found = Calibration.load(made)
    found.save(place(tmp_path, RECIPE))
    assert calibration_for(llama, "kivi") is None
    for given in (made, str(made), tmp_path, found):
        learnt = calibration_for(llama, RECIPE, given)
        assert learnt is not None
        assert learnt.digest == found.digest
        plan = tersekv.CompressedCache(llama.config, RECIPE, given).layers[2].plan
        assert torch.equal(plan.keys.fitted["table"], found.tensors["layers.2.keys.table"])
    found.save(place(default_folder(fingerprint(llama)), RECIPE))
    assert calibration_for(llama, RECIPE).digest == found.digest
    with pytest.raises(UserError, match="there is no calibration at"):
        calibration_for(llama, "kvquant:bits=5", tmp_path)


def test_generation_and_simulation_use_it(llama, made: Path) -> None:
    ids, changed = prompt(300), Calibration.load(made)
    zeros = {name: torch.zeros_like(t) for name, t in changed.tensors.items()}
    changed = dataclasses.replace(changed, tensors=zeros)
    logits = []
    for calibration in (made, changed):
        with tersekv.compress(llama, RECIPE, calibration), torch.no_grad():
            out = llama(input_ids=ids)
            held = out.past_key_values.footprint()
            assert held.parts["tables"] >= 3 * (2 * 2 * 32 * 4 + 2 * 4 * 4)
            logits.append(llama(input_ids=ids[:, :1], past_key_values=out.past_key_values).logits)
        with torch.no_grad():
            cache = SimulatedCache(llama.config, RECIPE, 1, calibration)
            logits.append(llama(input_ids=ids, past_key_values=cache, use_cache=True).logits)
    assert not torch.allclose(logits[0], logits[2], atol=1e-4)
    assert not torch.allclose(logits[1], logits[3], atol=1e-4)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "deepseek_v3"])
def test_every_architecture(models, name: str, tmp_path: Path) -> None:
    """Calibrate and generate; some layers have a sliding window, and some models two RoPE types."""
    model, recipe = models[name], "window:sinks=1,recent=8+kvquant:bits=4,ranges=online"
    corpus = Corpus("random", "0" * 64, prompt(80), 0)
    (found,) = Calibrator(model, [Recipe.parse(recipe)], corpus, work=tmp_path).run()
    ids = prompt(120, batch=2)
    with tersekv.compress(model, recipe, found), torch.no_grad():
        out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, num_beams=2, return_dict_in_generate=True)
    assert out.sequences.shape == (2, 123)
    assert out.past_key_values.footprint().parts["codes"] > 0


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layers.1.keys.lower", lambda x: x.half(), r"layers.1.keys.lower is float16 .* must be float32 \[1, 2, 32\]"),
        ("layers.1.keys.lower", lambda x: x[:, :1], r"layers.1.keys.lower is float32 \[1, 1, 32\]"),
        ("layers.1.keys.upper", lambda x: x - 1e3, r"layers.1.keys has lower thresholds above upper ones"),
        ("layers.2.values.table", lambda x: x * float("nan"), r"layers.2.values.table has elements from nan"),
        ("layers.2.values.table", lambda x: x.repeat(2, 1), r"layers.2.values.table is float32 \[2, 4\]"),
    ],
)
def test_forged_tensors(llama, made: Path, name: str, change, words: str) -> None:
    """Forged tensors have a correct digest, but the recipe's codecs cannot fit them on this model."""
    found = Calibration.load(made)
    forged = dataclasses.replace(found, tensors=found.tensors | {name: change(found.tensors[name])})
    with pytest.raises(UserError, match=rf"made.safetensors is wrong: {words}.*; calibrate again"):
        tersekv.CompressedCache(llama.config, RECIPE, forged)
    extra = dataclasses.replace(found, tensors=found.tensors | {"layers.0.keys.more": torch.ones(1)})
    with pytest.raises(UserError, match=r"layers.0.keys.more is not a tensor of this codec for keys"):
        tersekv.CompressedCache(llama.config, RECIPE, extra)
    with pytest.raises(UserError, match="unexpected fields"):
        Calibration.load(rewritten(made, made.with_name("other.safetensors"), length="64"))


# ---------------------------------------------------------------- one file for all rates


@pytest.fixture(scope="module")
def trellis(models, tmp_path_factory) -> Calibration:
    """Calibrate the llama for two rates of `trellis`, which give the same file."""
    folder = tmp_path_factory.mktemp("trellis")
    corpus = Corpus("random", "0" * 64, prompt(64, batch=2), 3)
    recipes = [Recipe.parse(text) for text in ("trellis:bits=2", "trellis:allot=layer,bits=3")]
    first, second = Calibrator(models["llama"], recipes, corpus, work=folder / "work").run()
    assert first.digest == second.digest
    assert not [name for name in first.tensors if name.endswith(".bits")]
    return first


def bits_of(calibration: Calibration, recipe: str, config: object) -> dict[tuple[int, str], float]:
    """Return the mean bits per component of each layer and side."""
    plans = calibration.plans(Recipe.parse(recipe), config)
    codecs = [(i, codec) for i, plan in plans.items() for codec in (plan.keys, plan.values)]
    return {(i, codec.side): float(codec.fitted["bits"].float().mean()) for i, codec in codecs}


def test_one_file_serves_all_rates(llama, trellis: Calibration, tmp_path: Path) -> None:
    trellis.save(place(tmp_path, Recipe.parse("trellis")))
    held = []
    for recipe in ("trellis:bits=1.5", "trellis:bits=2", "trellis:bits=3", "trellis:bits=4.5"):
        found = calibration_for(llama, f"window:recent=0,start=0+{recipe}", tmp_path)
        assert found is not None
        cache = tersekv.CompressedCache(llama.config, f"window:recent=0,start=0+{recipe}", found)
        with torch.no_grad():
            llama(prompt(96), past_key_values=cache)
        held.append(cache.footprint().parts["codes"])
        mean = sum(bits_of(found, recipe, llama.config).values()) / (2 * len(cache.layers))
        asked = float(recipe.split("=")[1])
        assert 0.85 * asked <= mean <= asked
    assert held == sorted(set(held))
    assert set(bits_of(trellis, "trellis:allot=layer,bits=3", llama.config).values()) == {3.0}
    of_sides = bits_of(trellis, "trellis:allot=layer,bits=2/trellis:allot=layer,bits=4", llama.config)
    assert {side: bits for (_, side), bits in of_sides.items()} == {"keys": 2.0, "values": 4.0}
    with pytest.raises(UserError, match=r"was made for recipe 'trellis:basis=auto.*, not for 'trellis:basis=channels"):
        trellis.check(Recipe.parse("trellis:basis=channels"), llama.config)


def test_files_of_earlier_versions_serve_all_rates(llama, trellis: Calibration, tmp_path: Path) -> None:
    """They hold the bits of one rate, and its name."""
    plans = trellis.plans(Recipe.parse("trellis:bits=2"), llama.config)
    sides = [(i, codec) for i, plan in plans.items() for codec in (plan.keys, plan.values)]
    bits = {f"layers.{i}.{codec.side}.bits": codec.fitted["bits"] for i, codec in sides}
    recipe = trellis.made.recipe.replace("trellis:", "trellis:allot=model,bits=2,")
    old = Calibration(dataclasses.replace(trellis.made, recipe=recipe), trellis.tensors | bits)
    old.save(tmp_path / "trellis_bits=2-0123abcd.safetensors")
    (tmp_path / "other.safetensors").write_bytes(b"no calibration")
    found = calibration_for(llama, "trellis:bits=3", tmp_path)
    assert found is not None
    assert found.path == tmp_path / "trellis_bits=2-0123abcd.safetensors"
    assert bits_of(found, "trellis:bits=3", llama.config) == bits_of(trellis, "trellis:bits=3", llama.config)


def test_caches_of_one_model_share_tables(llama, trellis: Calibration, tmp_path: Path) -> None:
    """Calibrated tensors are shared by all caches of a file, RoPE's tables by all of one `compress`."""
    trellis.save(tmp_path / "one.safetensors")

    def tables(template) -> tuple[set[int], set[int]]:
        """Return the addresses of all tables and of the calibrated ones, after a prompt."""
        cache = template.empty(llama.config)
        llama(prompt(300), past_key_values=cache)
        stores = [layer.store for layer in cache.layers]
        fitted = [t for store in stores for side in store.sides for t in side.codec.fitted.values()]
        return {t.data_ptr() for store in stores for t in store.tables()}, {t.data_ptr() for t in fitted}

    compressions = [tersekv.compress(llama, "trellis:bits=2", tmp_path / "one.safetensors") for _ in range(2)]
    with torch.no_grad():
        first, again, other = (tables(compressions[i].template) for i in (0, 0, 1))
    for compression in compressions:
        compression.remove()
    assert first == again
    assert first[1] < first[0]
    assert first[1] == other[1]
    before = calibration_for(llama, "trellis", tmp_path / "one.safetensors")
    assert calibration_for(llama, "trellis", tmp_path / "one.safetensors") is before
    os.utime(tmp_path / "one.safetensors", (1, 1))
    assert calibration_for(llama, "trellis", tmp_path / "one.safetensors") is not before  # a changed file is read again


def test_caches_of_one_calibration_share_its_tensors(llama, trellis: Calibration) -> None:
    one, two = (tersekv.CompressedCache(llama.config, "trellis:bits=2", trellis) for _ in range(2))
    held = []
    for cache in (one, two):
        with torch.no_grad():
            llama(prompt(300), past_key_values=cache)
        held.append({name: t.data_ptr() for name, t in cache.layers[0].store.keys.codec.fitted.items()})
    assert held[0] == held[1]
