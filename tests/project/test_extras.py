"""Without the extras `lab`, `serve` and `storage`: functions of the base installation, and errors of commands that
need a package."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import complaints
from made_records import results as results
from tersekv import UserError
from tersekv.extras import INSTALL_LAB, INSTALL_SERVE, INSTALL_STORAGE, LAB, SERVE, STORAGE, require

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "records"

BLOCK = """
import os, sys
for module in {modules}:
    sys.modules[module] = None  # importing it raises ModuleNotFoundError
os.environ["TERSEKV_CACHE"] = {cache!r}
"""


def run_without(modules: list[str], code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process in which those modules cannot be imported."""
    whole = BLOCK.format(modules=modules, cache=str(cache)) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=300, cwd=cache)


def program_without(modules: list[str], arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Run the program without those modules."""
    return run_without(modules, f"from tersekv import cli\nsys.exit(cli.run({arguments!r}))", cache)


def test_base_needs_none_of_the_extra(tiny: str, tmp_path: Path) -> None:
    """Import, compress, save, evaluate, and the commands of the library itself."""
    code = f"""
        import torch, transformers
        import tersekv
        from tersekv import cli

        model = transformers.AutoModelForCausalLM.from_pretrained({tiny!r})
        ids = torch.arange(300)[None] % 250 + 3
        for recipe in ("default", "kivi:bits=2", "kvquant:calibration=prompt", "polarquant", "turboquant"):
            with tersekv.compress(model, recipe):
                out = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
            out.past_key_values.save("prompt.cache")
            assert tersekv.CompressedCache.load("prompt.cache", model).get_seq_length()
        calls = [
            "list", "estimate --model smollm2 --recipe default", "models list", "doctor", "doctor --all",
            "generate -p hello --max-new-tokens 2 --model {tiny}",
            "eval perplexity --context 64 --windows 1 --model {tiny}",
            "bench generate --context 64 --new-tokens 1 --rounds 1 --model {tiny}",
        ]
        for call in calls:
            assert cli.run(call.split()) == 0, call
        print("all of them")
    """
    done = run_without([*LAB.values(), *SERVE.values(), *STORAGE.values()], code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all of them"


GETTING = "getting the model smollm2 (its file is converted once) needs gguf"


CALLS = {
    "matplotlib": {
        "plot pareto {results}": "plot pareto needs matplotlib",
        "plot decoding {records}/generate.jsonl": "plot decoding needs matplotlib",
        "plot angles": "plot angles needs matplotlib",  # before the model is downloaded
        "report {results}": "tersekv report needs matplotlib",
    },
    "starlette": {"serve --port 8765": "tersekv serve needs starlette"},
    "pcodec": {"prompt-cache build --storage 2 -p hello -o a.cache": "--storage needs pcodec"},
    "scikit-learn": {"plot clusters": "plot clusters needs scikit-learn"},
    "gguf": dict.fromkeys(
        [
            "models pull smollm2", "demo", "generate -p hello", "prompt-cache build -p hello -o a.cache",
            "calibrate -r kvquant:bits=2 --out .", "eval perplexity", "bench generate", "plot angles",
        ],
        GETTING,
    ),
}  # fmt: skip
"""Package that is not installed, calls and what each says."""


@pytest.mark.parametrize("package", CALLS)
def test_a_command_says_what_to_install(package: str, results: Path, tmp_path: Path) -> None:
    """One sentence on stderr, nothing on stdout, and no file written."""
    calls = [call.format(results=results, records=RECORDS).split() for call in CALLS[package]]
    code = f"from tersekv import cli\nsys.exit([cli.run(call) for call in {calls!r}] != [2] * {len(calls)})"
    done = run_without([{**LAB, **SERVE, **STORAGE}[package]], code, tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    how = INSTALL_SERVE if package in SERVE else INSTALL_STORAGE if package in STORAGE else INSTALL_LAB
    said = [f"tersekv: {text}, which is not installed: {how}" for text in CALLS[package].values()]
    assert complaints(done.stderr) == said
    assert list(tmp_path.iterdir()) == []


def test_longbench_names_a_missing_package_before_it_reads(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "lcc.jsonl").write_text("{}\n")
    call = ["eval", "longbench", "--subtasks", "lcc", "--length", "1k", "--data", str(tmp_path), "--model", tiny]
    done = program_without(["rapidfuzz"], call, tmp_path)
    assert done.returncode == 2
    assert complaints(done.stderr)[-1].endswith(
        f"LongBench's score of code needs rapidfuzz, which is not installed: {INSTALL_LAB}"
    )


def test_a_broken_package_is_not_reported_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_package.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(LAB, "broken", "broken_package")
    with pytest.raises(UserError, match=r"cannot be imported \(No module named 'a_module_that_nobody_has'\)"):
        require("a test", "broken")


def packages(text: str) -> set[str]:
    """Return the package names of quoted requirements."""
    return set(re.findall(r'^ *"([A-Za-z0-9_-]+)(?:\[[\w,]+\])?[>;"]', text, re.MULTILINE))


def test_extras_are_what_pyproject_states_and_setup_installs() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    base = packages(project.split("\ndependencies = [", 1)[1].split("\n]", 1)[0])
    extras = {
        name: packages(listed)
        for name, listed in re.findall(
            r"^(\w+) = \[(.*?)^\]", project.split("[project.optional-dependencies]", 1)[1], re.M | re.S
        )
    }
    assert extras["lab"] == set(LAB)
    assert extras["serve"] == set(SERVE)
    assert extras["storage"] == set(STORAGE)
    assert not base & {*LAB, *SERVE, *STORAGE}
    assert "tersekv" in extras["dev"]
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "pins.txt").read_text(), re.MULTILINE))
    assert base | extras["lab"] | extras["serve"] | extras["storage"] | extras["dev"] - {"tersekv"} <= pinned
