"""The benchmark of caches at equal bytes, on a tiny model."""

from __future__ import annotations

import argparse
import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from conftest import benchmark
from made_records import SHAPE
from tersekv.lab.evals import runs
from tersekv.lab.evals.reader import Reader
from tersekv.lab.evals.tasks.divergence import compare
from tersekv.models.loading import load
from tersekv.sizes.estimate import predict

ours = benchmark("budgets")
TOKENS = 1024


@pytest.mark.parametrize("row", ours.ROWS, ids=lambda row: row.label)
@pytest.mark.parametrize("budget", ours.BUDGETS)
def test_a_recipe_fits_its_budget_and_leaves_little_of_it(row: ours.Row, budget: str) -> None:
    found = ours.fitted(row, SHAPE, TOKENS, budget)
    if found is None:
        return
    recipe, size = found
    room = Fraction(budget) * 2 * SHAPE.elements(TOKENS)
    assert size == ours.used(predict(SHAPE, recipe, TOKENS))
    assert 0.85 * float(room) < size <= room


def test_codes_for_all_tokens_cannot_reach_small_budgets() -> None:
    rows = {row.label: row for row in ours.ROWS}
    assert ours.fitted(rows["KIVI, all tokens"], SHAPE, TOKENS, "1/16") is None
    assert ours.fitted(rows["trellis, all tokens"], SHAPE, TOKENS, "1/16") is None
    assert ours.fitted(rows["H2O"], SHAPE, TOKENS, "1/16") is not None


def test_a_run_continues_and_prints_its_tables(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ("H2O", "H2O, TurboQuant 4 and 2 bits", "TurboQuant, all tokens")
    monkeypatch.setattr(ours, "ROWS", tuple(row for row in ours.ROWS if row.label in labels))
    text, out = tmp_path / "text.txt", tmp_path / "out.jsonl"
    text.write_text("".join(f"line {i} says {i * i}\n" for i in range(200)))
    options = ["--model", tiny, "--out", str(out), "--text", f"lines={text}", "--budgets", "1/4", "1/8"]
    options += ["--prefix", "512", "--scored", "64", "--chunk", "32"]
    ours.main([*options, "--windows", "1"])
    first = out.read_text().splitlines()
    ours.main([*options, "--windows", "1"])
    assert out.read_text().splitlines() == first
    lines = runs.read(out)
    assert {line["row"] for line in lines if line["budget"] == "1/4"} == set(labels)
    assert all(line["bytes_context"] == line["predicted_bytes"] for line in lines if line["row"] == "H2O")
    capsys.readouterr()
    ours.main(["--records", str(out)])
    (h2o,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| lines | H2O |"))
    assert h2o.count("(") == 2
    assert h2o.endswith("– | – |")


def test_results_are_those_of_the_evaluation(tiny: str) -> None:
    """Sharing votes between recipes changes nothing."""
    model, tokenizer = load(tiny)
    ids = torch.randint(3, 97, (1, 320), generator=torch.Generator().manual_seed(0))
    recipes = [
        "h2o:budget=60,recent=16,rest=2,evict=block+turboquant:bits=4",
        "h2o:budget=40+exact",
        "snapkv:budget=50+kivi",
    ]
    with torch.no_grad():
        window = ours.Window(model, ids, 256, 32)
        full, _ = Reader(model, tokenizer).read(ids, 32, 256)
        for recipe in recipes:
            logits, held = Reader(model, tokenizer, recipe).read(ids, 32, 256)
            line = window.measure(recipe)
            assert line["kl"] == pytest.approx(compare(full, logits)[0].mean().item(), rel=1e-4)
            assert line["bytes_end"] == ours.used(held)


def test_several_models_share_a_file_and_not_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, out = benchmark("recorded"), tmp_path / "out.jsonl"

    def run(args: argparse.Namespace) -> None:
        runs.append(args.out, {"model": args.model}, [{}])

    def call(*options: str) -> str:
        parser = argparse.ArgumentParser()
        recorded.add_options(parser)
        recorded.run_or_print(parser.parse_args(options), run, lambda lines: [json.dumps(lines)])
        return capsys.readouterr().out

    assert call("--out", str(out)) == ""
    assert call("--records", str(out)) == 'smollm2\n\n[{"model": "smollm2"}]\n'
    call("--out", str(out), "--model", "a.gguf", "--model", "b")
    assert call("--records", str(out)).count("model") == 3
    assert call("--records", str(out), "--model", "b") == 'b\n\n[{"model": "b"}]\n'
