"""`tersekv eval`: its document and table, options of tasks, errors, interruptions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import pytest
from rich.console import Console

from tersekv import UserError, cli
from tersekv.calibration.text import pydoc_text
from tersekv.cli import output
from tersekv.lab.evals import options, runs
from tersekv.lab.evals.harness import Harness
from tersekv.lab.evals.tasks import tasks
from tersekv.lab.evals.tasks.divergence import in_words
from tersekv.lab.evals.tasks.perplexity import Perplexity
from test_cli import refuse, run_json, run_text

TEXT = pydoc_text()[:2000]


@pytest.fixture
def common(tiny: str, tmp_path: Path) -> tuple[str, ...]:
    """Return a command that takes a second."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return ("eval", "perplexity", "-m", tiny, "--text", str(tmp_path / "text.txt"), "--context", "64", "--windows", "2")


def test_document(common: tuple[str, ...], tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = run_json(
        capfd, *common, "divergence", "--mode", "simulate", "-r", "kivi:bits=2,4", "-r", "full", "-r", "kivi"
    )
    assert list(made) == ["model", "results"]
    assert made["model"] == tiny
    assert [(r["task"], r["recipe"]) for r in made["results"]] == [
        (task, recipe)
        for task in ("perplexity", "divergence")
        for recipe in ("full", "kivi:bits=2", "kivi:bits=4", "kivi")
    ]
    for result in made["results"]:
        assert list(result) == [
            *("task", "recipe", "samples", "tokens", "bits_per_element", "bytes", "metrics", "seconds"),
        ]
        assert (result["samples"], result["tokens"]) == (2, 64)
        assert all(list(metric) == ["mean", "stderr"] for metric in result["metrics"].values())
    full, packed = made["results"][0], made["results"][1]
    assert (full["bits_per_element"], full["bytes"]) == (32, 64 * 2 * 2 * 32 * 4)
    # head dim 32 with groups of 32 takes the same 3 bits as 64; 16 bytes are the table of 2-bit
    # codes
    assert packed["bytes"] == full["bytes"] * 3 // 32 + 16
    assert full["metrics"]["perplexity_ratio"] == {"mean": 1, "stderr": 0}
    assert packed["metrics"]["perplexity"]["stderr"] > 0
    assert made["results"][5]["metrics"]["kl"]["mean"] > made["results"][6]["metrics"]["kl"]["mean"] > 0


def test_across_has_a_column_per_recipe(common: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """It prints README's row. CSV keeps one line per recipe."""
    call = ("eval", "divergence", *common[2:], "--prefix", "32", "-r", "kivi:bits=4", "-r", "kivi:bits=2", "--across")
    said = run_text(capfd, *call, "--format", "md").splitlines()
    assert said[2] == "|  | full | kivi:bits=4 | kivi:bits=2 |"
    assert [line.split(" | ")[0] for line in said[4:8]] == ["| samples", "| bits", "| bytes", "| kl"]
    lines = run_text(capfd, *call, "--format", "csv").splitlines()
    assert lines[0].startswith("recipe,samples,bits,bytes,kl")
    assert [line.partition(",")[0] for line in lines[1:4]] == ["full", "kivi:bits=4", "kivi:bits=2"]


def test_single_sample_has_no_standard_error(common: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    made = run_json(capfd, *common, "--windows", "1")
    assert [r["recipe"] for r in made["results"]] == ["full"]
    assert made["results"][0]["metrics"]["perplexity"]["stderr"] is None
    said = run_text(capfd, *common, "--windows", "1")
    assert "±" not in said


def test_table(common: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    said = run_text(capfd, *common, "-r", "kivi:bits=2", "--mode", "cache")
    assert "perplexity: 2 windows of 64 tokens of text.txt, 128 tokens at a time through the real" in said
    assert "(mode=cache)" in said
    assert "1 ± 0" in said
    assert max(map(len, said.splitlines())) <= output.WIDTH_WHEN_PIPED


def test_out_keeps_records_and_uses_them(
    common: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", str(tmp_path / "out"))
    first = run_json(capfd, *common, *out)
    assert len(runs.read(tmp_path / "out" / "records.jsonl")) == 2
    header = json.loads((tmp_path / "out" / "records.jsonl").read_text().splitlines()[0])["run"]
    assert {"command", "cpu", "flags", "isa", "threads", "versions", "task", "options", "model", "seed"} <= set(header)
    monkeypatch.setattr(Perplexity, "evaluate", lambda *_: pytest.fail("a record was there"))
    assert run_json(capfd, *common, *out) == first


@pytest.mark.parametrize("arguments", [("divergence", "--text", "/nowhere"), ("ruler", "--data", "/nowhere")])
def test_files_are_checked_before_the_model_is_loaded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cli.evaluate, "load", lambda *_: pytest.fail("the model was loaded"))
    assert "/nowhere" in refuse(capfd, "eval", *arguments)


def test_words_are_of_the_measured_agreement() -> None:
    assert in_words(0.08738, 0.8242) == "18% of the tokens change"
    assert in_words(0.005, 0.93) == "7% of the tokens change"
    assert in_words(0.0025, 0.988) == in_words(0.0025)
    assert in_words(0.4, 0.8) == in_words(float("nan"), 0.8) == "RUINED: choose another recipe"


@pytest.mark.parametrize("keeps", [True, False])
def test_interrupt_says_how_to_go_on(
    common: tuple[str, ...],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    evaluate, calls = Perplexity.evaluate, []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(Perplexity, "evaluate", interrupted)
    out = ("--out", str(tmp_path / "out")) if keeps else ()
    assert cli.run([*common, "-r", "kivi:bits=2", *out]) == 130
    said = capfd.readouterr()
    assert ("continues from there" if keeps else "nothing was kept") in " ".join(said.err.split())
    assert said.out == ""
    if keeps:
        assert [r["recipe"] for r in runs.read(tmp_path / "out" / "records.jsonl")] == ["full", "kivi:bits=2"]
        assert run_json(capfd, *common, "-r", "kivi:bits=2", *out)["results"][1]["samples"] == 2
        assert len(calls) == 5


def test_bar_with_the_time_left(
    common: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "screen").open("w") as screen:
        monkeypatch.setattr(output, "stderr", lambda: Console(file=screen, force_terminal=True, width=160))
        assert cli.run([*common, "-r", "kivi:bits=2"]) == 0
    shown = (tmp_path / "screen").read_text()
    assert "perplexity" in shown
    assert "of 4 evaluations" in shown
    assert "left" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("perplexitty",), "did you mean 'perplexity'"),
        (("perplexity", "--samples", "4"), "--samples is not an option of perplexity; "),
        (("perplexity", "--context", "two"), "--context 'two' is not a whole number"),
        (("perplexity", "--mode", "both"), "choose cache or simulate"),
        (("perplexity", "--context", "1M"), "exceeds the model's 2,048"),
        (("perplexity", "--text", "nowhere.txt"), "cannot read the text"),
        (("perplexity", "--recipe", "kivy"), "did you mean 'kivi'"),
        (("perplexity", "--recipe", "kivi:bits=4..2"), "the smaller one first"),
        (("perplexity", "--recipe", "int4"), "head dim"),
        (("perplexity", "--nothing", "1"), "--nothing"),
        ((), "TASK"),
    ],
    ids=" ".join,
)
def test_refusals(tiny: str, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refuse(capfd, "eval", *arguments, "--model", tiny)


def test_out_that_is_a_file_is_refused(
    common: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "is a file: give a folder" in refuse(capfd, *common, "--out", str(tmp_path / "text.txt"))


def test_help_shows_every_option_with_its_tasks(capfd: pytest.CaptureFixture[str]) -> None:
    said = " ".join(run_text(capfd, "eval", "--help").split())
    for name, task in tasks().items():
        assert name in said
        for field in dataclasses.fields(task):
            assert f"--{field.name.replace('_', '-')} " in said


# ---------------------------------------------------------------- options


def test_every_field_of_a_task_can_be_written() -> None:
    for task in tasks().values():
        for name, kind in get_type_hints(task).items():
            assert name not in ("tasks", "recipe", "model", "out", "json"), "the command has an option of that name"
            assert kind in (str, int, float, bool) or get_origin(kind) is Literal, f"{task.__name__}.{name}: {kind}"
        assert task() == task()


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("2k", int, 2048),
        ("7", int, 7),
        ("1M", int, 1 << 20),
        ("0.5", float, 0.5),
        ("True", bool, True),
        ("a,b", str, "a,b"),
    ],
)
def test_values(text: str, kind: Any, value: Any) -> None:
    assert options.parse("x", text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("2.5", int, "whole number"),
        ("-1", int, "whole number"),
        ("x", float, "not a number"),
        ("yes", bool, "true or false"),
    ],
)
def test_wrong_values(text: str, kind: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"--an-x '{text}' is .*{said}"):
        options.parse("an_x", text, kind)


def test_option_goes_to_every_task_that_has_it() -> None:
    made = options.build(["perplexity", "divergence"], {"windows": "7"})
    assert [task.windows for task in made.values()] == [7, 7]  # type: ignore[attr-defined]


def test_an_unsupported_recipe_stops_before_any_sample(tiny: str) -> None:
    from tersekv.models.loading import load

    with pytest.raises(UserError, match="head dim"):
        Harness(*load(tiny), tiny, ["kivi", "int4"])
