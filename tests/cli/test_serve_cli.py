"""`tersekv serve`: the command that it makes, and what it says where vLLM is missing."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest

from tersekv import cli
from tersekv.cli import serve
from tersekv.errors import UserError
from tersekv.recipe import PRESETS, Recipe

FOUND = {"vllm": "0.32.0", "tersekv": "0.1.0", "device": "cpu", "plugin": True}


@pytest.mark.parametrize("name", ["default", "safe"])
def test_presets_are_calibrated_once_per_model(name):
    assert "calibration=prompt" in PRESETS[name]
    assert str(serve.servable(Recipe.parse(name))) == PRESETS[name].replace(",calibration=prompt", "").replace(
        "calibration=prompt,", ""
    )
    assert str(serve.servable(Recipe.parse("turboquant:bits=4;0=exact"))) == "turboquant:bits=4;0=exact"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vllm": None}, "vLLM is not installed in the environment of python3. Install it: python3 -m venv"),
        ({"vllm": "0.30.2+cpu"}, "has vLLM 0.30.2.cpu, the plug-in is written for 0.31 and 0.32"),
        ({"plugin": False}, "tersekv is not installed beside vLLM"),
        ({"device": "rocm"}, "runs on rocm; the plug-in serves cpu and cuda"),
    ],
)
def test_missing_things_are_named(change, words):
    assert serve.device_of("python3", FOUND) == "cpu"
    with pytest.raises(UserError, match=words):
        serve.device_of("python3", FOUND | change)


def test_this_environment_has_no_vllm():
    pytest.importorskip("torch")
    assert serve.found_in(sys.executable)["vllm"] is None


def test_a_python_that_does_not_run():
    with pytest.raises(UserError, match="does not run"):
        serve.found_in("/nonexistent/python")


ANSWERED = "in place of its versions of vLLM and tersekv; give the Python of an environment with vLLM"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo FOUND nothing", ANSWERED),
        ("echo FOUND '[1]'", ANSWERED),
        ("echo FOUND '{}'", ANSWERED),
        ("""echo FOUND '{"vllm": 3, "tersekv": null, "device": null, "plugin": true}'""", ANSWERED),
        ("""echo FOUND '{"vllm": null, "tersekv": null, "device": null, "plugin": "yes"}'""", ANSWERED),
        ("printf 'FOUND '; head -c 100000 /dev/zero | tr '\\0' '['", ANSWERED),
        (r"printf 'FOUND \377\376\n'", ANSWERED),
        (r"printf '\377\n' >&2", "cannot import vLLM: \ufffd; give the Python"),
        ("exec sleep 30", "has not answered within 0.2 seconds; try it again, or give the Python"),
        ("head -c 100000 /dev/zero | tr '\\0' 'x' >&2", "cannot import vLLM: xxx"),
    ],
)
def test_odd_answers_are_one_line(tmp_path: Path, monkeypatch, capfd, script, words):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    if "sleep" in script:
        monkeypatch.setattr(serve, "PATIENCE", 0.2)
    assert cli.run(["serve", "-r", "turboquant:bits=4", "--python", str(python), "--dry-run"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line
    assert len(line) < 600


def test_the_command_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(serve, "found_in", lambda python: FOUND)
    assert cli.run(["serve", "smollm2", "--dry-run", "--port", "9000", "--", "--max-model-len", "512"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "VLLM_CPU_KVCACHE_SPACE=4"
    assert words[2:4] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--port") + 1] == "9000"
    assert words[-2:] == ["--max-model-len", "512"]
    section = json.loads(words[words.index("--additional-config") + 1])["tersekv"]
    assert section == {"recipe": "trellis:bits=3.5", "calibration": "CALIBRATION"}


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--max-new-tokens", "let requests name it"),
        ("--threads", "OMP_THREADS_BIND"),
        ("--prefill-chunk", "batched-tokens"),
    ],
)
def test_options_of_this_process_are_not_ignored_with_vllm(capsys, option, instead):
    assert cli.run(["serve", "smollm2", "--dry-run", option, "512"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{option} is for the server in this process" in said
    assert instead in said


def test_on_cuda_the_backend_is_named(tmp_path):
    server = serve.made(
        "python", "cuda", "folder", "name", Recipe.parse("turboquant:bits=4"), None, ("h", 1), 4, []
    )  # fmt: skip
    assert server.environment == {}
    assert "--attention-backend TRITON_ATTN" in server.text


def test_a_missing_calibration(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        serve.calibration_file("smollm2", Recipe.parse("trellis"), tmp_path / "none.safetensors", make=False)
    assert serve.calibration_file("smollm2", Recipe.parse("turboquant:bits=4"), None, make=True) is None


def test_the_engine_is_chosen(monkeypatch, capsys):
    """This process serves, unless something that only vLLM has was asked for."""
    started = []
    monkeypatch.setattr(serve, "serve_here", lambda *given: started.append(given))
    monkeypatch.setattr(serve, "found_in", lambda python: FOUND)
    options = "--port", "9000", "--cache-gib", "1", "--prefill-chunk", "512"
    assert cli.run(["serve", "a/b", "-r", "kivi:bits=4", *options]) == 0
    assert started == [("a/b", "kivi:bits=4", None, ("127.0.0.1", 9000), 1, 1024, "auto", None, 512)]
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name == "vllm")
    monkeypatch.setattr(serve.os, "execve", lambda *given: started.append("vllm"))
    monkeypatch.setattr(serve, "calibration_file", lambda *given, **more: None)
    assert cli.run(["serve", "a/b", "-r", "kivi:bits=4"]) == 0
    assert started.pop() == "vllm"
    monkeypatch.setattr(serve.os, "execve", lambda path, *given: started.append(path))
    assert cli.run(["serve", "a/b", "-r", "kivi:bits=4", "--python", "sh"]) == 0
    assert started.pop() == shutil.which("sh")  # a name is looked up, which execve does not do
    assert cli.run(["serve", "a/b", "-r", "kivi:bits=4", "--engine", "here"]) == 0
    assert len(started) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "other"], "--engine other is not an engine: choose here or vllm"),
        (["--engine", "here", "--dry-run"], "belong to vLLM"),
        (["--dtype", "int8"], "--dtype 'int8' is not one of: auto"),
        (["--prefill-chunk", "0"], "--prefill-chunk '0' is not a number of tokens"),
        (["--host", "256.0.0.1"], "cannot listen at 256.0.0.1:8000"),
    ],
)
def test_wrong_options_are_one_line(options, words, capsys):
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    assert cli.run(["serve", "smollm2", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_an_address_in_use_is_said_before_the_model_is_loaded(capsys):
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["serve", "a/model/that/is/not/there", "--port", str(port)]) == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
