"""Calibration at first use: once, on the model's own text, kept, never silent, and refused where it
cannot be."""

from __future__ import annotations

import threading
import warnings

import huggingface_hub
import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

import tersekv
from conftest import HEAD, SHAPE, build, prompt
from tersekv import UserError
from tersekv.calibration import attention_spread, first_use
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.find import calibration_for, default_folder, place
from tersekv.calibration.own_text import own_text
from tersekv.models.fingerprint import fingerprint
from tersekv.recipe import Recipe

RECIPE = "trellis:bits=3"
PARSED = Recipe.parse(RECIPE)


pytestmark = pytest.mark.usefixtures("empty_cache")


def files(folder) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_recipe_calibrates_once(empty_cache, llama) -> None:
    path = place(default_folder(fingerprint(llama)), PARSED)
    with pytest.warns(UserWarning, match=rf"no calibration for '{RECIPE}' yet; it is made once, .*{path.name}.*never"):
        compression = tersekv.compress(llama, RECIPE)
    with compression, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llama.generate(prompt(300), max_new_tokens=4).shape == (1, 304)
        # one file serves them all
        for recipe in ("trellis:bits=2", "trellis:bits=4", "trellis:bits=2.5", "trellis:bits=3;0=exact"):
            tersekv.CompressedCache(llama, recipe)
    assert files(empty_cache) == {path.name}  # neither text nor sums are left
    made = Calibration.load(path).made
    assert (made.corpus, made.samples, made.length) == ("own text", first_use.SAMPLES, first_use.LENGTH)
    assert compression.template.layers[0].plan.keys.fitted["mean"].shape == (1, 2, 32)


def test_the_result_is_that_of_the_text(llama) -> None:
    found = calibration_for(llama, RECIPE)
    text = own_text(llama, first_use.SAMPLES, first_use.LENGTH)
    corpus = first_use.Corpus("own text", "0" * 64, text, 0)
    (wanted,) = first_use.Calibrator(llama, [PARSED], corpus, first_use.SINKS).run()
    assert found is not None
    assert found.digest == wanted.digest


@pytest.mark.parametrize("recipe", ["kvquant", "headkv:budget=0.5+trellis", "trellis;0=kvquant"])
def test_others_are_not_calibrated(empty_cache, llama, recipe: str) -> None:
    with pytest.raises(UserError, match=r"needs a calibration, and .* does not exist: make one with"):
        tersekv.compress(llama, recipe)
    assert not files(empty_cache)


def test_it_can_be_forbidden(empty_cache, llama, monkeypatch) -> None:
    monkeypatch.setenv("TERSEKV_CALIBRATE", "never")
    with pytest.raises(UserError, match=r"TERSEKV_CALIBRATE=never forbids making it now: .*calibration=prompt"):
        tersekv.compress(llama, "trellis:bits=2")
    tersekv.CompressedCache(llama, "trellis:bits=2,calibration=prompt")
    monkeypatch.setenv("TERSEKV_CALIBRATE", "no")
    with pytest.raises(UserError, match="TERSEKV_CALIBRATE=no is not allowed; choose first-use or never"):
        tersekv.compress(llama, "trellis:bits=2")
    assert not files(empty_cache)


def test_a_config_is_not_enough(llama) -> None:
    with pytest.raises(UserError, match="give the model in place of its config, and it is calibrated at first use"):
        tersekv.CompressedCache(llama.config, RECIPE)


def test_models_that_write_no_text(llama) -> None:
    with pytest.raises(UserError, match=r"LlamaModel cannot write a text to calibrate on: .*calibration=prompt"):
        calibration_for(llama.model, RECIPE)


def test_a_folder_that_cannot_be_written(empty_cache, llama) -> None:
    empty_cache.write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory; give another place .* TERSEKV_CACHE$"):
        calibration_for(llama, RECIPE)


def test_a_stopped_run_continues(empty_cache, llama, monkeypatch) -> None:
    wanted = calibration_for(llama, RECIPE)
    place(default_folder(fingerprint(llama)), PARSED).unlink()

    def stop(*args) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first_use.Calibrator, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            calibration_for(llama, RECIPE)
    assert files(empty_cache) == {f"own-text-{first_use.SAMPLES}x{first_use.LENGTH}.ids"}
    monkeypatch.setattr(first_use, "own_text", stop)  # the text is there
    found = calibration_for(llama, RECIPE)
    assert found is not None
    assert wanted is not None
    assert found.digest == wanted.digest


def test_the_warning_says_how_long_and_the_way_out(llama, monkeypatch) -> None:
    monkeypatch.setattr(first_use, "_seconds", lambda model, ids: 0.5 * ids.shape[1])
    text = first_use.SAMPLES * first_use.LENGTH
    minutes = -(-(first_use.PASSES * 0.5 * text + 0.5 * first_use.LENGTH) // 60)
    words = rf"in about {minutes:.0f} min, on .*Ctrl-C stops it, and the next run goes on from there"
    with pytest.warns(UserWarning, match=words) as seen:
        calibration_for(llama, RECIPE)
    assert "use 'trellis:bits=3,calibration=prompt', which needs none; `tersekv calibrate`" in str(seen[0].message)
    with pytest.warns(UserWarning, match="use 'mixed:allot=layer.trellis:bits=2,calibration=prompt', which needs none"):
        calibration_for(llama, "mixed:allot=model+trellis:bits=2,calibration=prompt")


def test_a_text_that_was_begun_goes_on(empty_cache, llama, monkeypatch) -> None:
    wanted = calibration_for(llama, RECIPE)
    place(default_folder(fingerprint(llama)), PARSED).unlink()
    seen = []

    def stop(done) -> None:
        seen.append(done)
        if seen == list(range(1, 21)):
            raise KeyboardInterrupt

    real = own_text
    monkeypatch.setattr(first_use, "own_text", lambda m, s, n, seed, at, *more: real(m, s, n, seed, stop, *more))
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match=r"was stopped; what is done is kept in"):
        calibration_for(llama, RECIPE)
    (name,) = files(empty_cache)
    assert name.endswith(".begun")
    seen.clear()
    found = calibration_for(llama, RECIPE)
    assert seen[0] == 20
    assert files(empty_cache) == {place(default_folder(fingerprint(llama)), PARSED).name}
    assert found is not None
    assert wanted is not None
    assert found.made.corpus_sha256 == wanted.made.corpus_sha256


def test_a_measurement_of_attention_goes_on(empty_cache, llama, monkeypatch) -> None:
    recipe = "mixed:allot=model+trellis:bits=2,calibration=prompt"
    wanted = calibration_for(llama, recipe)
    (path,) = empty_cache.rglob("mixed.safetensors")
    path.unlink()
    read, seen = attention_spread._Reader.read, []

    def stop(self, *args):
        seen.append(args)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return read(self, *args)

    monkeypatch.setattr(attention_spread._Reader, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        calibration_for(llama, recipe)
    assert "mixed.parts" in files(empty_cache)
    found = calibration_for(llama, recipe)
    assert len(seen) == 2 + first_use.SAMPLES - 1
    assert files(empty_cache) == {"mixed.safetensors"}
    assert found is not None
    assert wanted is not None
    assert found.digest == wanted.digest


TEXTS = {"another tensor": {"x": torch.zeros(3)}, "another length": {"ids": torch.zeros(2, 7, dtype=torch.int64)}}


@pytest.mark.parametrize("fault", ["flipped", "cut off", "empty", *TEXTS])
def test_a_damaged_text_is_written_again(empty_cache, llama, monkeypatch, fault) -> None:
    wanted = calibration_for(llama, RECIPE)
    path = place(default_folder(fingerprint(llama)), PARSED)
    path.unlink()
    run = first_use.Calibrator.run
    monkeypatch.setattr(first_use.Calibrator, "run", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        calibration_for(llama, RECIPE)
    (text,) = path.parent.glob("*.ids")
    data = text.read_bytes()
    if fault in TEXTS:
        save_file(TEXTS[fault], text)
    else:
        text.write_bytes({"flipped": data[:-1] + bytes([data[-1] ^ 1]), "cut off": data[:-8], "empty": b""}[fault])
    monkeypatch.setattr(first_use.Calibrator, "run", run)
    found = calibration_for(llama, RECIPE)
    assert files(empty_cache) == {path.name}
    assert found is not None
    assert wanted is not None
    assert found.digest == wanted.digest
    assert found.made.corpus_sha256 == wanted.made.corpus_sha256


def test_two_at_once_calibrate_once(llama, monkeypatch) -> None:
    pytest.importorskip("fcntl")
    written, found = [], []
    monkeypatch.setattr(first_use, "own_text", lambda *a, **k: written.append(1) or own_text(*a, **k))
    threads = [threading.Thread(target=lambda: found.append(calibration_for(llama, RECIPE))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert found[0].digest == found[1].digest


def test_bars_that_are_turned_off(llama) -> None:
    tf.utils.logging.disable_progress_bar()
    try:
        assert calibration_for(llama, RECIPE) is not None
    finally:
        tf.utils.logging.enable_progress_bar()


def test_training_mode_is_restored(monkeypatch) -> None:
    model = build("llama").train()
    modes = []
    monkeypatch.setattr(first_use, "own_text", lambda m, *a, **k: modes.append(m.training) or own_text(m, *a, **k))
    calibration_for(model, RECIPE)
    assert modes == [False]
    assert model.training


def test_own_text() -> None:
    torch.manual_seed(0)
    shape = SHAPE | {"eos_token_id": 5}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**shape, **HEAD)).eval()
    seen: list[int] = []
    ids = own_text(model, 4, 200, progress=seen.append)
    assert ids.shape == (4, 200)
    assert seen == list(range(1, 201))
    assert set(ids[:, 0].tolist()) == {1}
    assert 5 not in ids
    assert len({tuple(row) for row in ids.tolist()}) == 4
    assert torch.equal(ids, own_text(model, 4, 200))
    assert not torch.equal(ids, own_text(model, 4, 200, seed=1))
    model.config.bos_token_id = None
    assert len(set(own_text(model, 4, 2)[:, 0].tolist())) > 1
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="logits hold NaN or Inf"):
        own_text(model, 1, 3)


def test_a_calibration_from_the_hub(empty_cache, llama, tmp_path, monkeypatch) -> None:
    """A repository in the local cache of huggingface_hub."""
    found = calibration_for(llama, RECIPE)
    assert found is not None
    hub, commit = tmp_path / "hub", "0" * 40
    repository = hub / "models--someone--calibrations"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    found.save(place(repository / "snapshots" / commit, PARSED))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    place(default_folder(fingerprint(llama)), PARSED).unlink()
    got = calibration_for(llama, "trellis:bits=2", "someone/calibrations")
    assert got is not None
    assert got.digest == found.digest
    assert not files(empty_cache)
    with pytest.raises(UserError, match=r"no file or folder someone/else, and it is not on the Hub \(.*\): give"):
        calibration_for(llama, "trellis:bits=2", "someone/else")
