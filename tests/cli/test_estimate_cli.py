"""`tersekv estimate`: fitting contexts, several recipes in one table, known and unknown models,
errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tersekv import cli
from tersekv.cache.footprint import Footprint
from tersekv.cli import estimate, output, sizes
from tersekv.hf import facts
from tersekv.sizes.estimate import STEP, break_even, predict
from tersekv.sizes.known_models import MODELS
from test_cli import refuse, run_json, run_text

LLAMA = ("estimate", "-m", "llama-3.1-8b")
SHAPE = MODELS["llama-3.1-8b"].shape


def test_it_says_whether_contexts_fit(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = (*LLAMA, "-r", "kivi:bits=4", "-c", "128k,1M", "--memory", "24GB")
    made = run_json(capfd, *arguments)
    room = made["memory_bytes"] - made["weight_bytes_bf16"]
    assert made["weight_bytes_bf16"] == 2 * MODELS["llama-3.1-8b"].parameters
    short, long = made["recipes"][0]["contexts"]
    assert (short["fits"], long["fits"]) == (True, False)
    assert [row["left_bytes"] for row in (short, long)] == [room - short["bytes"], room - long["bytes"]]
    most = made["most_tokens_beside_weights"]["kivi:bits=4"]
    assert predict(SHAPE, "kivi:bits=4", most).total_bytes <= room < predict(SHAPE, "kivi:bits=4", most + 1).total_bytes
    said = run_text(capfd, *arguments)
    assert "131,072 tokens fit: " in said
    assert "of 7.94 GB left beside the weights" in said
    assert f"too many; at most {most:,} do." in said
    assert "counts activations of the prompt" in " ".join(said.split())
    assert cli.run(list(arguments)) == 0  # "no" is an answer, not an error
    capfd.readouterr()


def test_weights_that_take_all_memory(capfd: pytest.CaptureFixture[str]) -> None:
    said = run_text(capfd, *LLAMA, "-c", "4k", "--memory", "16GB")
    assert "No cache fits: the weights take 16.06 GB in bfloat16, and --memory is 16.00 GB." in said
    made = run_json(capfd, *LLAMA, "-c", "4k", "--memory", "16GB")
    assert set(made["most_tokens_beside_weights"].values()) == {0}
    barely = str(2 * MODELS["llama-3.1-8b"].parameters + 1000)
    assert "too many; not even one does." in run_text(capfd, *LLAMA, "-c", "4k", "--memory", barely)


def test_the_most_tokens_are_fewer_than_what_does_not_fit() -> None:
    """Packing reduces bytes, so a longer context may fit where a shorter one does not."""
    toothed = [0, 10, 20, 30, 12, 22]
    assert facts.most_tokens(lambda n: toothed[n], 25, below=3) == 2
    assert facts.most_tokens(lambda n: 10 * n, 25, below=2) == 1


def test_several_recipes_in_one_table(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = ("default", "kivi:bits=2", "snapkv:budget=0.25+kivi:bits=4")
    options = [part for recipe in recipes for part in ("-r", recipe)]
    made = run_json(capfd, *LLAMA, *options, "-c", "4k,128k", "--memory", "24GB", "-b", "2")
    assert [one["recipe"] for one in made["recipes"]][1:] == list(recipes[1:])
    last = made["recipes"][-1]
    alone = run_json(capfd, *LLAMA, "-r", last["recipe"], "-c", "4k,128k", "--memory", "24GB", "-b", "2")
    assert alone["recipes"] == [last]
    assert alone["most_tokens_beside_weights"][last["recipe"]] == made["most_tokens_beside_weights"][last["recipe"]]
    for one in made["recipes"]:
        assert one["contexts"][0]["bytes"] == predict(SHAPE, one["recipe"], 4096, 2).total_bytes
    said = run_text(capfd, *LLAMA, *options, "-c", "4k,32k,128k,1M", "--memory", "24GB")
    rows = [line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│")]
    assert [row for row in rows if row] == [
        "bfloat16",
        "default",
        "kivi:bits=2",
        "snapkv:budget=0.25+kivi:bits=4",
    ]
    assert max(len(line) for line in said.splitlines() if line[:1] in "┏│└") <= 132
    for recipe in recipes:
        assert f"{recipe}: 131,072 tokens fit: " in said
    assert said.count("1,048,576 tokens do not fit") == len(recipes)


def test_a_config_file(tmp_path: Path, tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    file = Path(tiny) / "config.json"
    by_file, by_folder = (
        run_json(capfd, "estimate", "-m", str(path), "-c", "4k", "--memory", "1GB") for path in (file, tiny)
    )
    assert by_file | {"model": tiny} == by_folder
    for text in ("[1]", "{", '{"model_type": "nonesuch"}'):
        (tmp_path / "broken.json").write_text(text)
        said = refuse(capfd, "estimate", "-m", str(tmp_path / "broken.json"))
        assert "broken.json is not a model's config.json" in said


def test_unknown_names(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "similar: llama-3.1-8b, " in refuse(capfd, "estimate", "-m", "lama-3.1-8b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "published models with similar names are qwen3-4b" in refuse(
        capfd, "estimate", "-m", "someone/qwen3-4b-tuned"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").mkdir()  # a folder of that name takes precedence
    assert "llama-3.1-8b has no config.json" in refuse(capfd, *LLAMA)


def test_tables_take_a_batch(capfd: pytest.CaptureFixture[str]) -> None:
    plain, four = (run_json(capfd, "estimate", "--tables", "kvquant", *batch)["tables"] for batch in ((), ("-b", "4")))
    assert [row for row in plain[0]["rows"] if "batch 4" in row[1]] == four[0]["rows"]
    assert plain[1]["rows"][0][2] * 4 == pytest.approx(four[1]["rows"][0][2])


@pytest.mark.parametrize(("name", "batch"), [("llama-3.1-8b", 1), ("qwen2.5-0.5b", 3), ("gemma-3-1b", 1)])
@pytest.mark.parametrize("recipe", ["default", "kivi:bits=2", "window:recent=16+qjl", "h2o:budget=1000+exact"])
def test_break_even(name: str, recipe: str, batch: int) -> None:
    """From that length on the cache is never larger than bfloat16; one step below, it is."""
    shape = MODELS[name].shape
    least = break_even(shape, recipe, batch)
    assert least is not None

    def gains(tokens: int) -> bool:
        return predict(shape, recipe, tokens, batch).total_bytes < shape.elements(tokens, batch) * 2

    assert not gains(least - STEP)
    assert all(gains(tokens) for tokens in [*range(least, least + 600, STEP), 4096, 1 << 17])


def test_a_recipe_that_never_gains() -> None:
    assert break_even(SHAPE, "exact") is None
    assert sizes.gains_from("exact", None) == "exact never makes a cache smaller"


def test_nothing_gained() -> None:
    footprint = predict(SHAPE, "default", 9)
    times = footprint.total_bytes / (SHAPE.elements(9) * 2)
    gains = f"default gains from some {break_even(SHAPE, 'default'):,} tokens on."
    said = sizes.nothing_gained(footprint, SHAPE, "trellis:bits=3.5,calibration=prompt")
    assert said == f"9 tokens: the cache is {times:.1f} times as large as in bfloat16; {gains}"
    assert sizes.nothing_gained(predict(SHAPE, "default", 4096), SHAPE, "default") is None
    assert sizes.nothing_gained(Footprint(), SHAPE, "default") is None


def test_estimate_says_where_nothing_is_gained(capfd: pytest.CaptureFixture[str]) -> None:
    least = break_even(SHAPE, "default")
    said = run_text(capfd, *LLAMA, "-c", f"9,{least}")
    assert "9 tokens with default: 2.2 times as large as in bfloat16." in said
    assert f"{least:,} tokens with default" not in said
    assert f"default gains from some {least:,} tokens on" in said
    assert run_json(capfd, *LLAMA, "-c", "9")["recipes"][0]["break_even_tokens"] == least


def test_configs_that_transformers_refuses(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for wrong in ({"hidden_size": "big"}, {"num_hidden_layers": 0}):
        config = {"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64} | wrong
        (tmp_path / "config.json").write_text(json.dumps(config))
        said = refuse(capfd, "estimate", "-m", str(tmp_path / "config.json"))
        assert "is not a model's config.json" in said or "has no attention layers" in said


def test_a_sliding_window_is_compared_with_what_a_full_cache_holds() -> None:
    shape = MODELS["mistral-7b-v0.1"].shape
    footprint = predict(shape, "kivi:bits=2", 1 << 17)
    assert footprint.elements == shape.elements(1 << 17) == shape.elements(4096)
    assert 2 < footprint.ratio() < 6


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
    assert not empty_cache.exists()
    said = run_text(capfd, "estimate", "-m", "llama-7b", "-c", "128k", "--memory", "80GiB", "--batch", "2")
    assert "131,072" in said
    assert "137.44 GB" in said
    assert "bf16 weights take 13.48 GB" in said


def test_estimate_reproduces_kvquant(capfd: pytest.CaptureFixture[str]) -> None:
    tables = run_json(capfd, "estimate", "--tables", "kvquant")["tables"]
    table_8 = {tuple(row[:2]): row[2:] for row in tables[1]["rows"]}
    assert round(table_8["LLaMA-7B", "nuq3-1%"][0], 1) == 13.3
    assert "KVQuant" in run_text(capfd, "estimate", "--tables", "kvquant")


def test_it_warns_beyond_the_context_of_a_model(capfd: pytest.CaptureFixture[str], tiny: str) -> None:
    """Without --context the longest length is the model's own."""
    for model, longest in ((tiny, 2048), ("llama-3.1-8b", 131_072)):
        assert cli.run(["estimate", "-m", model, "-c", f"512,{2 * longest}", "--json"]) == 0
        said = capfd.readouterr()
        warned = f"warning: --context {2 * longest:,} is beyond the {longest:,} tokens that {model} reads at most"
        assert warned in said.err
        assert json.loads(said.out)["longest_tokens"] == longest
        assert cli.run(["estimate", "-m", model, "--json"]) == 0
        said = capfd.readouterr()
        assert "warning" not in said.err
        assert json.loads(said.out)["recipes"][0]["contexts"][-1]["tokens"] == longest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-r", "int4", "-r", "uniform:bits=4", "-r", "int4"), "int4 was given twice"),
        (("--memory", "24"), "write for example 512MB, 1.5GB"),
        (("-r", "int4", "-r", "int4:group=48"), "--recipe int4:group=48: group=48 does not divide"),
        (("--tables", "kvquant", "-c", "4k", "-m", "smollm2"), "leave --model, --context out"),
        (("--prefill-chunk", "0"), "--prefill-chunk '0' is not a number of tokens: write a whole number from 1 to"),
        (("--prefill-chunk", "-3"), "--prefill-chunk '-3' is not a number of tokens"),
        (("--context", "4q"), "4096, 4k or 1M"),
        (("--context", ""), "not a number of tokens"),
        (("--context", "0"), "not a number of tokens"),
        (("--context", "4k,"), "not a number of tokens"),
        (("--memory", "lots"), "--memory lots is not a number of bytes; write for example 512MB"),
        (("--memory", "0GB"), "not a number of bytes"),
        (("--tables", "qjl"), "known: kvquant"),
        (
            ("-b", "0"),
            "'0' is not a valid --batch: it must be greater than or equal to 1; `tersekv estimate --help`",
        ),
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
    assert [estimate.parse_bytes(t, "memory") for t in ("24GB", "1.5 GiB", "512B", "2T", "16060522496")] == [
        24 * 10**9,
        3 << 29,
        512,
        2 * 10**12,
        16_060_522_496,
    ]
    assert [facts.most_tokens(lambda n: 10 * n, limit) for limit in (5, 10, 12345)] == [0, 1, 1234]
    assert [output.human_bytes(n) for n in (64, 1500, 2e6, 3e9)] == ["64 B", "1.50 kB", "2.00 MB", "3.00 GB"]


def test_uncountable_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for kind, said in (("vit", "cannot be counted"), ("gemma4_text", "differ in their heads")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert said in refuse(capfd, "estimate", "--model", str(tmp_path), "--memory", "1GB")
