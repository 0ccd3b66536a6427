"""The harness: products of recipes, records that survive a kill, summaries."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tersekv import UserError, __version__
from tersekv.calibration.text import pydoc_text
from tersekv.lab.evals import records as recording
from tersekv.lab.evals import runs
from tersekv.lab.evals.harness import Harness
from tersekv.lab.evals.haystack import read_text
from tersekv.lab.evals.options import build
from tersekv.lab.evals.products import expand
from tersekv.lab.evals.records import FILE, Records
from tersekv.lab.evals.tasks import Estimate, Task
from tersekv.lab.evals.tasks.divergence import Divergence
from tersekv.lab.evals.tasks.lines import Lines
from tersekv.lab.evals.tasks.needle import Needle
from tersekv.lab.evals.tasks.perplexity import Perplexity
from tersekv.lab.plots.groups import grouped
from tersekv.models.loading import load

RECIPES = ["kivi:bits=2", "turboquant:bits=3"]
SHORT: dict[str, Any] = {"lengths": "512", "depths": "50"}


@pytest.fixture(scope="module")
def harness(tiny: str) -> Harness:
    return Harness(*load(tiny), "tiny", RECIPES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a text of 2,000 tokens of the tiny model."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(pydoc_text()[:2000], encoding="utf-8")
    return str(path)


@pytest.fixture
def tasks(text: str) -> dict[str, Task]:
    return {
        "perplexity": Perplexity(text, context=64, windows=2),
        "divergence": Divergence(text, context=64, windows=1, mode="cache", chunk=16),
    }


def lines(folder: Path) -> list[dict[str, Any]]:
    return runs.read(folder / FILE)


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "seconds": None, "command": None} for record in records]


# ---------------------------------------------------------------- products


@pytest.mark.parametrize(
    ("product", "recipes"),
    [
        ("kivi", ["kivi"]),
        ("turboquant:bits=2..4", ["turboquant:bits=2", "turboquant:bits=3", "turboquant:bits=4"]),
        (
            "uniform:bits=2,4,group=32,64",
            [f"uniform:bits={b},group={g}" for b in (2, 4) for g in (32, 64)],
        ),
        ("window:sinks=0,4+kivi:bits=2,3..4", [f"window:sinks={s}+kivi:bits={b}" for s in (0, 4) for b in (2, 3, 4)]),
        ("qjl/uniform:bits=2,4", ["qjl/uniform:bits=2", "qjl/uniform:bits=4"]),
        ("kivi:bits=2;0-1=exact;-1=uniform:bits=3..4", [f"kivi:bits=2;0-1=exact;-1=uniform:bits={b}" for b in (3, 4)]),
        ("kivi:bits=2,2", ["kivi:bits=2"]),
        ("uniform:group=64, bits=2", ["uniform:bits=2,group=64"]),
    ],
)
def test_products(product: str, recipes: list[str]) -> None:
    assert expand(product) == recipes


@pytest.mark.parametrize(
    ("product", "said"),
    [
        ("kivi:bits=4..2", "the smaller one first"),
        ("kivi:bits=2..x", "is not a valid range"),
        ("kivi:bits=1..99999", "more than 1,000 values"),
        ("kivi:bits=2..4,group=1..999", "at most 1,000"),
        ("kivi:2,4", "is not an option"),
        ("kivi:bits=2,9", "bits=9"),
        ("kivy:bits=2..4", "did you mean 'kivi'"),
    ],
)
def test_wrong_products(product: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        expand(product)


# ---------------------------------------------------------------- runs


def test_run_writes_a_record_per_task_sample_and_recipe(
    harness: Harness, tasks: dict[str, Task], tmp_path: Path
) -> None:
    seen = []
    with Records(tmp_path / "deep" / "out") as records:
        summaries = harness.run(tasks, records, seen.append)
    made = lines(tmp_path / "deep" / "out")
    assert [r["recipe"] for r in made] == ["full", *RECIPES] * 3
    assert [r["task"] for r in made] == ["perplexity"] * 6 + ["divergence"] * 3
    assert [(at.done, at.total) for at in seen] == [(i, 9) for i in range(9)]
    record = made[1]
    assert list(record) == [
        *("task", "options", "model", "weights", "seed", "versions", "sample", "recipe", "metrics", "tokens"),
        *("bits_per_element", "bytes", "bytes_by_part", "details", "seconds"),
    ]
    text = (tmp_path / "deep" / "out" / FILE).read_text()
    assert text.count('{"run": {') == 2  # one per task
    assert record["options"]["context"] == 64
    assert set(record["versions"]) == {"tersekv", "torch", "transformers", "python"}
    assert record["bytes"] == sum(record["bytes_by_part"].values()) > 0
    assert [(s.task, s.recipe, s.samples) for s in summaries] == [
        *(("perplexity", recipe, 2) for recipe in ["full", *RECIPES]),
        *(("divergence", recipe, 1) for recipe in ["full", *RECIPES]),
    ]
    nll = Estimate.of([r["metrics"]["nll"] for r in made[:6] if r["recipe"] == "kivi:bits=2"])
    assert summaries[1].metrics["perplexity"].mean == pytest.approx(math.exp(nll.mean))
    document = summaries[4].document()
    assert list(document) == ["task", "recipe", "samples", "tokens", "bits_per_element", "bytes", "metrics", "seconds"]
    assert document["metrics"]["kl"]["stderr"] is None
    assert document["metrics"]["kl"]["mean"] == pytest.approx(made[7]["metrics"]["kl"], rel=1e-6)


@pytest.mark.parametrize("cut", [0, 1, 700, -1, -300], ids=lambda cut: f"cut at {cut}")
def test_truncated_file_is_completed(harness: Harness, tasks: dict[str, Task], tmp_path: Path, cut: int) -> None:
    with Records(tmp_path / "whole") as records:
        wanted = harness.run(tasks, records)
    data = (tmp_path / "whole" / FILE).read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / FILE).write_bytes(data[:cut])
    kept = sum(b'"seconds"' in line for line in data[:cut].split(b"\n")[:-1])
    seconds = [record["seconds"] for record in lines(tmp_path / "whole")][:kept]
    with Records(tmp_path / "cut") as records:
        got = harness.run(tasks, records)
    assert timeless(lines(tmp_path / "cut")) == timeless(lines(tmp_path / "whole"))
    assert [record["seconds"] for record in lines(tmp_path / "cut")][:kept] == seconds
    assert [s.metrics for s in got if s.samples > 1] == [s.metrics for s in wanted if s.samples > 1]


def test_one_file_holds_other_options_recipes_and_models(
    harness: Harness, tiny: str, text: str, tmp_path: Path
) -> None:
    one, other = {"perplexity": Perplexity(text, context=64)}, {"perplexity": Perplexity(text, context=32)}
    for asked in (one, other, one):
        with Records(tmp_path) as records:
            harness.run(asked, records)
    assert [r["options"]["context"] for r in lines(tmp_path)] == [64] * 12 + [32] * 12
    with Records(tmp_path) as records:
        Harness(*load(tiny), "tiny", ["kivi:bits=4", "kivi:bits=2"]).run(one, records)
        assert [r["recipe"] for r in lines(tmp_path)[24:]] == ["kivi:bits=4"] * 4
        Harness(*load(tiny), "another", []).run(one, records)
    assert {r["model"] for r in lines(tmp_path)[28:]} == {"another"}


def test_another_text_or_other_weights_are_read_again(tiny: str, tmp_path: Path) -> None:
    """Also under the names of the text and the model that were read before."""
    model, tokenizer = load(tiny)
    file, seen = tmp_path / "text.txt", []
    for said, change in (("One two. ", 0), ("One two. ", 0), ("Two one. ", 0), ("Two one. ", 1)):
        file.write_text(said * 300)
        read_text.cache_clear()  # as in another process
        with torch.no_grad():
            model.get_output_embeddings().weight.add_(change)
        with Records(tmp_path) as records:
            Harness(model, tokenizer, "tiny", ["kivi:bits=2"]).run({"needle": Needle(text=str(file), **SHORT)}, records)
        seen.append(len(lines(tmp_path)))
    assert seen == [2, 2, 4, 6]
    (before, after) = grouped(lines(tmp_path))
    assert [s.samples for s in before.summaries + after.summaries] == [1] * 4


def test_another_chat_template_is_read_again(tiny: str, tmp_path: Path) -> None:
    """Also if the text of the sample is the same, and its records are not compared."""
    model, tokenizer = load(tiny)

    def run() -> list[dict[str, Any]]:
        with Records(tmp_path) as records:
            Harness(model, tokenizer, "tiny", ["kivi:bits=2"]).run({"lines": Lines(samples=1, lines="3")}, records)
        return lines(tmp_path)

    first = run()
    tokenizer.chat_template = "Be brief. " + tokenizer.chat_template
    made = run()
    assert [r["given"] == made[0]["given"] for r in made] == [True, True, False, False]
    assert len({r["content"] for r in made}) == 1
    for with_full, packed in ((first[0], first[1]), (first[0], made[3])):
        (group,) = grouped([with_full, packed])
        assert ("kivi:bits=2" in group.records) == (packed is first[1])


def test_records_of_other_versions_are_named(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> int:
        caplog.clear()
        with Records(tmp_path) as records:
            harness.run({"needle": Needle(**SHORT)}, records)
        return len(lines(tmp_path))

    assert (run(), run(), caplog.messages) == (3, 3, [])
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole.replace(f'"tersekv": "{__version__}"', '"tersekv": "0.0.9"'))
    assert run() == 3
    (said,) = caplog.messages
    assert f"holds 3 results of tersekv 0.0.9, which this run of tersekv {__version__} uses: give another" in said
    (tmp_path / FILE).write_text(re.sub('"given": "[^"]*", ', "", whole, count=1))
    assert run() == 3
    (said,) = caplog.messages
    assert f"holds 1 result of tersekv {__version__} without a hash of the tokens read, which" in said


def test_wrong_recipes_are_refused_before_anything_runs(tiny: str) -> None:
    with pytest.raises(UserError, match="head dim"):
        Harness(*load(tiny), "tiny", ["kivi:bits=2", "int4"])


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("snapkv+exact", {"pack": "during-prefill"}, "evicts tokens, .*: use pack=after-prompt, or"),
        ("snapkv+exact", {"mode": "simulate"}, "evicts tokens, .*: use mode=cache, or"),
        ("kivi", {"pack": "during-prefill"}, None),
    ],
)
def test_unsuitable_recipes_are_refused_before_the_first_sample(
    tiny: str, text: str, recipe: str, options: dict[str, str], said: str | None
) -> None:
    tasks = build(["divergence", "passkey"], {"text": text, "context": "64", "lengths": "512", **options})
    run, seen = Harness(*load(tiny), "tiny", [recipe]), []

    def stop(at: Any) -> None:
        seen.append(at)
        raise InterruptedError

    with pytest.raises(UserError if said else InterruptedError, match=said):
        run.run(tasks, progress=stop)
    assert bool(seen) == (said is None)


KILLED = """
import os, signal, sys
from tersekv import cli
from tersekv.lab.evals.tasks.perplexity import Perplexity

evaluate, calls = Perplexity.evaluate, []

def killed(*args):
    calls.append(1)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(*args)

Perplexity.evaluate = killed
cli.run(sys.argv[1:])
"""


def test_killed_run_continues(tiny: str, text: str, tmp_path: Path) -> None:
    """The same command completes the records of a killed process, equal to those of an
    uninterrupted run."""
    common = ["eval", "perplexity", "-m", tiny, "--text", text, "-r", "kivi:bits=2", "-r", "turboquant"]
    common += ["--context", "160", "--windows", "4", "--mode", "cache", "--chunk", "32", "--out"]
    out = tmp_path / "killed"
    killed = subprocess.run([sys.executable, "-c", KILLED, *common, str(out)], stdout=subprocess.DEVNULL, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(lines(out)) == 4
    for folder in (out, tmp_path / "whole"):
        start = [sys.executable, "-m", "tersekv", *common, str(folder)]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL)
    assert timeless(lines(out)) == timeless(lines(tmp_path / "whole"))
    assert len(lines(out)) == 12


# ---------------------------------------------------------------- the file


def test_records_without_a_folder_are_kept_in_memory(harness: Harness, text: str) -> None:
    task = {"perplexity": Perplexity(text, context=32)}
    with Records() as records:
        first = harness.run(task, records)
        assert harness.run(task, records) == first  # equal seconds show that nothing ran again


def test_file_is_locked_and_checked(harness: Harness, text: str, tmp_path: Path) -> None:
    with Records(tmp_path) as records:
        harness.run({"perplexity": Perplexity(text, context=32, windows=1)}, records)
        with pytest.raises(UserError, match="another run is writing"), Records(tmp_path):
            pass
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole + '{"half": ')
    assert [recording.key_of(r) for r in recording.read(tmp_path)] == [
        recording.key_of(r) for _, r in runs.expanded(whole.splitlines())
    ]
    assert (tmp_path / FILE).read_text() == whole + '{"half": '
    (tmp_path / FILE).write_text(whole.rstrip("\n"))
    with Records(tmp_path):
        pass
    assert (tmp_path / FILE).read_text() == whole  # nothing is lost of a whole last record
    for foreign in ('{"a": 1}', "notes", '{\n "a": 1\n}', "1\n2"):
        (tmp_path / FILE).write_text(foreign)
        with pytest.raises(UserError, match="is not a record"), Records(tmp_path):
            pass
        assert (tmp_path / FILE).read_text() == foreign
    (tmp_path / FILE).write_text("\nno record\n" + whole)
    with pytest.raises(UserError, match="line 2 of"), Records(tmp_path):
        pass
    with pytest.raises(UserError, match="cannot read records"):
        recording.read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write records"), Records(tmp_path / "file" / "below"):
        pass


def test_a_run_over_more_windows_reuses_records() -> None:
    asked = dict.fromkeys(recording.KEY, "x") | {"options": {"windows": 2, "context": 64}}
    more = asked | {"options": {"windows": 4, "context": 64}}
    assert recording.key_of(asked) == recording.key_of(more)
    assert recording.key_of(asked) != recording.key_of(asked | {"options": {"windows": 2, "context": 65}})


def test_the_time_of_packing_is_part_of_the_request() -> None:
    asked = dict.fromkeys(recording.KEY, "x") | {"options": {"samples": 2, "lengths": "1k"}}
    now, after = (asked | {"options": asked["options"] | {"pack": p}} for p in ("before-question", "after-prompt"))
    assert recording.key_of(asked) == recording.key_of(now)  # records of earlier versions have no such option
    assert recording.key_of(asked) != recording.key_of(after)


def test_metrics_that_are_not_finite_are_null(harness: Harness) -> None:
    from tersekv.cache.footprint import Footprint
    from tersekv.lab.evals.tasks import Result

    asked = dict.fromkeys(recording.KEY, "x") | {"options": {}}
    with Records() as records:
        kept = records.add(recording.make(asked, Result({"a": math.nan, "b": 1.0}, 3, Footprint()), {"x": 1}, 0.5))
    assert kept["metrics"] == {"a": None, "b": 1.0}
    assert kept["details"] == {"x": 1}
