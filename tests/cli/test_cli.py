"""The program: every command on a tiny model, errors as one line with status 2, --json alone on
stdout."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import complaints
from tersekv import cli
from tersekv.cli import estimate, measure, output
from tersekv.hf import facts


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TERSEKV_CACHE", str(tmp_path))
    return tmp_path


def run_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return the document that the call printed; stdout may contain nothing else."""
    assert cli.run([*arguments, "--json"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def refuse(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error line of a call that must fail."""
    assert cli.run(list(arguments)) == 2
    said = capfd.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("tersekv: ")
    return lines[0]


def run_text(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(list(arguments)) == 0
    return capfd.readouterr().out


# ---------------------------------------------------------------- generate

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
    rows = list(csv.reader(said.out.splitlines()))
    assert rows[0][0] == ""
    assert ["tokens in the cache"] in [row[:1] for row in rows]
    assert "gains from" in said.err


def test_generate_streams_and_shows_a_table(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = run_text(
        capfd, "generate", "-m", tiny, "-p", "hello", "--max-new-tokens", "4", "--compare", "--threads", "1"
    )
    assert "--- full cache" in said
    assert "true bits per element" in said
    assert "unpacked keys and values" in said
    assert "scales and norms" in said


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


# ---------------------------------------------------------------- wrong input


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


@pytest.mark.parametrize(
    "arguments", [("nope",), ("models", "nope"), ("models", "pull"), ("--nope",), ("list", "kivi", "x")]
)
def test_parser_errors_are_one_line(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert "--help" in refuse(capfd, *arguments)


def test_internal_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.listing, "describe", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["list"])


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.listing, "describe", interrupt)
    assert cli.run(["list"]) == 130


# ---------------------------------------------------------------- the other commands


def test_list(capfd: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in run_json(capfd, "list")["methods"]}
    assert rows["kivi"]["bits"]["64"] == {"keys": 3.0, "values": 3.0, "mean": 3.0}
    assert rows["kivi"]["paper"] == "arXiv 2402.02750"
    assert rows["kivi"]["fits_on"] is None
    assert rows["qjl"]["fits_on"] == "prompt"
    # 15 first layers with 5.25 or 5.5 bits per key, the others with 4.25 or 4.5; and fitted indices
    assert rows["qjl"]["bits"]["128"]["keys"] == pytest.approx((15 * 5.25 + 17 * 4.25) / 32, abs=0.001)
    assert rows["qjl"]["bits"]["128"]["mean"] == pytest.approx(3.86, abs=0.005)
    assert rows["qjl"]["bits"]["64"]["keys"] == pytest.approx((5.5 + 4.5) / 2, abs=0.001)
    assert rows["qjl"]["bits"]["64"]["mean"] == pytest.approx(4.0, abs=0.005)
    assert all(row["kernels"] for row in rows.values())
    said = run_text(capfd, "list")
    assert all(name in said for name in rows)
    assert max(map(len, said.splitlines())) <= output.WIDTH_WHEN_PIPED


def test_estimate(empty_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = run_json(capfd, "estimate", "--recipe", "kivi:bits=2", "--context", "4k, 1M", "--memory", "24GB")
    (one,) = made["recipes"]
    assert [row["tokens"] for row in one["contexts"]] == [4096, 1 << 20]
    long = one["contexts"][1]
    assert long["bytes"] == sum(long["bytes_by_part"].values())
    assert long["bytes_bf16"] == (1 << 20) * 30 * 3 * 2 * 64 * 2
    assert long["ratio_bf16"] == pytest.approx(long["bytes_bf16"] / long["bytes"], abs=1e-3)
    assert made["most_tokens"]["bf16"] == int(24e9) // (30 * 3 * 2 * 64 * 2)
    assert made["most_tokens"]["fp8"] == pytest.approx(2 * made["most_tokens"]["bf16"], abs=1)
    assert made["most_tokens"]["kivi:bits=2"] > 4 * made["most_tokens"]["bf16"]
    assert made["weight_bytes_bf16"] == 134_515_008 * 2
    assert all(made["most_tokens_beside_weights"][k] < n for k, n in made["most_tokens"].items())
    assert list(empty_cache.iterdir()) == []
    said = run_text(capfd, "estimate", "-m", "llama-7b", "-c", "128k", "--memory", "80GiB", "--batch", "2")
    assert "131,072" in said
    assert "137.44 GB" in said
    assert "beside bf16 weights (13.48 GB)" in said


def test_estimate_reproduces_kvquant(capfd: pytest.CaptureFixture[str]) -> None:
    tables = run_json(capfd, "estimate", "--tables", "kvquant")["tables"]
    table_8 = {tuple(row[:2]): row[2:] for row in tables[1]["rows"]}
    assert round(table_8["LLaMA-7B", "nuq3-1%"][0], 1) == 13.3
    assert "KVQuant" in run_text(capfd, "estimate", "--tables", "kvquant")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--context", "4q"), "4096, 4k or 1M"),
        (("--context", ""), "not a number of tokens"),
        (("--context", "0"), "not a number of tokens"),
        (("--context", "4k,"), "not a number of tokens"),
        (("--memory", "lots"), "24GB"),
        (("--memory", "0GB"), "24GB"),
        (("--tables", "qjl"), "known: kvquant"),
        (("--batch", "0"), "--batch"),
        (("--recipe", "kivi:bits=99"), "bits"),
        (("--recipe", "kivi:group=48"), "48"),
        (("--model", "./nowhere"), "not there"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, tuple) else "",
)
def test_estimate_refuses(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refuse(capfd, "estimate", *arguments)


def test_units() -> None:
    assert [estimate.parse_tokens(t) for t in ("7", "1.5k", " 2M ")] == [7, 1536, 2 << 20]
    assert [estimate.parse_memory(t) for t in ("24GB", "1.5 GiB", "512B", "2T", "16060522496")] == [
        24 * 10**9,
        3 << 29,
        512,
        2 * 10**12,
        16_060_522_496,
    ]
    assert [facts.most_tokens(lambda n: 10 * n, limit) for limit in (5, 10, 12345)] == [0, 1, 1234]
    assert [output.human_bytes(n) for n in (64, 1500, 2e6, 3e9)] == ["64 B", "1.50 kB", "2.00 MB", "3.00 GB"]


def test_models(empty_cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tersekv.models import loading

    row = run_json(capfd, "models", "list")["models"][0]
    assert (row["name"], row["state"], row["bytes"]) == ("smollm2", "not pulled", 0)
    assert "not pulled" in run_text(capfd, "models", "list")
    assert "not pulled yet" in refuse(capfd, "models", "verify", "smollm2")
    assert "did you mean 'smollm2'" in refuse(capfd, "models", "pull", "smolm2")
    loading.folder_of("smollm2").mkdir(parents=True)
    assert "manifest.json is missing" in refuse(capfd, "models", "verify", "smollm2")
    monkeypatch.setattr(loading, "damage", lambda *_, **__: None)
    monkeypatch.setattr(loading, "pull", lambda name, report: loading.folder_of(name))
    assert run_json(capfd, "models", "verify", "smollm2")["state"] == "verified"
    assert run_json(capfd, "models", "pull", "smollm2")["where"] == str(loading.folder_of("smollm2"))
    assert "ready" in run_text(capfd, "models", "pull", "smollm2")


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


# ---------------------------------------------------------------- as a process


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tersekv", *arguments], capture_output=True, text=True, check=False)


def test_help_and_version_load_no_torch() -> None:
    code = (
        "import sys; from tersekv import cli; status = cli.run(['--help']); "
        "sys.exit(status or any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    assert process("--version").stdout.startswith("tersekv ")


@pytest.mark.parametrize(("variable", "command"), [("TERSEKV_BACKEND", "generate"), ("TERSEKV_CPU_ISA", "list")])
def test_wrong_environment_is_refused(variable: str, command: str, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable == "TERSEKV_CPU_ISA":
        pytest.importorskip("tersekv.kernels.cpu._native", reason="the C++ extension is not built")
    monkeypatch.setenv(variable, "gpu")
    done = process(command, *(["-m", tiny, "-p", "hello", "--max-new-tokens", "3"] if command == "generate" else []))
    assert done.returncode == 2, done.stderr
    (line,) = complaints(done.stderr)
    assert line.startswith(f"tersekv: {variable}: ")


def test_refusal_as_a_process_has_no_traceback() -> None:
    done = process("estimate", "--recipe", "kivi:bits=77")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(complaints(done.stderr)) == 1


def test_closed_pipe_gives_no_traceback() -> None:
    command = f"{sys.executable!r} -m tersekv list | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("methods")
    assert complaints(done.stderr) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "-p", "x", "--threads", "100000"), "threads are allowed"),
        (("generate", "-p", "x", "--seed", "99999999999999999999"), "--seed"),
        (("generate", "-p", "x", "--temperature", "1e-320"), "--temperature 1e-320 is out of range"),
        (("estimate", "--memory", "9" * 320 + "GB"), "is not a valid amount of memory"),
        (("estimate", "--model", "~nosuchuser/x"), "home folder that does not exist"),
    ],
)
def test_absurd_numbers_and_names(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refuse(capfd, *arguments)


def test_text_that_is_not_utf8(tmp_path: Path, tiny: str) -> None:
    call = [sys.executable, "-m", "tersekv", "generate", "-m", tiny]
    for extra, data in ((["-p", b"\xff\xfe"], b""), ([], b"\xff\xfe"), (["--file", "-"], b"\x80")):
        done = subprocess.run([*call, *extra], input=data, capture_output=True, check=False)
        assert done.returncode == 2
        (line,) = complaints(done.stderr.decode())
        assert "is not UTF-8 text" in line


def test_streams_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk gives one line, a stdout without UTF-8 still gets its document, and odd COLUMNS
    have no effect."""
    monkeypatch.setenv("COLUMNS", "abc")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = process("models", "list", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert process("models", "list").returncode == 0
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "tersekv", "models", "list"], stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert done.returncode == 2
        assert len(complaints(done.stderr.decode())) == 1


def test_uncountable_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for kind, said in (("vit", "cannot be counted"), ("gemma4_text", "differ in their heads")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert said in refuse(capfd, "estimate", "--model", str(tmp_path), "--memory", "1GB")


# ---------------------------------------------------------------- standard streams


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        ("list >&-", 2, "tersekv: standard output is closed, so the result cannot be written; "),
        ("list --json >&-", 2, "tersekv: standard output is closed"),
        ("--version >&-", 2, "tersekv: standard output is closed"),
        ("list >&- 2>&-", 2, ""),
        ("nope 2>&-", 2, ""),
        ("--version 2>&-", 0, "tersekv "),
        ("generate -m nope <&-", 2, "tersekv: the prompt is empty"),
        ("list | true", 1, ""),
    ],
)
def test_closed_streams_and_pipes(call: str, status: int, words: str) -> None:
    """One line or none, never a traceback. The status is that of the program."""
    program = f"{sys.executable} -m tersekv {call}"
    done = subprocess.run(
        ["bash", "-c", f"{program}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done
    said = [*done.stdout.splitlines(), *complaints(done.stderr)]
    assert len(said) == bool(words)
    assert "".join(said).startswith(words)


def test_a_file_does_not_replace_a_closed_stream(tmp_path: Path) -> None:
    """Output of a library to stderr must not end up in a file opened since."""
    code = (
        "import os; from tersekv.cli import streams; streams.prepare(); "
        f"f = open({str(tmp_path / 'out')!r}, 'w'); os.write(2, b'warning'); os.write(1, b'noise'); f.write('mine')"
    )
    subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" >&- 2>&-'], check=True, timeout=120)
    assert (tmp_path / "out").read_text() == "mine"
