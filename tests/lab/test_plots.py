"""Plots: their numbers, labels that do not overlap, and equal bytes for equal records."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from made_records import evaluation, write
from made_records import results as results
from tersekv.errors import UserError
from tersekv.lab.evals import runs
from tersekv.lab.plots import groups, held, labels, streams, timings
from tersekv.lab.plots.base import ModelKeys
from tersekv.lab.plots.kinds import angles, clusters, growth, magnitudes, means, needle, outliers, pareto, plot, speed
from tersekv.lab.plots.page import page
from tersekv.lab.plots.style import render, to_bytes

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
ATTEND, SUBGEN = RECORDS / "bench_attend_zen5.jsonl", RECORDS / "subgen.jsonl"


@pytest.fixture
def keys() -> ModelKeys:
    """Return keys of three layers with two heads; one channel is ten times larger in the last
    layer."""
    made = [torch.randn(2, 400, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    made[2][1, :, 5] *= 10
    return ModelKeys("tiny", "pydoc", made, (0, 2))


# ---------------------------------------------------------------- angles and magnitudes


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_distance_to_the_density(level: int) -> None:
    """Zero up to sampling for its own quantiles, and the shift for a shifted uniform distribution."""
    x, pdf, cumulative = angles.densities(level)
    assert np.mean(pdf[1:] + pdf[:-1]) / 2 * x[-1] == pytest.approx(1, abs=1e-6)
    quantiles = np.interp((np.arange(1000) + 0.5) / 1000, cumulative, x)
    assert angles.ks_distance(quantiles, level) == pytest.approx(0.0005, abs=1e-6)
    assert angles.ks_distance(np.zeros(10), level) == pytest.approx(1)


def test_gaussian_keys_have_the_angles_of_lemma_2_and_outliers_lose_them() -> None:
    x = torch.randn(1, 4000, 64, generator=torch.Generator().manual_seed(0))
    loud = x * torch.where(torch.arange(64) % 16 == 3, 12.0, 1.0)
    for kind in ("as they are", "rotated"):
        for level, found in enumerate(angles.angles_by_level(x)[kind], 1):
            assert angles.ks_distance(found, level) < 3 / math.sqrt(found.size)
    found = angles.angles_by_level(loud)
    for level in (2, 3, 4):
        plain, rotated = (angles.ks_distance(found[kind][level - 1], level) for kind in ("as they are", "rotated"))
        assert plain > max(0.15, 2 * rotated)


def test_angles_of_narrow_heads() -> None:
    assert len(angles.angles_by_level(torch.randn(1, 5, 12))["rotated"]) == 2
    with pytest.raises(UserError, match="7 channels, an odd number"):
        angles.angles_by_level(torch.randn(1, 5, 7))


def test_magnitudes_find_the_outlier_channel(keys: ModelKeys) -> None:
    picture = render(plot("magnitudes"), keys)
    rows = picture.tables[0].rows
    assert len(rows) == 3
    assert rows[2][-1] == "head 1, channel 5"
    assert float(rows[2][3]) == pytest.approx(10, rel=0.1)
    assert float(rows[0][3]) < 1.3
    one = magnitudes.draw(keys._replace(head=1))
    assert one.tables[0].rows[2][-1] == "head 1, channel 5"
    assert magnitudes.side_by_side(keys.keys[2])[7, 32 + 5] == keys.keys[2][1, 7, 5].abs()


def test_means_in_units_of_the_spread(keys: ModelKeys) -> None:
    x = torch.zeros(2, 4, 32)
    x[0, :, 7] = torch.tensor([9.0, 11.0, 9.0, 11.0])
    assert means.mean_in_spreads(x) == pytest.approx(10)
    picture = render(plot("means"), keys._replace(before=[torch.randn(2, 50, 32), x, x]))
    assert [row[1] for row in picture.tables[0].rows][1:] == ["10.00", "10.00"]
    assert "largest in layer 1, 10.0 times their spread" in picture.alt


def test_outliers_set_the_range(keys: ModelKeys) -> None:
    """Uniform magnitudes fill the range in proportion. One large element leaves all others in a small part."""
    assert outliers.parts_of_range(torch.arange(-1000.0, 0)) == pytest.approx([0.5, 0.9, 0.99, 0.999])
    x = torch.ones(2, 400, 32)
    x[0, 3, 5] = -50
    assert outliers.parts_of_range(x) == pytest.approx([0.02] * 4)
    assert not outliers.parts_of_range(torch.zeros(1, 4, 2)).any()
    source = keys._replace(before=[x] * 3, values=keys.keys)
    picture = render(plot("outliers"), source)
    rows = {row[0]: row[1:] for row in picture.tables[0].rows}
    assert rows["keys before RoPE"][:4] == ["0.020"] * 4
    assert rows["keys after RoPE"] == rows["values"] != rows["keys before RoPE"]
    assert "99 % of the elements within 2% of the range" in picture.alt
    titles = [axes.get_title(loc="left") for axes in picture.figure.axes]
    assert titles[:3] == [f"|{name}|, layer 0" for name in ("keys before RoPE", "keys after RoPE", "values")]


# ---------------------------------------------------------------- clusters


def test_centers_are_those_of_greedy_k_center() -> None:
    """Each next one is the farthest from all so far."""
    x = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(1)).double()
    for head, found in zip(x, clusters.centers(x, 9), strict=True):
        chosen = [0]
        for _ in range(8):
            chosen.append(int(torch.cdist(head, head[chosen]).amin(1).argmax()))
        assert found.tolist() == chosen


def test_centers_cover_clusters() -> None:
    """Balls of a tenth of the distance between them, and no clusters at all."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 300, 64, generator=generator)
    balls = torch.randn(16, 64, generator=generator)[torch.arange(300) % 16] + 0.1 * noise
    few, more = clusters.reaches(balls, [8, 16])
    assert few.radius > 0.6
    assert 0 < more.mean < more.radius < 0.2
    assert 0.8 < clusters.reaches(noise, [16])[0].mean < clusters.reaches(noise, [16])[0].radius
    assert clusters.reaches(balls.round(), [300]) == [(0, 0)]


def test_clusters_plot(keys: ModelKeys) -> None:
    pytest.importorskip("sklearn")
    balls = [x[:, torch.arange(400) % 16] for x in keys.keys]
    source = keys._replace(keys=balls, values=keys.keys)
    picture = render(plot("clusters"), source)
    for table in picture.tables:
        assert [row[0] for row in table.rows] == ["0", "1", "2"]
        assert all(float(row[1]) == 0 < float(row[2]) for row in table.rows)
    assert picture.alt.count("smaller for keys in 3 of 3 layers") == 2
    titles = [axes.get_title(loc="left") for axes in picture.figure.axes]
    assert titles[0] == "keys, layer 0, head 0: radius 0.00"
    assert titles[3].startswith("values, layer 2, head 0: radius ")
    one = render(plot("clusters"), source._replace(head=1, layers=(1,)))
    assert one.figure.axes[0].get_title(loc="left") == "keys, layer 1, head 1: radius 0.00"
    assert to_bytes(one, "png") == to_bytes(render(plot("clusters"), source._replace(head=1, layers=(1,))), "png")
    with pytest.raises(UserError, match="give more than 64 with --tokens"):
        render(plot("clusters"), source._replace(keys=[x[:, :64] for x in balls]))


def test_clusters_name_a_missing_package(keys: ModelKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"needs scikit-learn, which is not installed: pip install 'tersekv\[lab\]'"):
        render(plot("clusters"), keys._replace(values=keys.keys))


# ---------------------------------------------------------------- pictures of records


def test_front_takes_the_better_of_equal_bits() -> None:
    points = [
        pareto.Point(n, b, m, math.nan, n) for n, b, m in (("a", 2, 5.0), ("b", 2, 4.0), ("c", 3, 4.0), ("d", 4, 1.0))
    ]
    assert [p.recipe for p in pareto.front(points, lower=True)] == ["b", "d"]
    assert [p.recipe for p in pareto.front(points, lower=False)] == ["a"]


def test_names_do_not_cover_each_other(results: Path) -> None:
    figure = render(plot("pareto"), groups.read_records([results])).figure
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        overlaps = [labels._overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
        assert max(overlaps, default=0) < 1


def test_recipes_break_where_their_parts_begin() -> None:
    assert labels.short("kivi:bits=2") == "kivi:bits=2"
    assert labels.short("window:recent=64,sinks=8+kivi:bits=2").split("\n") == [
        "window:recent=64,",
        "sinks=8+kivi:bits=2",
    ]


def test_scores_that_are_not_finite_are_omitted(tmp_path: Path) -> None:
    records = evaluation()
    for made in records:
        if made["recipe"] == "kivi:bits=2" and made["task"] == "perplexity":
            made["metrics"]["nll"] = None
    picture = render(plot("pareto"), records, task="perplexity")
    assert "kivi:bits=2" not in [row[0] for row in picture.tables[0].rows]
    with pytest.raises(UserError, match="no packed recipe"):
        render(plot("pareto"), [r for r in records if r["recipe"] == "full"])


def test_needle_maps(results: Path) -> None:
    records = [r for r in groups.read_records([results]) if r["task"] == "needle"]
    (group,) = groups.grouped(records)
    maps = needle.maps_of(group, "accuracy")
    assert maps[0].recipe == "full"
    assert maps[0].cells.shape == (3, 2)
    assert maps[0].mean == 1
    gone = [r for r in records if r["details"] != {**r["details"], "length": 2048, "depth": 50}]
    cells = needle.maps_of(groups.grouped(gone)[0], "accuracy")[1].cells
    assert np.isnan(cells).sum() == 1
    assert np.isnan(cells[1, 1])
    for i, made in enumerate(records):
        made["details"]["depth"] = i % 97
    assert needle.grid_of(groups.grouped(records)[0])[1] == list(range(0, 101, 10))
    assert render(plot("needle"), records).alt.startswith("Heat maps of accuracy")


def test_speed_plot_agrees_with_the_record() -> None:
    found = timings.read_timings([ATTEND])
    recorded = {(r["what"], r["shape"], r["T"], r["threads"]): r["median_us"] for r in runs.read(ATTEND)}
    compared = speed.speedups(found)
    assert len(compared) == sum(not key[0].startswith(("sdpa", "matmul")) for key in recorded)
    for ours, _, ratio in compared:
        at = ours.shape, ours.tokens, ours.threads
        dense = min(
            t for (what, *rest), t in recorded.items() if tuple(rest) == at and what.startswith(("sdpa", "matmul"))
        )
        assert ratio == pytest.approx(dense / recorded[(ours.what, *at)], rel=1e-6)
    assert b"<svg" in to_bytes(render(plot("speed"), found), "svg")


def test_speed_draws_a_format_as_one_line_for_all_its_bits() -> None:
    """Bits of nuq4-1% and trellis vary with shape and length."""
    found = [t for t in timings.read_timings([ATTEND]) if t.packed]
    names = {t.name for t in found}
    assert len(names) == len({t.what for t in found})
    assert {"nuq4-1%, 4.37 bits", "grid4, 5 bits", "trellis2, 2.06–2.12 bits"} <= names
    styles = speed._styles(found)
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == len(styles)
    with pytest.raises(UserError, match=r"\(avx512bf16\) and of .*\(avx2\): draw each CPU's records alone"):
        timings.read_timings([ATTEND, RECORDS / "bench_attend_avx2.jsonl"])


def test_a_divergence_is_drawn_as_kl_and_titles_are_words() -> None:
    """Its records also have the perplexity ratio, which the task perplexity shows."""
    asked, recipes = ("perplexity", "divergence", "passkey"), ("full", "kivi:bits=2", "polarquant")
    records = groups.read_records([RECORDS / "every_task.jsonl"])
    records = [r for r in records if r["task"] in asked and r["recipe"] in recipes]
    tables = {t.title.split(":")[0]: t for t in pareto.draw(records).tables}
    assert {name: table.columns[3] for name, table in tables.items()} == {
        "perplexity": "perplexity_ratio", "divergence": "kl", "passkey": "accuracy",
    }  # fmt: skip
    said = tables["divergence"].title
    assert "1 window of 512 tokens of pydoc, 128 tokens at a time through the real cache (mode=cache)" in said
    assert "=" not in said.replace("mode=cache", "") + tables["passkey"].title
    text = page(records, "r", "o.html")
    assert "kl q1" not in text
    assert "kl q1" in page(records, "r", "o.html", quarters=True)


def test_growth_plot_agrees_with_the_record() -> None:
    """For 64 times the tokens, a cache that keeps all has 64 times the bytes, and a sketch hardly
    more."""
    found = streams.read_streams([SUBGEN])
    rows = {(r["recipe"], r["context_tokens"]): r for r in runs.read(SUBGEN)}
    assert len(found) == len(rows)
    for first, last in growth.growth(found):
        assert (first.tokens, last.tokens) == (1 << 14, 1 << 20)
        assert last.bytes == rows[last.recipe, 1 << 20]["bytes"]
        assert first.step_us == rows[last.recipe, 1 << 14]["step_microseconds"]
        ratio = last.bytes / first.bytes
        assert ratio < 2 if last.recipe.startswith("subgen") else ratio == pytest.approx(64, rel=0.05)
    picture = render(plot("growth"), found)
    names = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert names[:2] == ["every token, exact", "subgen + exact"]
    assert b"<svg" in to_bytes(picture, "svg")
    with pytest.raises(UserError, match="one length only"):
        render(plot("growth"), [found[0]])


def test_partial_runs_compare_on_common_samples(tmp_path: Path) -> None:
    records = [r for r in evaluation() if r["task"] == "perplexity"]
    partial = [r for r in records if r["recipe"] in ("full", "kivi:bits=2")][:-2]
    folder = write(tmp_path / "r", [*partial, partial[-1]])
    (group,) = groups.grouped(groups.read_records([folder]))
    assert [s.samples for s in group.summaries] == [3, 1]
    assert "1 of 3" in page(groups.read_records([folder]), "r", "report.html")
    lost = [r for r in records if not (r["recipe"] == "full" and r["sample"] == "0")]
    assert [s.samples for s in groups.grouped(lost)[0].summaries] == [2] * 9
    again = [r | {"calibration": "b", "metrics": {"nll": 9.0}} for r in records if r["recipe"] == "kivi:bits=2"][:2]
    (both,) = groups.grouped([*records, *again])  # another calibration's scores are not pooled
    assert [r["metrics"]["nll"] for r in both.records["kivi:bits=2"]] == [9.0] * 2
    assert sum("(n = 2)" in point.name for point in pareto.points_of(both, "nll")) == 1
    other = [r | {"content": "new", "metrics": {"nll": 1.0}} for r in records if r["recipe"] == "full"]
    old = [r | {"content": "old"} for r in records]
    assert list(groups.grouped([*old, *other])[0].records) == ["full"]  # nor those of another text
    with pytest.raises(UserError, match="lack the full cache"):
        groups.grouped([r for r in records if r["recipe"] != "full"])


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_same_records_same_bytes(form: str, results: Path) -> None:
    found = held.held_at_longest(held.longest(groups.grouped(groups.read_records([results]))))
    twice = [to_bytes(render(plot("memory"), found), form) for _ in range(2)]
    assert twice[0] == twice[1]
