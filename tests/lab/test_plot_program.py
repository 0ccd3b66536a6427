"""`tersekv plot`: plots of a model and of records, errors, and files written completely or not at
all."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from made_records import DAMAGE, SHAPE
from made_records import results as results
from tersekv import UserError, cli
from tersekv.lab.bench.generate import Decoding
from tersekv.lab.evals import runs
from tersekv.lab.evals.questions import read_questions
from tersekv.lab.plots import decodings, timings
from tersekv.lab.plots.kinds import names, plot
from tersekv.lab.plots.style import render
from tersekv.sizes.estimate import predict
from test_cli import refuse, run_json

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
ATTEND, EARLIER = RECORDS / "bench_attend_zen5.jsonl", RECORDS / "generate.jsonl"
SVG = b"<svg"
QUESTIONS = "".join(json.dumps({"question_id": i, "turns": [f"Why {i}?", "And?"]}) + "\n" for i in (7, 8))


def test_plots_of_a_model(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Keys and values. " * 20)
    call = ("-m", tiny, "--tokens", "96", "--head", "0", "-o")
    made = run_json(capfd, "plot", "angles", *call, str(tmp_path / "a.png"), "--layers", "-1")
    assert made["plot"] == "angles"
    assert "(tiny0, 96 tokens of pydoc, KV head 0)" in made["shows"]
    assert [row[:2] for row in made["tables"][0]["rows"]] == [["1", 1], ["1", 2], ["1", 3], ["1", 4]]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert cli.run(["plot", "magnitudes", *call, str(tmp_path / "b.SVG"), "--text", str(tmp_path / "text.txt")]) == 0
    assert SVG in (tmp_path / "b.SVG").read_bytes()
    assert "(tiny0, 96 tokens of text.txt, KV head 0)" in " ".join(capfd.readouterr().out.split())
    made = run_json(capfd, "plot", "outliers", *call, str(tmp_path / "d.png"))
    before, after, values = made["tables"][0]["rows"]
    assert (before[0], after[0], values[0]) == ("keys before RoPE", "keys after RoPE", "values")
    assert before[1:] != after[1:]
    (tmp_path / "d.png").unlink()
    pytest.importorskip("sklearn")
    made = run_json(capfd, "plot", "clusters", *call, str(tmp_path / "c.png"), "--layers", "0")
    assert [len(row) for row in made["tables"][0]["rows"]] == [7, 7]
    assert "tiny0, 96 tokens of pydoc, KV head 0: scatter plots of layers 0, keys above" in made["shows"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.SVG", "c.png", "text.txt"]


def test_questions_with_other_line_separators_and_blank_lines(tmp_path: Path) -> None:
    asked = [{"question_id": i, "turns": [f"Why\u2028so\x85?{i}"]} for i in (1, 2)]
    (tmp_path / "q.jsonl").write_text("\n\n".join(json.dumps(one, ensure_ascii=False) for one in asked) + "\n \n")
    assert read_questions(str(tmp_path / "q.jsonl")) == {str(one["question_id"]): one["turns"][0] for one in asked}
    assert runs.read(tmp_path / "q.jsonl") == asked


def test_a_question_and_its_answer(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The tokens drawn are those of the question in the chat template and of the answer."""
    (tmp_path / "q.jsonl").write_text(QUESTIONS)
    options = ("-m", tiny, "--questions", str(tmp_path / "q.jsonl"), "-o", str(tmp_path / "a.png"))
    call = ("plot", "angles", *options)
    counts = {}
    for new, id in itertools.product((80, 90), ("7", "8")):
        made = run_json(capfd, *call, "--question", id, "--max-new-tokens", str(new))
        assert f"tokens of q.jsonl {id} with its answer, all KV heads" in made["shows"]
        counts[new, id] = int(made["shows"].split(" tokens of")[0].split()[-1])
    assert counts[90, "7"] == counts[80, "7"] + 10
    assert counts[80, "7"] > 80 + len("Why 7?")
    first = run_json(capfd, *call, "--max-new-tokens", "80")
    assert "q.jsonl 7 with" in first["shows"]
    pytest.importorskip("sklearn")
    said = refuse(capfd, "plot", "clusters", *options, "--max-new-tokens", "4")
    assert "give more than 64 with --tokens or --max-new-tokens" in said


def test_front_and_metrics_of_pareto(results: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = run_json(capfd, "plot", "pareto", str(results), "-o", str(tmp_path / "a.pdf"))
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    perplexity, found = made["tables"]
    assert perplexity["columns"][3] == "perplexity_ratio"
    assert found["columns"][3] == "accuracy"
    rows = {row[0]: row for row in perplexity["rows"]}
    assert set(rows) == {"full", *DAMAGE}
    assert float(rows["kivi:bits=4"][3]) == pytest.approx(math.exp(0.013 * 1.02), rel=1e-3)
    assert rows["full"][2:4] == [16, 1]
    ours = {row[0] for row in perplexity["rows"] if row[1]}
    assert ours == {
        p for p in DAMAGE if not any(float(rows[q][2]) <= float(rows[p][2]) and DAMAGE[q] < DAMAGE[p] for q in DAMAGE)
    }
    one = run_json(capfd, "plot", "pareto", str(results), "--metric", "nll", "-o", str(tmp_path / "a.svg"))
    assert [table["columns"][3] for table in one["tables"]] == ["nll"]


def test_memory_of_records_and_predicted(results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = run_json(capfd, "plot", "memory", str(results), "-o", str(tmp_path / "a.png"))
    rows = {row[0]: row for row in made["tables"][0]["rows"]}
    assert rows["kivi:bits=2"][2] == predict(SHAPE, "kivi:bits=2", 2048).total_bytes
    call = ("plot", "memory", "-r", "kivi:bits=2,4", "-m", "llama-7b", "--tokens", "4k", "-o", str(tmp_path / "a.png"))
    told = run_json(capfd, *call)["tables"][0]["rows"]
    assert [row[0] for row in told] == ["full", "kivi:bits=2", "kivi:bits=4"]
    assert told[0][2] == 4096 * 32 * 32 * 256 * 2


def test_every_kind_is_found_and_has_a_title() -> None:
    pytest.importorskip("sklearn")
    assert all(plot(name).title for name in names())
    code = "import sys, tersekv.cli; print([m for m in sys.modules if m.split('.')[0] in ('matplotlib', 'torch')])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "[]"
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pareto", "{r}", "-o", "{t}/x.gif"), "ends in '.gif': give a file that ends in .png or .svg or .pdf"),
        (("pareto", "{r}", "-o", "{t}/x"), "has no suffix"),
        (("pareto", "{r}", "-o", "{t}/none/x.png"), "there is no folder"),
        (("pareto", "{r}", "-o", "{t}/d.png"), "is a folder"),
        (("pareto", "{r}", "-o", "~nosuchuser/x.png"), "home folder that does not exist"),
        (("pareto", "-o", "{t}/x.png"), "no records were given"),
        (("pareto", "{t}", "-o", "{t}/x.png"), "holds no records.jsonl"),
        (("pareto", "{t}/none", "-o", "{t}/x.png"), "cannot read records"),
        (("pareto", "{a}", "-o", "{t}/x.png"), "records of a benchmark"),
        (("pareto", "{t}/empty.jsonl", "-o", "{t}/x.png"), "has no records yet"),
        (("pareto", "{t}/other.jsonl", "-o", "{t}/x.png"), "is not a record of an evaluation"),
        (("pareto", "{r}", "--metric", "beauty", "-o", "{t}/x.png"), "no metric 'beauty'; they have accuracy"),
        (("pareto", "{r}", "--task", "needel", "-o", "{t}/x.png"), "did you mean 'needle'?"),
        (("needle", "{r}", "--task", "perplexity", "-o", "{t}/x.png"), "has the length and depth of a needle"),
        (("needle", "{r}", "--metric", "beauty", "-o", "{t}/x.png"), "has no metric 'beauty'; it has accuracy"),
        (("needle", "{r}", "--layers", "0", "-o", "{t}/x.png"), "plot needle has no --layers"),
        (("angels", "-o", "{t}/x.png"), "did you mean 'angles'?"),
        (("angles", "{r}", "-o", "{t}/x.png"), "reads a model, not records"),
        (("speed", "{r}", "-o", "{t}/x.png"), "is a folder"),
        (("speed", "{r}/records.jsonl", "-o", "{t}/x.png"), "is not a timing of attention (it is of 'perplexity')"),
        (("speed", "{t}/empty.jsonl", "-o", "{t}/x.png"), "is empty"),
        (("speed", "-o", "{t}/x.png"), "no records were given"),
        (("growth", "{a}", "-o", "{t}/x.png"), "is not a step of a stream (it is of 'grid4'): `tersekv plot speed"),
        (("growth", "-o", "{t}/x.png"), "give a file like benchmarks/records/subgen.jsonl"),
        (("memory", "{r}", "-r", "kivi", "-o", "{t}/x.png"), "give one of them"),
        (("memory", "{r}", "--tokens", "4k", "-o", "{t}/x.png"), "is only used for a prediction"),
        (("memory", "-r", "kiwi", "-o", "{t}/x.png"), "kiwi"),
        (("angles", "-m", "{m}", "--layers", "0,7", "-o", "{t}/x.png"), "write layers from 0 to 1"),
        (("angles", "-m", "{m}", "--layers", "x", "-o", "{t}/x.png"), "write layers from 0 to 1"),
        (("angles", "-m", "{m}", "--head", "1", "-o", "{t}/x.png"), "the model has 1 KV head"),
        (("angles", "-m", "{m}", "--tokens", "4k", "-o", "{t}/x.png"), "more than this model's context"),
        (("angles", "-m", "{m}", "--tokens", "some", "-o", "{t}/x.png"), "is not a number of tokens"),
        (("angles", "-m", "{m}", "--text", "{t}/empty.jsonl", "-o", "{t}/x.png"), "has 0 tokens"),
        (("angles", "-m", "{m}", "--text", "{t}/none", "-o", "{t}/x.png"), "cannot read the text"),
        (("angles", "-m", "{m}", "--questions", "{t}/other.jsonl", "-o", "{t}/x.png"), "line 1 of"),
        (("angles", "-m", "{m}", "--questions", "{t}/empty.jsonl", "-o", "{t}/x.png"), "no question at all: it is"),
        (("angles", "-m", "{m}", "--questions", "{t}/q.jsonl", "--question", "9", "-o", "{t}/x.png"), "it has 7, 8"),
        (("angles", "-m", "{m}", "--questions", "{t}/q.jsonl", "--tokens", "1k", "-o", "{t}/x.png"), "give one of"),
        (("angles", "-m", "{m}", "--question", "7", "-o", "{t}/x.png"), "is only used with --questions"),
    ],
)  # fmt: skip
def test_refusals(
    arguments: tuple[str, ...], said: str, results: Path, tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.png").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"task": "x"}\n')
    (tmp_path / "q.jsonl").write_text(QUESTIONS)
    filled = [a.format(r=results, t=tmp_path, a=ATTEND, m=tiny) for a in arguments]
    assert said in refuse(capfd, "plot", *filled)
    assert not list(tmp_path.glob("x*"))


def test_a_failed_write_leaves_the_old_file(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in refuse(capfd, "plot", "memory", str(results), "-o", str(tmp_path / "a.png"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "old"
    if os.geteuid():
        tmp_path.chmod(0o500)
        assert "cannot be written" in refuse(capfd, "plot", "memory", str(results), "-o", str(tmp_path / "b.png"))


def test_decoding_plot_agrees_with_the_record() -> None:
    """An earlier record names its context `depth` and has one dtype."""
    rows = runs.read(EARLIER)
    picture = render(plot("decoding"), decodings.read_decodings([EARLIER]))
    (table,) = picture.tables
    assert table.title == "decoding speed (smollm2, float32, prompt read whole)"
    told = {(row[0], row[1]): row for row in table.rows}
    assert len(told) == len(rows)
    for row in rows:
        rate, times = told[row["cache"], f"{row['depth']:,}"][2], told[row["cache"], f"{row['depth']:,}"][4]
        full = next(r for r in rows if r["cache"] == "full" and r["depth"] == row["depth"])
        assert rate == f"{row['tokens_per_second']:.2f}"
        assert times == f"{row['tokens_per_second'] / full['tokens_per_second']:.2f}"
    with pytest.raises(UserError, match=r"`tersekv plot decoding .*generate.jsonl` draws those"):
        timings.read_timings([EARLIER])


def test_decoding_by_dtype_and_way_to_read_the_prompt(tmp_path: Path) -> None:
    """One panel and table each; a missing row in one of them leaves a gap."""
    rows = []
    for dtype, chunk, cache in itertools.product(("float32", "bfloat16"), (None, 512), ("full", "kivi:bits=4")):
        for context in (1024, 8000):
            steps = [20.0, 25.0, 50.0] if dtype == "float32" else [8.0, 25.0, 50.0]
            found = Decoding(cache, dtype, context, chunk, "eager", 0, steps, [10.0, 10.0, 10.0])
            rows.append({"model": "tiny", **found.document()})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    picture = render(plot("decoding"), decodings.read_decodings([tmp_path / "a.jsonl"]))
    assert {axes.get_ylim() for axes in picture.figure.axes} == {(0, 1.05 * 125)}
    names = [f"{d}, prompt {w}" for d in ("float32", "bfloat16") for w in ("read whole", "in chunks of 512")]
    assert [table.title for table in picture.tables] == [f"decoding speed (tiny, {name})" for name in names]
    assert sorted(axes.get_title(loc="left") for axes in picture.figure.axes) == sorted(names)
    assert [len(table.rows) for table in picture.tables] == [4, 4, 4, 3]
    assert picture.tables[0].rows[1] == ["kivi:bits=4", "1,024", "40.00", "20.00–50.00", "1.00", "15.0"]
    assert "bfloat16, prompt in chunks of 512: full: 40.0." in picture.alt
