"""Output in addition to answers: progress without a terminal, warnings, and tables at any width."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tersekv import cli
from tersekv.cli import evaluate, output
from tersekv.lab.evals.harness import Summary
from tersekv.lab.evals.names import names_as_asked, short_names
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.evals.tasks.divergence import Divergence
from tersekv.models import loading

SHORT = 0.05


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Print progress lines after a twentieth of a second. Return the list that they are added to."""
    monkeypatch.setattr(output, "EVERY", SHORT)
    said: list[str] = []
    say = output._Shown.say
    monkeypatch.setattr(output._Shown, "say", lambda shown, line: say(shown, line) or said.append(line))
    output.begin()
    return said


def wait(until: Callable[[], object]) -> None:
    """Wait for another thread, which gets no time for long while the machine is busy."""
    end = time.monotonic() + 60
    while not until() and time.monotonic() < end:
        time.sleep(SHORT / 10)


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    said = capfd.readouterr()
    assert said.out == ""
    return said.err.splitlines()


# ---------------------------------------------------------------- progress


def test_lines_report_step_progress_and_time(hurry: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with output.step("reading the prompt", 30, "layers") as step:
        for done in range(1, 11):
            step.advance()
            wait(lambda done=done: len(hurry) > done // 4)
    found = lines(capfd)
    assert len(found) >= 3
    form = re.compile(r"reading the prompt: \d+ of 30 layers, \d+ s so far, about .* left")
    assert all(form.fullmatch(line) for line in found), found
    assert [line.split()[3] for line in found] == sorted((line.split()[3] for line in found), key=int)


def test_lines_report_the_innermost_step_on_the_original_stderr(
    hurry: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A conversion replaces sys.stderr for half a minute."""
    with output.step("getting a model"), contextlib.redirect_stderr(io.StringIO()) as swallowed:
        wait(lambda: hurry)
        with output.step("converting it"):
            wait(lambda: hurry[-1].startswith("converting it"))
            output.report("a line of its own")
    found = lines(capfd)
    assert swallowed.getvalue() == ""
    first = dict.fromkeys(line.split(":")[0] for line in found)
    assert list(first) == ["getting a model", "converting it", "a line of its own"]


def test_consecutive_short_steps_report_progress(hurry: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Each step is shorter than the interval between two lines."""
    start, steps = time.monotonic(), 0
    while len(hurry) < 2 and steps < 1000:
        with output.step(f"part {steps}"):
            time.sleep(SHORT / 2)
        steps += 1
    assert 2 <= len(lines(capfd)) <= (time.monotonic() - start) / SHORT + 1


def test_quick_steps_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    output.begin()
    with output.step("loading"):
        pass
    assert lines(capfd) == []


def test_time_left_ignores_samples_found_in_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 of 110 samples are in the records, and each of the others takes ten seconds."""
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    step = output.ProgressStep("evaluating", 110, "samples")
    assert step.seconds_left() is None
    for done in range(1, 101):
        now += 0.001
        step.at(done)
    for done in range(101, 106):
        now += 10
        step.at(done)
    assert step.seconds_left() == pytest.approx(50)
    now += 4
    assert step.seconds_left() == pytest.approx(46)
    assert step.far() == "105 of 110 samples, 54 s so far, about 46 s left"
    step.begin("fitting", 7, "layers")
    assert step.far() == "0 of 7 layers, 0 s so far"


def test_durations_are_readable() -> None:
    said = [output.clock(seconds) for seconds in (0.4, 59.6, 200, 7500)]
    assert said == ["0 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]


def test_long_commands_report_and_stdout_stays_clean(
    hurry: list[str], tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command is slowed down and must report its progress."""
    (tmp_path / "text.txt").write_text("Keys and values. " * 40)
    text = ("--text", str(tmp_path / "text.txt"))
    corpus = ("--samples", "2", "--length", "64", "--workers", "1")
    slow(monkeypatch, hurry)
    for arguments, said in (
        (("generate", "-p", "x" * 300, "--max-new-tokens", "8"), ("reading the prompt", "answering")),
        (("demo", "--tokens", "300", "--new-tokens", "8"), ("reading the prompt", "answering")),
        (("prompt-cache", "build", "-p", "x" * 300, "-o", str(tmp_path / "c")), ("reading the prompt",)),
        (("eval", "perplexity", *text, "--context", "64", "--windows", "2"), ("perplexity 0-",)),
        (("bench", "generate", "--context", "64", "--rounds", "1", "--new-tokens", "4"), ("timing full after 64 tok",)),
        (
            ("calibrate", "-r", "kvquant:bits=2", *text, *corpus, "--out", str(tmp_path)),
            ("computing gradients",),
        ),
        (("plot", "angles", "--tokens", "96", "-o", str(tmp_path / "a.png")), ("reading 96 tokens",)),
    ):
        assert cli.run([*arguments, "--model", tiny, "--json"]) == 0
        heard = capfd.readouterr()
        assert len(heard.out.splitlines()) == 1
        assert json.loads(heard.out)
        hurry.clear()
        for what in said:
            assert any(line.startswith(what) and "so far" in line for line in heard.err.splitlines()), heard.err


def slow(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Slow down linear layers until a line says what the running step does."""
    done = torch.nn.Linear.forward

    def later(*args: Any) -> Any:
        if output._shown is not None and output._shown.steps:
            what = output._shown.steps[-1].what
            wait(lambda: any(line.startswith(what) for line in said))
        return done(*args)

    monkeypatch.setattr(torch.nn.Linear, "forward", later)


def test_an_answer_is_not_mixed_with_progress(
    hurry: list[str], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If both streams go to one file, only the answer is printed, as progress."""
    slow(monkeypatch, hurry)
    call = ["generate", "-m", tiny, "-p", "x", "--max-new-tokens", "8"]
    for mixed in (False, True):
        monkeypatch.setattr(output, "shares_a_place", lambda mixed=mixed: mixed)
        hurry.clear()
        assert cli.run(call) == 0
        assert ("answering: " in capfd.readouterr().err) is not mixed


def test_a_terminal_gets_a_bar_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(output, "stderr", lambda: Console(file=screen, force_terminal=True, width=120))
    with output.step("outer"), output.step("reading [the] prompt", 3, "layers") as step:
        step.at(2, what="reading [on]")
        output.report("a line between")
        wait(lambda: "reading [on]" in screen.getvalue())  # bars are drawn ten times a second
    shown = screen.getvalue()
    assert "reading [on]" in shown
    assert re.search(r"2 of 3 layers, \d+ s so far", shown)
    assert "a line between" in shown


def test_times_stay_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long description is cut instead."""
    screen = io.StringIO()
    monkeypatch.setattr(output, "stderr", lambda: Console(file=screen, force_terminal=True, width=80))
    with output.step("divergence 1-65c3dcab with trellis:bits=3.5,calibration=prompt", 296, "evaluations") as step:
        step.at(4)
        wait(lambda: "4 of 296" in screen.getvalue())
    assert re.search(
        r"divergence 1-65c3dcab with \S*… 4 of 296 evaluations, \d+ s so far, about .* left", screen.getvalue()
    )


# ---------------------------------------------------------------- warnings and the log


def test_warnings_are_plain_lines_with_details_if_verbose(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["generate", "-m", tiny, "-p", "x" * 300, "--max-new-tokens", "2", "-r", "kivi:bits=2", "--json"]
    load = loading.load

    def warns(*args: Any) -> Any:
        logging.getLogger("tersekv.models.loading").warning("the model is\n odd")
        warnings.warn("so is its tokenizer", stacklevel=1)
        return load(*args)

    monkeypatch.setattr(loading, "load", warns)
    for verbose in ([], ["--verbose"]):
        assert cli.run([*verbose, *call]) == 0
        heard = capfd.readouterr()
        assert json.loads(heard.out)["prompt_tokens"] == 303
        said = heard.err.splitlines()
        assert "tersekv: warning: the model is odd" in said
        assert "tersekv: warning: so is its tokenizer" in said
        assert (f"tersekv: loaded {tiny} from {tiny}" in said) is bool(verbose)
        assert any(line.startswith("tersekv: packing 160 tokens with ") for line in said) is bool(verbose)
    assert logging.getLogger("tersekv").level == logging.NOTSET


def test_the_library_logs_and_does_not_print() -> None:
    """Messages are invisible without a log handler, and only the generator of codebooks prints."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("tersekv").handlers)
    package = Path(cli.__file__).parents[1]
    for path in package.rglob("*.py"):
        if path.parent.name == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not named or path.name == "trellis.py", path
    assert (package / "py.typed").is_file()


# ---------------------------------------------------------------- tables


RECIPES = (
    *("full", "kivi:bits=2", "trellis:bits=3.5,calibration=prompt", "trellis:bits=2,calibration=prompt"),
    *("window:recent=64,sinks=8+kivi:bits=2", "kvquant:bits=4", "snapkv:budget=0.25+turboquant:bits=2.5"),
)


@pytest.mark.parametrize("width", [80, 100, 132])
@pytest.mark.parametrize("quarters", [False, True])
def test_table_words_are_not_broken(width: int, quarters: bool) -> None:
    """Every short name, heading and number is whole, and lines fit. Quarters are shown only on
    request."""
    metrics = {"kl": 0.003568, "top1_agreement": 0.9697, "nll": 3.063, "perplexity_ratio": 1.0043, "kl_q1": 1.367e-07}
    made = {name: Estimate(mean, mean / 7) for name, mean in metrics.items()}
    found = [Summary("divergence", recipe, 8, 2304, 5.79, 19_220_000, made, 123.6) for recipe in RECIPES]
    names = names_as_asked([summary.recipe for summary in found], ["default"])
    task = Divergence(prefix=1024)
    table = evaluate._table("divergence", task, found, names, quarters)
    screen = io.StringIO()
    Console(file=screen, width=width).print(table)
    said = screen.getvalue()
    assert max(map(len, said.splitlines())) <= width
    cells = {cell.strip() for line in said.splitlines() for cell in re.split("[│┃]", line)}
    assert set(names.values()) < cells
    assert names["trellis:bits=3.5,calibration=prompt"] == "default"
    assert names["window:recent=64,sinks=8+kivi:bits=2"] == "window+kivi:bits=2"
    assert {"samples", "0.003568 ± 0.00051", "19.22 MB"} < cells
    for first, second in (("top1", "agreement"), ("perplexity", "ratio")):
        assert {first, second} < cells or f"{first} {second}" in cells
    assert ("kl q1" in cells) is quarters
    assert "default = trellis:bits=3.5,calibration=prompt" in said
    assert "(mode=cache)" in said


def test_short_names_of_recipes_are_distinct() -> None:
    recipes = ["trellis:bits=2", "trellis:bits=2,calibration=prompt", "qjl/uniform:bits=4,group=32", "kivi:bits=2"]
    recipes += ["kivi:bits=2;0=exact", "kivi:bits=2,group=64", "window:recent=64+kivi:bits=2", "fp8"]
    short = short_names(recipes)
    assert len(set(short.values())) == len(recipes)
    assert short["qjl/uniform:bits=4,group=32"] == "qjl/uniform:bits=4"
    assert short["kivi:bits=2,group=64"] == "kivi:bits=2,group=64"
    assert short["window:recent=64+kivi:bits=2"] == "window+kivi:bits=2"


def test_text_columns_are_wrapped_between_words() -> None:
    screen = io.StringIO()
    row = ("kivi", "integers per token or channel, any group of them, and a long title besides", "5.00")
    Console(file=screen, width=60).print(output.table("t", ("method", "what it stores", "bits"), [row], left=2))
    words = " ".join(re.sub("[│┃]", " ", screen.getvalue()).split())
    assert all(word in words.split() for word in row[1].split())
