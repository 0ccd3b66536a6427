"""`tersekv generate` and `tersekv demo`: answers, tables, sampling, and wrong input."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tersekv import cli
from tersekv.cache.footprint import Footprint
from tersekv.cli import measure, output
from tersekv.cli.bare import as_csv
from tersekv.cli.generate import summary
from test_cli import refuse, run_json, run_text

CACHE_KEYS = ["recipe", "tokens", "bytes", "bytes_by_part", "bits_per_element", "ratio_bf16", "ratio_fp8"]
KEYS = [
    "answer",
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "prefill_seconds",
    "decode_tokens_per_second",
    "peak_bytes",
    "cache",
]


def test_generate_json(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = run_json(capfd, "generate", "-m", tiny, "-r", "kivi:bits=4", "-p", "x" * 400, "--max-new-tokens", "5")
    assert list(made) == KEYS
    assert list(made["cache"]) == CACHE_KEYS
    assert made["prompt_tokens"] == 400 + 3
    assert 1 <= made["new_tokens"] <= 5
    assert made["prefill_seconds"] > 0
    held = made["cache"]
    assert held["recipe"] == "kivi:bits=4"
    assert held["bytes"] == sum(held["bytes_by_part"].values())
    assert held["bytes_by_part"]["codes"] > 0
    elements = 2 * held["tokens"] * 2 * 32
    assert held["bits_per_element"] == pytest.approx(held["bytes"] * 8 / elements, abs=1e-3)
    assert held["ratio_bf16"] == pytest.approx(16 / held["bits_per_element"], abs=1e-3)
    assert held["ratio_fp8"] == pytest.approx(8 / held["bits_per_element"], abs=1e-3)


def test_generate_compare_json(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = run_json(capfd, "generate", "-m", tiny, "-p", "x" * 100, "--max-new-tokens", "6", "--compare")
    assert list(made) == ["full", "packed", "agreement", "divergence"]
    assert list(made["full"]) == list(made["packed"]) == KEYS
    full = made["full"]["cache"]
    assert full["recipe"] == "full"
    # float32 keys and values of every token except the last, which was never fed.
    assert full["bytes"] == full["tokens"] * 2 * 2 * 32 * 4
    assert full["bytes_by_part"] == {"exact": full["bytes"]}
    assert full["bits_per_element"] == 32
    assert full["tokens"] == made["full"]["prompt_tokens"] + made["full"]["new_tokens"] - 1
    # All tokens are in the exact window, so the two differ only by rounding to 16 bits.
    assert made["agreement"] >= 1
    assert 0 <= made["divergence"]["kl"] < 0.01
    assert made["divergence"]["words"] == "hardly a token changes"
    assert made["divergence"]["tokens"] <= made["full"]["new_tokens"]


def test_generate_in_chunks_and_another_dtype(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    call = "generate", "-m", tiny, "-p", "x" * 300, "--max-new-tokens", "4", "--compare", "--dtype", "bfloat16"
    made = run_json(capfd, *call, "--prefill-chunk", "64")
    full = made["full"]["cache"]
    assert full["bits_per_element"] == 16
    assert full["ratio_bf16"] == 1
    assert made["packed"]["prompt_tokens"] == 303
    assert "--dtype 'int8' is not one of" in refuse(capfd, "generate", "-p", "x", "--dtype", "int8")
    assert "--prefill-chunk" in refuse(capfd, "generate", "-p", "x", "--prefill-chunk", "0")


def test_generate_as_csv_prints_only_the_table(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "-m", tiny, "-p", "x", "--max-new-tokens", "3", "--format", "csv"]) == 0
    said = capfd.readouterr()
    rows = list(csv.reader(said.out.strip().splitlines()))
    assert [row[0] for row in rows] == ["cache", "trellis:bits=3.5,calibration=prompt"]
    by_name = dict(zip(*rows, strict=True))
    assert int(by_name["tokens in the cache"]) == 6
    assert int(by_name["cache, all parts (bytes)"]) > 0
    assert all(float(number or 0) >= 0 for name, number in by_name.items() if name != "cache")
    assert "gains from" in said.err


def test_generate_streams_and_shows_a_table(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = run_text(
        capfd, "generate", "-m", tiny, "-p", "hello", "--max-new-tokens", "4", "--compare", "--threads", "1"
    )
    assert "--- full cache" in said
    assert "true bits per element" in said
    assert "unpacked keys and values" in said
    assert "scales and norms" in said


def test_summary_says_how_answers_part_and_what_is_larger() -> None:
    held = Footprint(tokens=10, elements=1000, parts={"exact": 4000})
    a = measure.Outcome("full", "", [1, 2, 3], 8, 1.0, 1.0, held, 1, "")
    differs = {"agreement": 1, "divergence": {"kl": 0.001, "tokens": 2, "words": "hardly a token changes"}}
    table = summary([a, replace(a, new_ids=[1, 4, 5])], "", differs)
    assert any("The answers part" in note for note in table.notes)
    row = next(row for row in table.rows if row[0] == "times smaller than bfloat16")
    assert row[1] == "2.00 times larger"
    assert as_csv(table).splitlines()[1].split(",").count("0.5") == 1
    table = summary([a, a], "", {**differs, "agreement": 3})
    assert not any("The answers part" in note for note in table.notes)


def test_generate_reads_file_question_and_stdin(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("naïve – text", encoding="utf-8")
    common = ("generate", "-m", tiny, "--max-new-tokens", "2", "--raw")
    file = ("-f", str(tmp_path / "text"))
    length = len("naïve – text".encode())
    assert run_json(capfd, *common, *file)["prompt_tokens"] == length
    assert run_json(capfd, *common, *file, "-q", "Why?")["prompt_tokens"] == length + len("\n\nWhy?")
    for extra in ((), ("-f", "-")):
        with (tmp_path / "text").open(encoding="utf-8") as piped:
            monkeypatch.setattr(sys, "stdin", piped)
            assert run_json(capfd, *common, *extra)["prompt_tokens"] == length


def test_generate_sampling_is_seeded(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    common = ("generate", "-m", tiny, "-p", "hello", "--max-new-tokens", "12", "--temperature", "2")
    answers = [run_json(capfd, *common, "--seed", seed)["answer"] for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]


def test_progress_bar_moves_and_leaves_no_hooks(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from tersekv.models import loading

    model, _ = loading.load(tiny)
    with Path("/dev/null").open("w") if Path("/dev/null").exists() else sys.stderr as sink:
        monkeypatch.setattr(output, "stderr", lambda: Console(file=sink, force_terminal=True))
        with output.step("doing something"):
            pass
        with measure.prefill_progress(model) as end:
            assert all(layer._forward_hooks for layer in model.model.layers)
            model(torch.tensor([[5, 6]]))
            end()
            assert not any(layer._forward_hooks for layer in model.model.layers)


def test_peak_memory_sees_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    with measure.PeakMemory() as memory:
        held = torch.ones(32 << 20)
        del held
    if not memory.source.startswith("VmHWM"):
        pytest.skip("the high-water mark cannot be reset on this system")
    assert memory.peak_bytes > 100e6

    def refuse_write(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "write_text", refuse_write)
    with measure.PeakMemory() as other:
        pass
    assert other.source == "ru_maxrss of getrusage"
    assert other.peak_bytes >= 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--recipe", "kivy:bits=2"), "did you mean 'kivi'"),
        (("--recipe", "kivi:bit=2"), "did you mean 'bits'"),
        (("--recipe", "kivi:bits=9"), "bits"),
        (("--recipe", "kivi:group=33"), "group"),
        (("--recipe", "kivi:bits=2;9=exact"), "layers"),
        (("--recipe", ""), "a recipe is"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
        (("--threads", "none"), "--threads"),
        (("--max-new-tokens", "5000"), "context is 2,048"),
        (("--no-such-option",), "--no-such-option"),
        (("--file", "nowhere.txt"), "--prompt and --file"),
        (("extra",), "extra"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, tuple) else "",
)
def test_generate_refuses(tiny: str, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refuse(capfd, "generate", "--model", tiny, "--prompt", "hello", *arguments)


def test_generate_refuses_texts(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    common = ("generate", "--model", tiny)
    assert "not UTF-8" in refuse(capfd, *common, "-f", str(tmp_path / "binary"))
    assert "empty" in refuse(capfd, *common, "-f", str(tmp_path / "empty"))
    assert "cannot read" in refuse(capfd, *common, "-f", str(tmp_path / "nowhere"))
    assert "cannot read" in refuse(capfd, *common, "-f", str(tmp_path))
    assert "context is" in refuse(capfd, *common, "-p", "x" * 3000)


def test_generate_refuses_without_a_prompt(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "no prompt" in refuse(capfd, "generate", "--model", tiny)


def test_generate_refuses_models(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import shutil

    assert "not there" in refuse(capfd, "generate", "-m", "./nowhere", "-p", "hello")
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    with (broken / "model.safetensors").open("rb+") as file:
        file.truncate(1000)
    assert "model.safetensors" in refuse(capfd, "generate", "-m", str(broken), "-p", "hello")


def test_demo(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    common = ("demo", "-m", tiny, "--tokens", "600", "--new-tokens", "8", "--recipe", "kivi:bits=2")
    made = run_json(capfd, *common)
    assert all(1 <= made[cache]["new_tokens"] <= 8 for cache in ("full", "packed"))
    assert made["packed"]["cache"]["recipe"] == "kivi:bits=2"
    assert 0 <= made["agreement"] <= 8
    said = run_text(capfd, *common)
    assert "7482153" in said
    assert "Hidden number found" in said
    assert "peak memory" in said


def test_demo_hides_the_fact_between_paragraphs() -> None:
    assert cli.demo.hide("a\n\nb\n\nc", "FACT", 0.4) == "a\n\nb\n\nFACT\n\nc"
    assert cli.demo.hide("one line", "FACT", 0.5) == "one line\n\nFACT"
