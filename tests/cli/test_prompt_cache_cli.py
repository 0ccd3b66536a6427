"""`tersekv prompt-cache` and `generate --prompt-cache` on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forged
from tersekv import cli
from tersekv.calibration.text import common_ids
from tersekv.cli import output, prompt_cache
from tersekv.lab.evals.tasks.divergence import in_words
from tersekv.models import loading
from tersekv.models.config import cache_shape
from tersekv.sizes.estimate import break_even
from test_cli import refuse, run_json, run_text

TEXT = "An article about caches. " * 16
BUILD = ("prompt-cache", "build", "-r", "polarquant", "-p", TEXT)


@pytest.fixture
def built(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    run_json(capfd, *BUILD, "-m", tiny, "-o", str(tmp_path / "doc.cache"))
    return tmp_path / "doc.cache"


def test_build_info_verify(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doc.cache"
    made = run_json(capfd, *BUILD, "-m", tiny, "-o", str(path))
    assert made["recipe"] == "polarquant"
    assert made["file_bytes"] == path.stat().st_size
    assert made["cache"]["tokens"] == len(TEXT) + 1  # the template's beginning, but not its end
    assert made["prefill_seconds"] > 0
    said = run_json(capfd, "prompt-cache", "info", str(path))
    assert said == {name: value for name, value in made.items() if not name.endswith("_seconds")}
    assert run_json(capfd, "prompt-cache", "verify", str(path)) == said | {"state": "verified"}
    assert run_json(capfd, "prompt-cache", "verify", str(path), "-m", tiny)["state"] == "verified"
    assert "polarquant" in run_text(capfd, "prompt-cache", "info", str(path))


def test_a_text_is_read_in_chunks(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Later chunks read packed tokens, so codes differ in what they say, not in their number."""
    build = (*BUILD, "-m", tiny, "-o", str(tmp_path / "doc.cache"))
    whole = run_json(capfd, *build)
    parts = run_json(capfd, *build, "--prefill-chunk", "300")
    assert parts["cache"]["tokens"] == whole["cache"]["tokens"]
    assert parts["cache"]["bytes_by_part"]["codes"] == whole["cache"]["bytes_by_part"]["codes"] > 0
    assert run_json(capfd, "prompt-cache", "verify", str(tmp_path / "doc.cache"))["state"] == "verified"
    assert "--prefill-chunk" in refuse(capfd, *build, "--prefill-chunk", "0")


def test_a_short_text_gains_nothing(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`build` names the length from which the recipe saves memory, and `info` prints a ratio."""
    path = str(tmp_path / "short.cache")
    said = run_text(capfd, "prompt-cache", "build", "-r", "polarquant", "-p", "A short text", "-m", tiny, "-o", path)
    least = break_even(cache_shape(loading.load_config(tiny)), "polarquant")
    assert re.search(r"\d+ tokens: the cache is [\d.]+ times as large as in bfloat16", said)
    assert f"polarquant gains from some {least:,} tokens on." in said
    assert "times as large as in bfloat16" in run_text(capfd, "prompt-cache", "info", path)
    said = run_text(capfd, "generate", "-m", tiny, "-p", "A short text", "-r", "polarquant", "--max-new-tokens", "4")
    assert f"polarquant gains from some {least:,} tokens on." in said
    said = run_text(capfd, "generate", "-m", tiny, "-p", TEXT * 3, "-r", "polarquant", "--max-new-tokens", "4")
    assert "gains from" not in said


def test_generate_continues_after_the_file(tiny: str, built: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = ("generate", "-m", tiny, "-p", TEXT, "--max-new-tokens", "8")
    for question in ((), ("-q", "What is it?")):
        made = run_json(capfd, *common, *question, "--prompt-cache", str(built))
        assert made["cached_tokens"] == len(TEXT) + 1
        assert made["cache"]["recipe"] == "polarquant"
        plain = run_json(capfd, *common, *question, "-r", "polarquant")
        assert made["prompt_tokens"] == plain["prompt_tokens"]
        assert plain["cached_tokens"] == 0
        assert made["cache"] == plain["cache"]
    compared = run_json(capfd, *common, "--prompt-cache", str(built), "--compare")
    assert compared["full"]["cached_tokens"] == 0 < compared["packed"]["cached_tokens"]
    said = run_text(capfd, *common, "--prompt-cache", str(built))
    assert "tokens from the prompt cache" in said
    assert "Peak memory counts only what was added after" in said


def test_a_prompt_that_is_all_in_the_file(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "raw.cache"
    run_json(capfd, *BUILD, "--raw", "-m", tiny, "-o", str(path))
    made = run_json(capfd, "generate", "-m", tiny, "-p", TEXT, "--raw", "--prompt-cache", str(path))
    assert made["cached_tokens"] == made["prompt_tokens"] - 1 == len(TEXT) - 1


def test_refusals(tiny: str, built: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = ("generate", "-m", tiny, "--prompt-cache", str(built))
    said = refuse(capfd, *common, "-p", "Another article. " * 40)
    assert "differs from token 3 on: 'other ar' instead of ' article'" in said
    assert "differs from token 51 on" in refuse(capfd, *common, "-p", TEXT[:50])
    assert "leave --recipe out" in refuse(capfd, *common, "-p", TEXT, "-r", "kivi:bits=4")
    assert "cannot read" in refuse(capfd, "prompt-cache", "info", str(tmp_path / "none"))
    assert "there is no folder" in refuse(capfd, *BUILD, "-m", tiny, "-o", str(tmp_path / "none" / "file"))
    assert "is a folder: give a file in it" in refuse(capfd, *BUILD, "-m", tiny, "-o", str(tmp_path))
    assert "is a device or a pipe" in refuse(capfd, *BUILD, "-m", tiny, "-o", "/dev/null")
    forged.rewrite(built, tmp_path / "forged", batch="1")
    for command in ("info", "verify"):
        assert "batch is '1', and must be" in refuse(capfd, "prompt-cache", command, str(tmp_path / "forged"))
    data = bytearray(built.read_bytes())
    data[-1] ^= 1
    built.write_bytes(data)
    assert cli.run(["prompt-cache", "info", str(built)]) == 0  # of the header alone
    capfd.readouterr()
    assert "is damaged" in refuse(capfd, "prompt-cache", "verify", str(built))
    assert "is damaged" in refuse(capfd, *common, "-p", TEXT)


def test_common_prefix_of_prompts(tiny: str) -> None:
    tokenizer, config = loading.load_tokenizer(tiny), loading.load_config(tiny)
    ids = common_ids(tokenizer, "ab", config)
    assert tokenizer.decode(ids[0].tolist()) == "<|user|>ab"
    assert tokenizer.decode(common_ids(tokenizer, "ab", config, raw=True)[0].tolist()) == "ab"


def test_a_storage_file_loads_into_any_recipe(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, packed = str(tmp_path / "doc.store"), str(tmp_path / "doc.cache")
    made = run_json(capfd, "prompt-cache", "build", "--storage", "3", "-p", TEXT, "-m", tiny, "-o", path)
    assert made["recipe"] == "storage"
    assert made["storage"]["rate"] == 3
    assert made["cache"]["tokens"] == len(TEXT) + 1
    said = run_json(capfd, "prompt-cache", "info", path)
    assert said == {name: value for name, value in made.items() if not name.endswith("_seconds")}
    assert 0 <= made["kl"] < 1
    assert made["words"] == in_words(made["kl"])
    assert run_json(capfd, "prompt-cache", "verify", path, "-m", tiny)["state"] == "verified"
    assert "of this prompt" in run_text(capfd, "prompt-cache", "info", path)
    loaded = run_json(capfd, "prompt-cache", "load", path, "-r", "polarquant", "-m", tiny, "-o", packed)
    assert (loaded["recipe"], loaded["cache"]["tokens"]) == ("polarquant", len(TEXT) + 1)
    common = ("generate", "-m", tiny, "-p", TEXT, "--max-new-tokens", "4")
    answers = [run_json(capfd, *common, "--prompt-cache", path, "-r", "polarquant")]
    answers.append(run_json(capfd, *common, "--prompt-cache", packed))
    assert answers[0]["cached_tokens"] == len(TEXT) + 1
    assert answers[0]["cache"] == answers[1]["cache"]
    assert run_json(capfd, *common, "--prompt-cache", path)["cache"]["recipe"].startswith("trellis")


def test_the_loss_of_a_storage_file_is_said_again(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`info`, `load`, and `generate` with the loaded file know what `build` measured."""
    path, packed = str(tmp_path / "doc.store"), str(tmp_path / "doc.cache")
    monkeypatch.setattr(prompt_cache, "divergence", lambda *_: 0.0873)
    said = []
    generate = ("generate", "-m", tiny, "-p", TEXT, "--max-new-tokens", "2", "--prompt-cache")
    for call in (
        ("prompt-cache", "build", "--storage", "2", "-p", TEXT, "-m", tiny, "-o", path),
        ("prompt-cache", "load", path, "-r", "kivi:bits=4", "-m", tiny, "-o", packed),
        (*generate, path),
        (*generate, packed),
    ):
        assert cli.run(list(call)) == 0
        said.append(" ".join(capfd.readouterr().err.split()))
    loss = "loses much: KL divergence 0.087 nats (about one token in ten changes)"
    assert [f"{name} {loss}" in text for name, text in zip((path, path, path, packed), said, strict=True)] == [True] * 4
    for file in (path, packed):
        assert run_json(capfd, "prompt-cache", "info", file)["kl"] == 0.0873
        text = run_text(capfd, "prompt-cache", "info", file)
        assert re.search(r"divergence, nats +│ +0\.0873", text)
        assert "about one token in ten changes" in text


def test_info_fits_into_80_columns(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "doc.store"
    run_json(capfd, "prompt-cache", "build", "--storage", "2", "-p", TEXT, "-m", tiny, "-o", str(path))
    prompt_cache.add_divergence(path, 0.5)
    bases = run_json(capfd, "prompt-cache", "info", str(path))["storage"]["bases"]
    monkeypatch.setattr(output, "_piped_width", lambda: 80)
    text = run_text(capfd, "prompt-cache", "info", str(path))
    labels = ("recipe", "bits per number", "bases", "token ids", "cache, all parts", "divergence, nats", "in words")
    assert all(f"│ {label} " in text for label in labels)
    assert prompt_cache.BASES[bases] in text
    assert "RUINED: choose another recipe" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
