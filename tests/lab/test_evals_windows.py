"""Perplexity and divergence: arithmetic of the protocol, options, and real values if model and text
exist."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conftest import data_folder
from tersekv import UserError
from tersekv.calibration.text import pydoc_text
from tersekv.lab.evals.reader import Reader
from tersekv.lab.evals.tasks import Estimate
from tersekv.lab.evals.tasks.divergence import AnswerDivergence, Divergence, compare
from tersekv.lab.evals.tasks.perplexity import Perplexity, mean_nll
from tersekv.models.loading import load


@pytest.fixture(scope="module")
def loaded(tiny: str) -> tuple[Any, Any]:
    return load(tiny)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a text of 400 tokens of the tiny model."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(pydoc_text()[:400], encoding="utf-8")
    return str(path)


def test_windows_cut_the_whole_text(loaded, tmp_path: Path) -> None:
    model, tokenizer = loaded
    (tmp_path / "text").write_text("abcdefghijk", encoding="utf-8")
    reader = Reader(model, tokenizer)
    samples = Perplexity(text=str(tmp_path / "text"), context=4, windows=0).instances(reader)
    assert [tokenizer.decode(s.data[0]) for s in samples] == ["abcd", "efgh"]
    assert len({s.id for s in samples}) == 2
    first = Perplexity(text=str(tmp_path / "text"), context=4, windows=1).instances(reader)
    assert [s.id for s in first] == [samples[0].id]
    (tmp_path / "text").write_text("Abcdefghijk", encoding="utf-8")
    changed = Perplexity(text=str(tmp_path / "text"), context=4, windows=2).instances(reader)
    assert [a.id == b.id for a, b in zip(changed, samples, strict=True)] == [False, True]


def test_pydoc_is_the_text_without_an_option(loaded) -> None:
    model, tokenizer = loaded
    sample = Perplexity(context=64, windows=1).instances(Reader(model, tokenizer))[0]
    assert tokenizer.decode(sample.data[0]) == pydoc_text()[:64]


def test_nll_is_the_mean_over_predicted_tokens() -> None:
    logits, ids = torch.randn(700, 9), torch.randint(0, 9, (700,))
    wanted = F.cross_entropy(logits[:-1], ids[1:])
    assert mean_nll(logits, ids) == pytest.approx(float(wanted), rel=1e-6)
    assert mean_nll(logits[600:], ids[600:]) == pytest.approx(
        float(F.cross_entropy(logits[600:-1], ids[601:])), rel=1e-6
    )
    assert mean_nll(torch.zeros(5, 8), ids[:5] % 8) == pytest.approx(math.log(8))


def test_perplexity_is_scored_after_the_prefix(loaded, text: str) -> None:
    """In mode=cache, only predictions of tokens after the prefix count, and they are made over
    packed tokens."""
    model, tokenizer = loaded
    full = Reader(model, tokenizer)
    packed = Reader(model, tokenizer, "window:recent=0+kivi:bits=2")
    task = Perplexity(text, context=160, windows=1, mode="cache", prefix=96, chunk=64)
    sample = task.instances(full)[0]
    result = task.evaluate(sample, packed, full)
    logits, held = packed.read(sample.data, 64, 96)
    assert result.metrics == {"nll": mean_nll(logits, sample.data[0, 96:])}
    assert (result.tokens, result.footprint) == (160, held)
    with torch.no_grad():
        exact = model(sample.data).logits[0]
    assert task.evaluate(sample, full, full).metrics["nll"] == pytest.approx(mean_nll(exact[96:], sample.data[0, 96:]))
    assert result.metrics["nll"] != pytest.approx(mean_nll(exact[96:], sample.data[0, 96:]), rel=1e-6)


def test_perplexity_summary() -> None:
    nll, full = [2.0, 3.0, 4.0], [1.9, 2.8, 3.9]
    summary = Perplexity().summarise([{"nll": x} for x in nll], [{"nll": x} for x in full])
    assert summary["perplexity"].mean == pytest.approx(math.exp(3))
    assert summary["perplexity"].stderr == pytest.approx(math.exp(3) / math.sqrt(3))
    differences = [0.1, 0.2, 0.1]
    ratio = math.exp(sum(differences) / 3)
    assert summary["perplexity_ratio"].mean == pytest.approx(ratio)
    assert summary["perplexity_ratio"].stderr == pytest.approx(ratio * Estimate.of(differences).stderr)
    assert summary["nll"] == Estimate.of(nll)
    assert Perplexity().summarise([{"nll": 800.0}], [{"nll": 1.0}])["perplexity"].mean == math.inf


def test_divergence_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    kl, agree = compare(torch.cat([p, p]).log(), torch.cat([q, p]).log() + 3)
    assert kl.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0.0], abs=1e-6)
    assert agree.tolist() == [0, 1]


@pytest.mark.parametrize("mode", ["simulate", "cache"])
def test_divergence(loaded, text: str, mode: str) -> None:
    model, tokenizer = loaded
    full, packed = Reader(model, tokenizer), Reader(model, tokenizer, "window:recent=0+kivi:bits=2")
    task = Divergence(text, context=320, windows=1, mode=mode, chunk=32)  # type: ignore[arg-type]
    sample = task.instances(full)[0]
    metrics = task.evaluate(sample, packed, full).metrics
    assert metrics["kl"] == pytest.approx(sum(metrics[f"kl_q{i}"] for i in range(1, 5)) / 4)
    assert 0 < metrics["kl"] < 1
    assert 0 < metrics["top1_agreement"] < 1
    same = task.evaluate(sample, full, full).metrics
    assert (same["kl"], same["top1_agreement"]) == (0, 1)
    logits = task.logits(sample, packed)[0]
    with torch.no_grad():
        exact = model(sample.data).logits[0]
    wanted = F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean")
    assert metrics["kl"] == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "both"}, "choose cache or simulate"),
        ({"context": 1}, "context=1 is too small"),
        ({"chunk": 0}, "chunk=0"),
        ({"windows": -1}, "windows=-1"),
        ({"mode": "simulate", "prefix": 8}, "belongs to mode=cache"),
        ({"sinks": 4}, "belongs to mode=simulate"),
        ({"mode": "cache", "context": 64, "prefix": 63}, "nothing to score"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Perplexity(**options)


def test_wrong_texts(loaded, tmp_path: Path) -> None:
    reader = Reader(*loaded)
    (tmp_path / "short").write_text("x" * 100)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for text, context, said in (
        ("short", 64, "has 100 tokens, 1 windows of 64, but 4 are needed"),
        ("short", 4096, "exceeds the model's 2,048"),
        ("nowhere", 64, "cannot read"),
        ("binary", 64, "not UTF-8"),
    ):
        with pytest.raises(UserError, match=said):
            Perplexity(text=str(tmp_path / text), context=context).instances(reader)


def test_baseline_on_wikitext(smollm2) -> None:
    """The published full-cache perplexity of the first window, and packed ones far from and near to
    it.

    The default mode reads through the real cache, whose values are far better than those of
    mode=simulate.
    """
    folder = data_folder()
    if folder is None:
        pytest.skip("the folder with test texts is not next to this checkout")
    model, tokenizer = smollm2
    full = Reader(model, tokenizer)
    task = Perplexity(text=str(folder / "wikitext-2" / "test_gptq_joined.txt"), context=512, windows=1)
    simulate = dataclasses.replace(task, mode="simulate")
    sample = task.instances(full)[0]
    nll = {
        recipe: simulate.evaluate(sample, Reader(model, tokenizer, recipe), full).metrics["nll"]
        for recipe in ("full", "kivi:bits=4", "kivi:bits=2")
    }
    assert nll["full"] == pytest.approx(3.0902, abs=2e-3)
    # one window may gain by chance, depending on the CPU's rounding: by .007 with AVX2
    assert abs(nll["kivi:bits=4"] - nll["full"]) < 0.05 < nll["kivi:bits=2"] - nll["full"]
    cache = task.evaluate(sample, Reader(model, tokenizer, "kivi:bits=2"), full).metrics["nll"]
    assert cache - nll["full"] < (nll["kivi:bits=2"] - nll["full"]) / 5


def test_the_divergence_of_answers_is_that_of_their_logits_up_to_the_first_difference() -> None:
    torch.manual_seed(0)
    first = 3 * torch.randn(6, 1000)
    second = first + 0.3 * torch.randn(6, 1000)
    watch, ids = AnswerDivergence(), torch.zeros(1, 1, dtype=torch.long)
    for logits in (first, second):
        watch.begin()
        for row in logits:
            assert watch(ids, row[None]) is not None
    exact = compare(first, second)[0]
    kl, tokens = watch.mean(equal_tokens=3)
    assert tokens == 4
    assert kl == pytest.approx(exact[:4].mean().item(), rel=0.05)
    assert kl <= exact[:4].mean().item()
    assert watch.mean(equal_tokens=6)[1] == 6
