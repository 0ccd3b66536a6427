"""`tersekv choose` and `tersekv.choose`: the recipe, the reason, and a try on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tersekv
from conftest import build
from tersekv.hf.choice import FEW_TOKENS
from tersekv.lab.evals.tasks.divergence import in_words
from test_cli import run_json, run_text


@pytest.mark.parametrize(
    ("memory", "recipe", "said"),
    [(None, "default", "hardly a token"), ("24GB", "safe", "it fits: 3.55 GB of 7.94 GB"),
     ("20.6GB", "default", "in chunks of 512 with safe needs 20."),
     ("19GB", "small", "default needs 3.85 GB")],
)  # fmt: skip
def test_the_closest_that_fits(memory: str | None, recipe: str, said: str) -> None:
    found = tersekv.choose("llama-3.1-8b", memory, "128k")
    assert (found.recipe, found.tokens) == (recipe, 131072)
    assert said in found.why
    assert set(found.others) == {"safe", "default", "small"} - {recipe}
    assert found.bytes < found.bytes_bf16 == 131072 * 131072


def test_nothing_fits() -> None:
    with pytest.raises(tersekv.UserError, match=r"939.48 MB are left .* enough for \d{2},\d{3}; .*h2o:memory=939MB"):
        tersekv.choose("llama-3.1-8b", "17GB", 131072)
    with pytest.raises(tersekv.UserError, match=r"the weights take 16\.06 GB in bfloat16, more than memory=2GB"):
        tersekv.choose("llama-3.1-8b", "2GB")


def test_a_memory_in_which_nothing_need_be_packed() -> None:
    assert "a cache in bfloat16, 4.29 GB, would fit, too" in tersekv.choose("llama-3.1-8b", "24GB").why


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory": "24"}, "memory=24"),
        ({"context": 0}, "context=0"),
        ({"context": "x"}, "'x'"),
        ({"memory": 5}, "memory=5 is not a text"),
        ({"context": 1.5}, "context=1.5"),
        ({"context": True}, "context=True"),
    ],
)
def test_wrong_values(given: dict[str, Any], said: str) -> None:
    with pytest.raises(tersekv.UserError, match=said):
        tersekv.choose("llama-3.1-8b", **given)


def test_safe_and_default_are_alike_with_wide_heads() -> None:
    assert tersekv.choose("gemma-3-12b").others == ("small",)


def test_a_model_and_its_config() -> None:
    """Attention that evicts or ranks tokens cannot serve a model that opens keys and values itself."""
    model = build("llama")
    found = tersekv.choose(model)
    assert found == tersekv.choose(model.config)
    assert found.tokens == model.config.max_position_embeddings
    assert found.others == ("safe", "small")
    assert "small" not in "".join(tersekv.choose(build("deepseek_v3")).others)
    assert "little is gained" in tersekv.choose(model, context=FEW_TOKENS - 1).why


def test_what_is_not_a_model() -> None:
    with pytest.raises(tersekv.UserError, match="got int"):
        tersekv.choose(42)  # type: ignore[arg-type]


def test_little_is_gained_with_a_memory_too() -> None:
    assert "little is gained at 1 tokens: the full cache fits" in tersekv.choose("gemma-3-12b", "30GB", 1).why


def test_no_policy_is_proposed_for_no_memory() -> None:
    with pytest.raises(tersekv.UserError, match=r"give a shorter context or more memory$"):
        tersekv.choose("llama-3.1-8b", "16.08GB")


def test_words() -> None:
    assert [in_words(kl)[:6] for kl in (0, 0.02, 0.2, 0.31, float("nan"))] == [
        "hardly",
        "about ",
        "about ",
        "RUINED",
        "RUINED",
    ]


def test_the_command_tries_recipes(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("the quick brown fox jumps over a lazy dog. " * 200)
    made = run_json(capfd, "choose", "--model", tiny, "--try", str(text), "--context", "2k")
    assert made["recipe"] == "default"
    assert [one["recipe"] for one in made["tried"]] == [str(tersekv.Recipe.parse(r)) for r in ("default", "safe")]
    assert all(0 <= one["kl"] < 1 and one["words"] == in_words(one["kl"], one["same"]) for one in made["tried"])
    said = run_text(capfd, "choose", "--model", tiny)
    labels = ["recipe", "why", "cache", "peak", "others"]
    assert [line.split()[0] for line in said.splitlines() if line.split()[0] in labels] == labels


def test_texts_that_cannot_be_tried(tiny: str, tmp_path: Path) -> None:
    from tersekv.cli.choose import choose

    with pytest.raises(tersekv.UserError, match="is not a file"):
        choose(tiny, text=tmp_path)
    (tmp_path / "other.txt").write_bytes(b"\xe9t\xe9 " * 400)
    with pytest.raises(tersekv.UserError, match="is not UTF-8 text"):
        choose(tiny, text=tmp_path / "other.txt")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(tersekv.UserError, match="give a text of 512 or more"):
        choose(tiny, text=tmp_path / "short.txt")


def test_the_peak_is_compared_with_the_memory(capfd: pytest.CaptureFixture[str]) -> None:
    call = "choose", "-m", "llama-3.1-8b", "--context", "128k", "--memory"
    assert "only the latter fits into 24GB" in " ".join(run_text(capfd, *call, "24GB").split())
    assert "fits into" not in run_text(capfd, *call, "80GB").partition("peak")[2]
    with pytest.raises(tersekv.UserError, match=r"reading 131,072 tokens in chunks of 512 needs 18\.53 GB, more than"):
        tersekv.choose("llama-3.1-8b", "18.5GB", "128k")
