"""Log-likelihoods over a packed cache, and the model type for lm-evaluation-harness."""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tersekv
from tersekv import UserError
from tersekv.hf.prefill import new_cache
from tersekv.lab.evals.decoding import loglikelihood
from tersekv.models.loading import load

CONTEXT, FOLLOWING = "A cache keeps keys and values. " * 8, " And it grows."


@pytest.fixture(scope="module")
def loaded(tiny: str) -> tuple[Any, Any]:
    return load(tiny)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_loglikelihood_over_the_full_cache(loaded, chunk: int) -> None:
    model, tokenizer = loaded
    context, following = ids(tokenizer, CONTEXT), ids(tokenizer, FOLLOWING)
    cache = new_cache(model, None)
    with torch.no_grad():
        model(input_ids=torch.tensor([context[:-1]]), past_key_values=cache)
        total, greedy = loglikelihood(model, cache, context[-1], following, chunk)
        logits = model(torch.tensor([context + following])).logits[0, -len(following) - 1 : -1]
    assert total == pytest.approx(-float(F.cross_entropy(logits, torch.tensor(following), reduction="sum")), rel=1e-5)
    assert not greedy
    assert cache.get_seq_length() == len(context) + len(following) - 1


def test_loglikelihood_reports_greedy_answers(loaded) -> None:
    model, tokenizer = loaded
    context = ids(tokenizer, CONTEXT)
    out = model.generate(torch.tensor([context]), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    following = out[0, len(context) :].tolist()
    for tokens, wanted in ((following, True), ([*following[:2], (following[2] + 1) % 259], False)):
        cache = new_cache(model, None)
        with torch.no_grad():
            model(input_ids=torch.tensor([context[:-1]]), past_key_values=cache)
            assert loglikelihood(model, cache, context[-1], tokens, 128)[1] is wanted


def test_module_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    monkeypatch.delitem(sys.modules, "tersekv.lab.evals.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'lm_eval\[hf\]"):
        importlib.import_module("tersekv.lab.evals.lm_eval")
    with pytest.raises(SystemExit, match=r"tersekv: lm-evaluation-harness is not installed"):
        runpy.run_module("tersekv.lab.evals.lm_eval", run_name="__main__")


class FakeHFLM:
    """The parts of the harness's class (0.4.13) that the model type uses."""

    def __init__(self, pretrained: Any, tokenizer: Any = None, **kwargs: Any) -> None:
        self.model, self.tokenizer, self.max_length, self.device = pretrained, tokenizer, 512, "cpu"
        self.cached: list[Any] = []
        self.cache_hook = type("Hook", (), {"add_partial": lambda _, *said: self.cached.append(said)})()

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        return self.model.generate(
            input_ids=context, max_length=max_length, pad_token_id=0, use_cache=True, do_sample=False, **kwargs
        )


@pytest.fixture
def model_type(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `TersekvLM` over a fake of the harness, which tests do not install."""
    registered: dict[str, Any] = {}
    fakes = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.models": {},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: registered.setdefault(name, cls)},
        "lm_eval.models.huggingface": {"HFLM": FakeHFLM},
    }
    for name, members in fakes.items():
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, "tersekv.lab.evals.lm_eval", raising=False)
    importlib.import_module("tersekv.lab.evals.lm_eval")
    yield registered["tersekv"]
    sys.modules.pop("tersekv.lab.evals.lm_eval", None)


@pytest.mark.parametrize("recipe", ["full", "window:recent=0+kivi:bits=2"])
def test_model_type_scores_requests(model_type: Any, loaded, recipe: str) -> None:
    model, tokenizer = loaded
    context = ids(tokenizer, CONTEXT)
    options = [ids(tokenizer, text) for text in (" so", " and", " x")]
    requests = [(("c", "1"), context, options[0]), (None, [5], options[1]), (("c", "2"), context, options[2])]
    lm = model_type(model, recipe=recipe, tokenizer=tokenizer)
    got = lm._loglikelihood_tokens(requests)
    assert [said[1] for said in lm.cached] == [("c", "1"), ("c", "2")]
    packed = None if recipe == "full" else recipe
    for (_, before, following), answer in zip(requests, got, strict=True):
        cache = new_cache(model, packed)
        with torch.no_grad(), tersekv.compress(model, packed or "kivi"):
            if before[:-1]:
                model(input_ids=torch.tensor([before[:-1]]), past_key_values=cache)
            assert answer == pytest.approx(loglikelihood(model, cache, before[-1], following, 128), rel=1e-4)
    if packed:
        exact = model_type(model, recipe="full", tokenizer=tokenizer)._loglikelihood_tokens(requests)
        assert exact[0][0] != pytest.approx(got[0][0], rel=1e-6)
        assert exact[1][0] == pytest.approx(got[1][0], rel=1e-3)  # four tokens are in exact sinks


def test_model_type_cuts_contexts_that_are_too_long(model_type: Any, loaded) -> None:
    model, tokenizer = loaded
    lm = model_type(model, recipe="full", tokenizer=tokenizer)
    long, following = ids(tokenizer, CONTEXT * 4), ids(tokenizer, FOLLOWING)
    kept = long[-(512 + 1 - len(following)) :]
    assert lm._loglikelihood_tokens([(None, long, following)]) == lm._loglikelihood_tokens([(None, kept, following)])


@pytest.mark.parametrize("recipe", ["full", "window:sinks=0,recent=0+kivi:bits=4"])
def test_model_type_generates_for_padded_batches(model_type: Any, loaded, recipe: str) -> None:
    model, tokenizer = loaded
    lm = model_type(model, recipe=recipe, tokenizer=tokenizer)
    rows = [ids(tokenizer, CONTEXT), ids(tokenizer, CONTEXT)[40:]]
    padded = torch.tensor([rows[0], [0] * 40 + rows[1]])
    mask = torch.tensor([[1] * len(rows[0]), [0] * 40 + [1] * len(rows[1])])
    out = lm._model_generate(padded, padded.shape[1] + 6, [], attention_mask=mask)
    assert out.shape == (2, padded.shape[1] + 6)
    if recipe == "full":
        for row, made in zip(rows, out, strict=True):
            alone = model.generate(torch.tensor([row]), max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert made[-6:].tolist() == alone[0, -6:].tolist()


def test_model_type_checks_its_arguments(model_type: Any, loaded) -> None:
    model, tokenizer = loaded
    with pytest.raises(UserError, match="did you mean 'kivi'"):
        model_type(model, recipe="kivy")
    with pytest.raises(UserError, match="chunk=0"):
        model_type(model, chunk=0)
    with pytest.raises(UserError, match="head dim"):
        model_type(model, recipe="int4", tokenizer=tokenizer)
