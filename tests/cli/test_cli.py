"""The program: every command on a tiny model, errors as one line with status 2, --json alone on
stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import complaints
from tersekv import cli
from tersekv.cli import output


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


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    "arguments", [("nope",), ("models", "nope"), ("models", "pull"), ("--nope",), ("list", "kivi", "x")]
)
def test_parser_errors_are_one_line(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert "--help" in refuse(capfd, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("prompt-cache", "load", "x"), "`tersekv prompt-cache load --help` shows"),
        (("prompt-cache", "nope"), "`tersekv prompt-cache --help` shows"),
    ],
)
def test_parser_errors_name_the_command(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in refuse(capfd, *arguments)


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


def test_list_of_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Every sentence is whole, and a preset has its own options and bits."""
    rows = run_json(capfd, "list")
    for name in (row["name"] for row in (*rows["methods"], *rows["policies"])):
        one = run_json(capfd, "list", name)
        assert one["good_for"][-1] == one["bad_for"][-1] == "."
    assert run_json(capfd, "list", "mixed")["bad_for"].endswith("allot=model measures the model first.")
    one = run_json(capfd, "list", "default")
    assert (one["options"]["bits"], one["options"]["calibration"], one["fits_on"]) == (3.5, "prompt", "prompt")
    assert one["bits"]["64"]["mean"] > 3.5
    assert run_json(capfd, "list", "trellis")["options"]["bits"] == 2
    assert run_json(capfd, "list", "small")["options"]["allot"] == "prompt"


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
        (("chat", "smollm2", "--temperature", "0.0001"), "--temperature 0.0001 is out of range"),
        (("bench", "generate", "-o", "."), "--out . is a folder"),
        (("bench", "attend", "-o", "."), "--out . is a folder"),
        (("estimate", "-m", "llama-3.1-8b", "-b", "99999999999999999999"), "99999999999999999999"),
        (("serve", "smollm2", "--engine", "here", "--host", "a..b"), "cannot listen at a..b:8000"),
        (("estimate", "--memory", "9" * 320 + "GB"), "is not a number of bytes"),
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
