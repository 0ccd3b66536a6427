"""The programs and the notebook of examples/, run as a user runs them, with a tiny random model."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tersekv
import test_codecs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SMALLER = r"([\d.]+) times smaller than bfloat16"


def example(name: str) -> ModuleType:
    """A program of the folder examples/, as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """The tiny model with four layers and two KV heads: a cache whose tables are small beside its tokens."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings = 4, 2, 16384
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A file with a text of 3,000 tokens: one byte is one token here."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((ROOT / "LICENSE").read_text()[:3000])
    return str(path)


@pytest.fixture
def ask(model, text, capsys):
    """Run a program with the tiny model and return the lines that it prints."""

    def run(name: str, *args: str, file: bool = True) -> list[str]:
        given = ["--model", model, "--new-tokens", "6", *(("--file", text) if file else ())]
        example(name).main([*given, *args])
        return capsys.readouterr().out.strip().splitlines()

    return run


def smaller(lines: list[str]) -> list[float]:
    """The ratios to bfloat16 that were printed."""
    return [float(ratio) for ratio in re.findall(SMALLER, "\n".join(lines))]


# ------------------------------------------------------------------------------------ programs


def test_chat(ask):
    lines = ask("chat", "Who?", "Why?", "When?")
    assert [line for line in lines if line.startswith("> ")] == ["> Who?", "> Why?", "> When?"]
    read = [int(n.replace(",", "")) for n in re.findall(r"\[read ([\d,]+) new tokens", "\n".join(lines))]
    assert read[0] > 3000
    assert 0 < max(read[1:]) < 60
    ratios = smaller(lines)
    assert len(ratios) == 3
    assert min(ratios) > 2


def test_long_document(ask):
    lines = ask("long_document", "Who?", "Why?", "Who?")
    assert lines[0].startswith("read once in ")
    assert smaller(lines)[0] > 2
    answers = "\n".join(lines[1:]).split("> ")[1:]
    said = ["\n".join(answer.strip().splitlines()[:-1]) for answer in answers]
    assert len(said) == 3
    assert said[0] == said[2]  # a copy leaves no trace in the cache
    assert all(re.search(r"\[[\d.]+ s\]$", answer.strip()) for answer in answers)


def test_batch(ask, text, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(Path(text).read_text()[:900])
    lines = ask("batch", text, str(short), file=False)
    tokens = [int(n.replace(",", "")) for n in re.findall(r"^row \d, ([\d,]+) tokens: ", "\n".join(lines), re.M)]
    assert len(tokens) == 2
    assert tokens[0] - tokens[1] == 2100  # padding is not counted
    assert lines[-1].startswith("2 rows: ")
    assert smaller(lines)[0] > 2


def test_pipeline(ask):
    lines = ask("pipeline", "--recipe", "kivi:bits=2")
    assert lines[-1].startswith("CompressedCache(kivi:bits=2): ")
    assert smaller(lines)[0] > 2
    assert lines[0]


def test_prompt_cache(ask, tmp_path):
    file = tmp_path / "prompt.cache"
    first, second = (ask("prompt_cache", "--cache", str(file)) for _ in range(2))
    assert first[0].startswith("read and saved in ")
    assert second[0].startswith("loaded in ")  # it is not read again
    assert first[-1] == second[-1]
    assert smaller(second)[0] > 2
    with pytest.raises(tersekv.UserError, match="prompt"):
        ask("prompt_cache", "--cache", str(file), "--file", str(EXAMPLES / "README.md"))


def test_compare_recipes(model, text, capsys):
    args = ["--recipe", "safe", "--recipe", "kivi:bits=2", "--packed", "512", "--scored", "64"]
    example("compare_recipes").main([text, "--model", model, *args])
    lines = capsys.readouterr().out.strip().splitlines()
    rows = {line[:24].strip(): line[24:].split() for line in lines[2:]}
    assert list(rows) == ["full, torch.float32", "safe", "kivi:bits=2"]
    assert rows["full, torch.float32"][2:5] == ["200.0%", "0.0000", "100.0%"]
    shares = [float(row[2].rstrip("%")) for row in rows.values()]
    assert shares[0] > shares[1] > shares[2]
    assert float(rows["safe"][3]) <= float(rows["kivi:bits=2"][3])


@pytest.mark.usefixtures("unregister")
def test_own_codec(ask):
    lines = ask("own_codec", "--recipe", "mulaw:mu=16")
    assert lines[-1].startswith("4.50 bits per element at head dim 128; CompressedCache(mulaw:mu=16): ")
    assert smaller(lines)[0] > 2
    for D in (D for D in test_codecs.HEAD_DIMS if D % 32 == 0):
        test_codecs.test_bytes_held_are_bits_declared("mulaw", D)
    for kind in ("zeros", "constant", "outlier channels", "normal"):
        test_codecs.test_finite_on_extremes("mulaw", kind)
    test_codecs.test_blocks_do_not_depend_on_each_other("mulaw")
    test_codecs.test_scores_are_products_with_the_decoded("mulaw")


def test_own_codec_has_45_lines():
    source = (EXAMPLES / "own_codec.py").read_text()
    codec = source.split('"""\n', 1)[1].split("\ndef main", 1)[0].strip()
    assert codec.count("\n") < 45


@pytest.mark.usefixtures("unregister")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_says_what_it_does(name, capsys):
    source = (EXAMPLES / f"{name}.py").read_text()
    doc = ast.get_docstring(ast.parse(source))
    assert doc
    lines = doc.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"Run `python examples/{name}.py")
    assert lines[2].startswith("It prints ")
    assert source.count("\n") <= 75
    with pytest.raises(SystemExit):
        example(name).main(["--help"])
    assert "--model" in capsys.readouterr().out


def test_the_list_names_each():
    text = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"^\| \[([\w.]+)\]\(\1\)", text, re.MULTILINE)
    assert sorted(listed) == sorted([*(f"{name}.py" for name in PROGRAMS), "tersekv.ipynb"])


# ------------------------------------------------------------------------------------ notebook


def notebook(model: str) -> Any:
    """The notebook with the tiny model and a short text in its cell of parameters."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; `make setup` installs it")
    made = nbformat.read(EXAMPLES / "tersekv.ipynb", as_version=4)
    for cell in made.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            for name, value in {"MODEL": model, "CHARACTERS": 1000, "NEW_TOKENS": 4}.items():
                cell.source, changed = re.subn(rf"^{name} = \S+", f"{name} = {value!r}", cell.source, flags=re.M)
                assert changed == 1
    return made


def test_notebook(model, tmp_path):
    """Every cell runs in a Jupyter kernel, and prints what its title says."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; `make setup` installs it")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed; `make setup` installs it")
    made = notebook(model)
    nbclient.NotebookClient(made, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed: dict[str, str] = {}
    title = ""
    for cell in made.cells:
        if cell.cell_type == "markdown":
            title = cell.source.splitlines()[0].strip("# ")
        else:
            streams = [out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout"]
            printed[title] = printed.get(title, "") + "".join(streams)
    assert len(printed) == 9
    compared = printed.pop("Recipes compared")
    assert len(compared.splitlines()) == 5
    assert compared.count("% of bfloat16") == 5
    for title in set(printed) - {"tersekv in a notebook", "A prompt cache"}:
        assert smaller([printed[title]]), title
    assert "bytes in the file" in printed["A prompt cache"]
    assert "CompressedCache(mulaw:mu=16)" in printed["A codec of your own"]


def test_notebook_has_the_codec_of_the_program():
    """The codec is written twice, once for each kind of reader."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; `make setup` installs it")
    cells = nbformat.read(EXAMPLES / "tersekv.ipynb", as_version=4).cells
    program = (EXAMPLES / "own_codec.py").read_text()
    codec = "@lru_cache" + program.split("@lru_cache", 1)[1].split("\n\n\ndef main", 1)[0]
    assert any(codec in cell.source for cell in cells)
