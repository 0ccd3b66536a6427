"""Calibration: equal results for all ways to run and stop it, shared codecs, and errors."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import prompt
from tersekv import UserError
from tersekv.calibration import calibrate
from tersekv.calibration.calibrate import Calibrator, Corpus
from tersekv.calibration.gradients import Source, layer_gradients
from tersekv.codecs.kvquant import KVQuant
from tersekv.recipe import Recipe

CORPUS = Corpus("random", "0" * 64, prompt(64, batch=3), 0)


def calibrator(model, work: Path, *recipes: str, workers: int = 1, corpus: Corpus = CORPUS) -> Calibrator:
    return Calibrator(model, [Recipe.parse(r) for r in recipes], corpus, sinks=1, workers=workers, work=work)


def test_fitted_on_all_samples_with_their_gradients(llama, tmp_path) -> None:
    (found,) = calibrator(llama, tmp_path, "kvquant:bits=2").run()
    source = Source(1, "keys", True)
    parts = [layer_gradients(llama, ids[None], [source], sinks=1) for ids in CORPUS.windows]
    x, gradient = (torch.cat([p[f"{source.name}.{what}"] for p in parts], dim=2) for what in ("x", "gradient"))
    assert x.shape == (1, 2, 3 * 63, 32)
    wanted = KVQuant(2, pre_rope=True).fit(x, gradient.float().square()).fitted
    unweighted = KVQuant(2, pre_rope=True).fit(x).fitted
    assert not torch.equal(wanted["table"], unweighted["table"])
    for name in ("lower", "upper", "table"):
        assert torch.equal(found.tensors[f"layers.1.keys.{name}"], wanted[name])
    names = {f"layers.{i}.{part}" for i in range(3) for part in ("keys.lower", "keys.upper", "keys.table")}
    assert set(found.tensors) == names | {f"layers.{i}.values.table" for i in range(3)}


def test_workers_give_the_same_result(llama, tmp_path) -> None:
    recipes = ("kvquant:bits=2,q_norm=true", "kvquant:bits=3")
    alone = calibrator(llama, tmp_path / "1", *recipes).run()
    run = calibrator(llama, tmp_path / "2", *recipes, workers=2)
    together = run.run()
    assert run.peak_worker_bytes > 0 or not Path("/proc/self/status").exists()
    assert [a.digest for a in alone] == [b.digest for b in together]
    assert alone[0].digest != alone[1].digest


@pytest.mark.parametrize(("phase", "at"), [("samples", 2), ("layers", 3)])
def test_stopped_run_continues(llama, tmp_path, monkeypatch, phase: str, at: int) -> None:
    (wanted,) = calibrator(llama, tmp_path / "whole", "kvquant").run()

    def stop(now: str, done: int, total: int) -> None:
        if (now, done) == (phase, at):
            raise KeyboardInterrupt

    run = calibrator(llama, tmp_path / "stopped", "kvquant")
    with pytest.raises(KeyboardInterrupt):
        run.run(stop)
    passes, fits = [], []
    monkeypatch.setattr(calibrate, "layer_gradients", lambda *a: passes.append(1) or layer_gradients(*a))
    monkeypatch.setattr(calibrate, "fit", lambda job, fit=calibrate.fit: fits.append(1) or fit(job))
    again = calibrator(llama, tmp_path / "stopped", "kvquant")
    (found,) = again.run()
    assert (len(passes), len(fits)) == ((1, 6) if phase == "samples" else (0, 3))
    assert found.digest == wanted.digest
    again.clean()
    assert not again.work.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from conftest import build
from test_calibrate import calibrator

def dies(phase, done, total):
    if (phase, done) == ("samples", 1):
        os.kill(os.getpid(), signal.SIGKILL)

calibrator(build("llama"), Path(sys.argv[1]), "kvquant").run(dies)
"""


def test_killed_run_continues(llama, tmp_path) -> None:
    """SIGKILL before a sample's pass, so that the process cannot clean up."""
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(arguments, env=environment).returncode == -signal.SIGKILL
    run = calibrator(llama, tmp_path / "killed", "kvquant")
    first = run.work / "sample-0000.safetensors"
    before = first.stat().st_mtime_ns
    (found,) = run.run()
    assert first.stat().st_mtime_ns == before
    (wanted,) = calibrator(llama, tmp_path / "whole", "kvquant").run()
    assert found.digest == wanted.digest


def test_codecs_that_recipes_share_are_fitted_once(llama, tmp_path) -> None:
    run = calibrator(llama, tmp_path, "kvquant", "kvquant:axis=token", "kvquant:pre_rope=false", "kvquant:cap=4")
    before, after, values = (run.codecs[s] for s in (Source(0, "keys", True), Source(0, "keys"), Source(0, "values")))
    assert [c.axis for c in before] == ["channel", "token", "channel"]
    assert len(after) == 1
    assert [c.cap for c in values] == [0, 4]
    assert run.work_bytes == 3 * 63 * 2 * 32 * 6 * 9


def test_online_ranges_stay_open_for_the_prompt(llama, tmp_path) -> None:
    (found,) = calibrator(llama, tmp_path, "kvquant:ranges=online").run()
    assert set(found.tensors) == {f"layers.{i}.{side}.table" for i in range(3) for side in ("keys", "values")}


def test_samples_are_random_windows() -> None:
    ids = list(range(1000))
    corpus = Corpus.draw("text", "abc", ids, samples=5, length=50, seed=7)
    assert corpus.windows.shape == (5, 50)
    assert (corpus.windows[:, 1:] - corpus.windows[:, :-1] == 1).all()
    assert len(set(corpus.windows[:, 0].tolist())) == 5
    assert torch.equal(corpus.windows, Corpus.draw("text", "abc", ids, 5, 50, 7).windows)
    assert not torch.equal(corpus.windows, Corpus.draw("text", "abc", ids, 5, 50, 8).windows)
    assert corpus.sha256 == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(UserError, match=r"'text' has 1,000 tokens, too few for samples of 1,000 tokens"):
        Corpus.draw("text", "abc", ids, 1, 1000, 0)


@pytest.mark.parametrize("recipe", ["kivi:bits=2", "qjl", "kvquant:calibration=prompt", "kvquant:table=int,axis=token"])
def test_nothing_to_calibrate(llama, tmp_path, recipe: str) -> None:
    with pytest.raises(UserError, match="has nothing to calibrate"):
        calibrator(llama, tmp_path, "kvquant", recipe)


def test_wrong_settings(llama, tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match="64 sinks leave nothing of samples of 64 tokens"):
        Calibrator(llama, [Recipe.parse("kvquant")], CORPUS, sinks=64, work=tmp_path)
    monkeypatch.setattr(calibrate.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"the samples need 435,456 bytes in .*, and 1,000 are free there"):
        calibrator(llama, tmp_path, "kvquant").run()


def test_one_run_at_a_time(llama, tmp_path) -> None:
    pytest.importorskip("fcntl")
    first, second = (calibrator(llama, tmp_path, "kvquant") for _ in range(2))
    with pytest.raises(UserError, match="another run makes this calibration"):
        first.run(lambda *_: second.run() and None)


class Fatal:
    """A job that ends the process reading it."""

    def __reduce__(self) -> tuple:
        return os._exit, (1,)


def test_a_killed_worker_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"the system killed a fitting process, .* with fewer --workers or --samples"):
        list(calibrate._each([Fatal(), Fatal()], 2))
