"""`tersekv calibrate`, and the commands that use its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tersekv import cli
from tersekv.calibration.calibration import Calibration
from tersekv.lab.evals import runs
from test_cli import refuse, run_json

SHORT = ("--samples", "2", "--length", "64", "--workers", "1")


pytestmark = pytest.mark.usefixtures("empty_cache")


def test_default_file_is_found_again(tiny: str, capfd, empty_cache: Path) -> None:
    common = ("-m", tiny, "-r", "kvquant:bits=2")
    generate = ("generate", *common, "-p", "x" * 300, "--max-new-tokens", "3")
    assert "tersekv calibrate --model MODEL --recipe 'kvquant:bits=2'" in refuse(capfd, *generate)
    made = run_json(capfd, "calibrate", *common, *SHORT)
    (file,) = made["files"]
    assert Path(file["path"]).parent.parent == empty_cache / "calibrations"
    assert file["bytes"] == Path(file["path"]).stat().st_size
    assert file["digest"] == Calibration.load(file["path"]).digest
    assert made["corpus"]["name"] == "pydoc"
    assert (made["sinks"], made["corpus"]["seed"], made["disk_bytes"]) == (1, 0, 2 * 63 * 32 * 6 * 4)
    assert made["peak_bytes"] >= 0
    assert not list((empty_cache / "calibrations" / "work").iterdir())
    held = run_json(capfd, *generate)["cache"]
    assert held["recipe"] == "kvquant:bits=2"
    assert held["bytes_by_part"]["codes"] > 0
    again = run_json(capfd, "calibrate", *common, *SHORT)
    assert again["files"][0]["digest"] == file["digest"]


def test_several_recipes_in_a_folder(tiny: str, capfd, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"Line {i} of a text. " for i in range(200)))
    out = tmp_path / "calibrations"
    recipes = ("-r", "kvquant:bits=2..3", "-r", "kvquant:table=nf")
    assert cli.run(["calibrate", "-m", tiny, *recipes, "-t", str(tmp_path / "text"), "-o", str(out), *SHORT]) == 0
    said = capfd.readouterr().out
    assert "calibrated on 2 × 64 tokens of text" in said
    assert "peak memory" in said
    assert len(list(out.iterdir())) == 3
    evaluate = ("eval", "perplexity", "-m", tiny, *recipes, "-r", "kivi", "--calibration", str(out))
    records = tmp_path / "records"
    options = ("--windows", "1", "--context", "128", "--mode", "simulate", "--sinks", "1", "--out", str(records))
    results = run_json(capfd, *evaluate, *options)["results"]
    assert len(results) == 5
    kept = runs.read(records / "records.jsonl")
    learnt = [record["details"].get("calibration", {}).get("digest") for record in kept]
    assert len(set(learnt)) == 4  # none for the full cache and kivi
    assert learnt == [record.get("calibration") for record in kept]
    # Another calibration makes another evaluation; the other records are reused.
    assert cli.run(["calibrate", "-m", tiny, *recipes, "--seed", "5", "-o", str(out), *SHORT]) == 0
    capfd.readouterr()
    run_json(capfd, *evaluate, *options)
    assert len(runs.read(records / "records.jsonl")) == 8


def test_demo_uses_a_calibration(tiny: str, capfd, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    run_json(capfd, "calibrate", "-m", tiny, "-r", "kvquant", *SHORT, "--out", str(file))
    common = ("demo", "-m", tiny, "--tokens", "300", "--new-tokens", "2", "--calibration", str(file))
    assert run_json(capfd, *common, "-r", "kvquant")["packed"]["cache"]["recipe"] == "kvquant"
    assert "was made for recipe" in refuse(capfd, *common, "-r", "kvquant:bits=2")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-r", "kivi"), "recipe 'kivi' has nothing to calibrate"),
        (("-r", "kvquant:bits=9"), "bits=9 is out of range"),
        (("-r", "kvquant", "--length", "4096"), "--length 4,096 is more than the model's context of 2,048"),
        (("-r", "kvquant", "--length", "8", "--sinks", "8"), "8 sinks leave nothing"),
        (("-r", "kvquant", "--text", "no-such-text"), "cannot read the text 'no-such-text'"),
        (("-r", "kvquant", "--out", "/dev/null/x.safetensors"), "/dev/null is not a folder that can be written"),
        (("-r", "kvquant", "--out", "x.pt"), "--out x.pt is not a folder and does not end in .safetensors"),
        (("-r", "kvquant:bits=2..3", "--out", "x.safetensors"), "and these recipes need 2 files: give a folder"),
        ((), "give --recipe RECIPE, or --storage"),
    ],
)
def test_refusals(tiny: str, capfd, arguments: tuple[str, ...], text: str) -> None:
    assert text in refuse(capfd, "calibrate", "-m", tiny, *arguments)


def test_stopped_run_says_how_to_continue(tiny: str, capfd, monkeypatch) -> None:
    from tersekv.calibration import calibrate

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "layer_gradients", stop)
    assert cli.run(["calibrate", "-m", tiny, "-r", "kvquant", *SHORT]) == 130
    said = " ".join(capfd.readouterr().err.split())
    assert "keeps the finished part: the same command continues from there" in said


def test_bases_of_storage_files(tiny: str, capfd, empty_cache: Path, tmp_path: Path) -> None:
    (file,) = run_json(capfd, "calibrate", "--storage", "-m", tiny, *SHORT)["files"]
    assert file["recipe"] == "storage"
    assert Path(file["path"]).parent.parent == empty_cache / "calibrations"
    build = ("prompt-cache", "build", "--storage", "2", "-p", "x" * 300, "-m", tiny, "-o", str(tmp_path / "a"))
    made = run_json(capfd, *build)["storage"]
    assert (made["bases"], made["calibration"]) == ("calibration", file["digest"])
