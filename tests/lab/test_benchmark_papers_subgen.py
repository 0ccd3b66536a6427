"""Experiments of SubGen: caches of equal bytes, clusters, and the terms of Algorithm 1's error."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from conftest import benchmark
from made_records import SHAPE
from tersekv.errors import UserError
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import SHARED
from tersekv.lab.plots.kinds.clusters import COUNTS

ours = benchmark("experiments/subgen")
layers = benchmark("subgen_layers")
papers = benchmark("papers")


@pytest.mark.parametrize("template", [*ours.BOTH.values(), *ours.TABLE_1.values()])
def test_a_row_fills_its_room_and_no_more(template: str) -> None:
    recipe = ours.fitted(template, SHAPE, 1000, 1 / 5)
    if recipe is None:
        assert ours.held(SHAPE, ours._with(template, ours.SMALLEST), 1000) > 1 / 5
        return
    (number,) = [n for n in range(1001) if ours._with(template, n) == recipe]
    assert ours.held(SHAPE, recipe, 1000) <= 1 / 5 < ours.held(SHAPE, ours._with(template, number + 1), 1000)


def test_a_row_without_room_is_omitted() -> None:
    assert ours.fitted(ours.BOTH["KIVI, 2 bits"], SHAPE, 1000, 1 / 16) is None


def test_columns_have_recipes_of_their_own_and_keep_them(tiny: str, tmp_path: Path) -> None:
    """Rooms differ between columns; a later run continues with the recipes of the first, and adds rows."""
    rows = {"sinks": "streaming:budget={n}+exact", "bits": "window:recent={n}+kivi:bits=2,group=16"}
    experiment = ours.EqualBytes(
        "Lines", "How.", "Theirs.",
        cells={f"4 in {room}": ours.Cell({"lines": "4", "variant": "pairs"}, room) for room in ("1/2", "1/3")},
        rows=rows, samples=1,
    )  # fmt: skip
    one = ours.Setting(tiny, "float32", tmp_path, rows=("sinks",))
    experiment.run(one)
    found = experiment.results(one)
    assert len({r.recipe for r in found if r.row == "sinks"}) == 2
    sizes = {path: json.loads(path.read_text()) for path in tmp_path.rglob(ours.SIZES)}
    assert len(sizes) == 2
    path = next(iter(sizes))
    path.write_text(json.dumps({"sinks": "streaming:budget=50+exact"}))
    records = path.with_name("records.jsonl")
    made = runs.read(records)
    with_slack = [r | {"bytes_by_part": {"slack": r["bytes"] // 4}} for r in made]
    records.write_text("".join(runs.written(with_slack, SHARED)))
    every = ours.Setting(tiny, "float32", tmp_path, values=(path.parent.name.replace("-", "/"),))
    experiment.run(every)
    made = experiment.results(every)
    assert {r.column for r in made} == {every.values[0]}
    assert {r.row: r.recipe for r in made}["sinks"] == "streaming:budget=50+exact"
    assert {r.row for r in made} == {"full cache", "sinks", "bits"}
    assert {r.row: r.bits for r in made}["full cache"] == pytest.approx(24, rel=1e-3)  # float32 less a quarter
    with pytest.raises(UserError, match="no column '5 in 1/2'"):
        experiment.run(ours.Setting(tiny, "float32", tmp_path, values=("5 in 1/2",)))


def test_clusters_of_answers(tiny: str, tmp_path: Path) -> None:
    """Each question is measured once, and results are means over questions."""
    asked = [{"question_id": i, "turns": [f"{'Why is it so? ' * (8 + i)}"]} for i in range(4)]
    (tmp_path / "mt_bench").mkdir()
    (tmp_path / ours.QUESTIONS).write_text("\n".join(map(json.dumps, asked)))
    experiment = ours.Clusters("Figure", "How.", "Theirs.", questions=2, new_tokens=4)
    setting = ours.Setting(tiny, "float32", tmp_path / "out", data=tmp_path)
    experiment.run(setting)
    experiment.run(setting)
    lines = [json.loads(line) for line in (setting.folder / ours.FIGURE_1).read_text().splitlines()]
    assert [line["question"] for line in lines] == ["0", "2"]
    found = {(r.row, r.column, r.metric): r for r in experiment.results(setting)}
    assert len(found) == 3 * len(COUNTS) * 2
    keys = found["keys", "16 centers", "k-center radius"]
    ones = [sum(layer["keys"][0]["radius"] for layer in line["layers"]) / len(line["layers"]) for line in lines]
    assert keys.mean == pytest.approx(sum(ones) / 2)
    assert keys.stderr == pytest.approx(abs(ones[0] - ones[1]) / 2)
    assert 0 <= found["share of layers where keys have the smaller one", "16 centers", "k-center radius"].mean <= 1
    lines = papers.lines_of("subgen", "figure1", setting, list(found.values()))
    assert "k-center radius" in papers.section("subgen", "figure1", lines).body
    with pytest.raises(UserError, match="reads mt_bench"):
        experiment.run(ours.Setting(tiny, "float32", tmp_path / "none", data=tmp_path / "none"))


def made_layer(heavy: float) -> layers.Layer:
    """Return a layer of random keys and values. All queries give one key in the middle a score in
    proportion to `heavy`, and its value is small: an attention sink."""
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (torch.randn(1, h, 256 + layers.QUERIES, 16, generator=generator) for h in (2, 2, 4))
    query[..., 0] = 1
    keys[..., 0] = 0
    keys[:, :, 100, 0] = heavy
    values[:, :, 100] *= 0.1
    return layers.Layer(keys, values, query, 16**-0.5)


def test_terms_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numerator's error is as theory predicts, and its mean over seeds is smaller by the root of their
    number: z is unbiased. An attention sink with a small value raises the prediction."""
    monkeypatch.setattr(layers, "STREAM", "subgen:variant=stream,budget=100,recent=16")
    args = layers.argparse.Namespace(tokens=256, seeds=16)
    even, peaked = (layers.terms(made_layer(heavy), 0, args) for heavy in (0.0, 20.0))
    assert even["mean of seeds"] < 2 * even["numerator"] / math.sqrt(args.seeds)
    assert 0 < even["mass"] < 1
    assert even["numerator"] == pytest.approx(even["predicted"], rel=0.15)
    assert peaked["heaviest"] > 0.25 > 0.1 > even["heaviest"]
    assert peaked["predicted"] > 1.5 * even["predicted"]
    assert even["its norm"] > 0.5 > 0.2 > peaked["its norm"] > 0
    assert peaked["exponent"] > 0


def test_exact_weights_and_errors() -> None:
    layer = made_layer(0.0)
    truth = layers.exact(layer)
    assert torch.allclose(truth.weights.sum(-1), torch.ones(2, 2, layers.QUERIES))
    assert float(truth.weights[..., 0, 257:].sum()) == 0
    errors, share = layers.errors_of("window:sinks=0,recent=0,start=0,exact=fp32+exact:dtype=fp32", [[layer]], 256)
    assert errors[0] < 1e-5
    assert share == pytest.approx(2, abs=0.02)
    few, half = layers.errors_of("streaming:budget=64+exact", [[layer]], 256)
    assert few[0] > 0.05
    assert half == pytest.approx(64 / 256, abs=0.03)
