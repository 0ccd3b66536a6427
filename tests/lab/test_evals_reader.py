"""The reader of evaluations: prompts split at the context's end, answers, and the real cache in
chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tersekv
from conftest import LOSSLESS
from tersekv import UserError
from tersekv.lab.evals import decoding
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.reader import FULL, Reader
from tersekv.lab.evals.tokenise import split_ids
from tersekv.models.loading import load

TEXT = "A cache keeps keys and values. " * 8


@pytest.fixture(scope="module")
def loaded(tiny: str) -> tuple[Any, Any]:
    return load(tiny)


# ---------------------------------------------------------------- prompts


def test_chat_prompt_is_cut_after_the_context(loaded) -> None:
    _, tokenizer = loaded
    split = split_ids(tokenizer, Prompt("Context. ", "Why?", "It is"), gold=" so")
    assert tokenizer.decode(split.context[0]) == "<|user|>Context. "
    assert tokenizer.decode(split.rest[0]) == "Why?<|end|><|answer|>It is"
    assert tokenizer.decode(split.gold) == " so"


def test_raw_prompt_is_cut_after_the_context(loaded) -> None:
    _, tokenizer = loaded
    split = split_ids(tokenizer, Prompt("Context.", "Why?", "It", chat=False))
    assert [tokenizer.decode(part[0]) for part in split[:2]] == ["Context.", "Why?It"]
    assert split.gold == []


def test_a_letter_of_several_tokens_stays_whole(loaded) -> None:
    _, tokenizer = loaded
    split = split_ids(tokenizer, Prompt("é", "ü", chat=False))
    assert [tokenizer.decode(part[0]) for part in split[:2]] == ["é", "ü"]


def test_prompt_without_context_or_question(loaded) -> None:
    _, tokenizer = loaded
    assert split_ids(tokenizer, Prompt("", "Why?", chat=False)).context.shape == (1, 0)
    assert split_ids(tokenizer, Prompt("", "Why?")).context.shape == (1, 0)
    alone = split_ids(tokenizer, Prompt("Why?", chat=False))
    assert (alone.context.shape[1], alone.rest.shape[1]) == (3, 1)
    with pytest.raises(UserError, match="empty"):
        split_ids(tokenizer, Prompt("", chat=False))


def test_template_that_strips_the_turn(loaded) -> None:
    _, tokenizer = loaded
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("m['content']", "m['content'] | trim")
        split = split_ids(tokenizer, Prompt("\n Context. ", "Why? "))
        assert tokenizer.decode(split.context[0]) == "<|user|>Context. "
        assert tokenizer.decode(split.rest[0]) == "Why?<|end|><|answer|>"
        tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
        with pytest.raises(UserError, match="changes the user's text"):
            split_ids(tokenizer, Prompt("Context.", "Why?"))
    finally:
        tokenizer.chat_template = template


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="fast tokenizer"):
        split_ids(Slow(), Prompt("a", "b", chat=False))


# ---------------------------------------------------------------- answers


def test_full_answer_is_what_generate_says(loaded) -> None:
    model, tokenizer = loaded
    ids = tokenizer(TEXT + "Why?", return_tensors="pt")["input_ids"]
    answer = Reader(model, tokenizer).answer(Prompt(TEXT, "Why?", chat=False), 12)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert answer.text == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.prompt_tokens == ids.shape[1]
    # The last new token is not fed; float32 keys and values of two layers, one head, 32 channels.
    assert answer.footprint.total_bytes == (ids.shape[1] + 11) * 2 * 2 * 32 * 4


def test_packed_answer_reads_the_question_over_packed_tokens(loaded) -> None:
    model, tokenizer = loaded
    recipe = "window:recent=0+kivi:bits=2"
    split = split_ids(tokenizer, Prompt(TEXT, "Why?"))
    with tersekv.compress(model, recipe), torch.no_grad():
        cache = tersekv.CompressedCache(model.config, recipe)
        model(input_ids=split.context, past_key_values=cache)
        ids, new = split.rest, []
        for _ in range(6):
            ids = model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            new.append(int(ids))
    answer = Reader(model, tokenizer, recipe).answer(Prompt(TEXT, "Why?"), 6, min_new_tokens=6)
    assert answer.text == tokenizer.decode(new, skip_special_tokens=True)
    assert answer.footprint == cache.footprint()
    assert answer.footprint.parts["codes"] > 0


def test_gold_nll_is_the_teacher_forced_one_and_leaves_the_cache(loaded) -> None:
    model, tokenizer = loaded
    ask, gold = Prompt(TEXT, "Why?", chat=False), " Because."
    answer = Reader(model, tokenizer).answer(ask, 4, gold)
    ids = torch.tensor([tokenizer(TEXT + "Why?" + gold)["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0]
    n = len(gold)  # one token per byte
    assert answer.gold_nll == pytest.approx(float(F.cross_entropy(logits[-n - 1 : -1], ids[0, -n:])), rel=1e-5)
    for recipe in (FULL, "window:recent=0+kivi:bits=2"):
        reader = Reader(model, tokenizer, recipe)
        with_gold, without = reader.answer(ask, 4, gold), reader.answer(ask, 4)
        assert (with_gold.text, with_gold.footprint) == (without.text, without.footprint)
        assert without.gold_nll is None
        assert math.isfinite(with_gold.gold_nll)


class Scripted:
    """A model that outputs the letters of a text one by one, then the end token 0."""

    class generation_config:  # noqa: N801 (transformers' name)
        eos_token_id = (0,)

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.ids = [*tokenizer(text)["input_ids"], *[0] * 99]
        self.calls = 0

    def first(self) -> torch.Tensor:
        return F.one_hot(torch.tensor(self.ids[0]), 259).float()

    def __call__(self, **_: Any) -> Any:
        self.calls += 1
        return type("Out", (), {"logits": F.one_hot(torch.tensor([[self.ids[self.calls]]]), 259).float()})


def said(tokenizer: Any, text: str, most: int = 40, least: int = 0, stop: tuple[str, ...] = ()) -> tuple[str, int]:
    model = Scripted(tokenizer, text)
    answer = decoding.greedy(model, None, model.first(), decoding.Stopping(model, tokenizer, most, least, stop))
    return answer, model.calls


def test_greedy_stops(loaded) -> None:
    _, tokenizer = loaded
    assert said(tokenizer, "ab cd") == ("ab cd", 5)
    assert said(tokenizer, "ab cd", most=3) == ("ab ", 2)
    assert said(tokenizer, "ab\ncd", stop=("\n",)) == ("ab", 2)
    assert said(tokenizer, "ab cd.", stop=(".", "cd")) == ("ab ", 4)
    assert said(tokenizer, "a\nb\nc", least=3, stop=("\n",))[0] == "a"  # searched from the third token on
    assert said(tokenizer, "") == ("", 0)
    assert said(tokenizer, "", least=1) == ("", 1)  # another special token instead of the end token, then the end token


def test_answers_that_do_not_fit_are_refused(loaded) -> None:
    reader = Reader(*loaded, "kivi")
    assert reader.context_tokens == 2048
    assert reader.count_tokens("four") == 4
    with pytest.raises(UserError, match="context of 2,048"):
        reader.answer(Prompt("x" * 2000, "y"), 100)
    with pytest.raises(UserError, match="did you mean 'kivi'"):
        Reader(*loaded, "kivy")


# ---------------------------------------------------------------- the real cache, chunk by chunk


def test_read_without_loss_is_the_ordinary_pass(loaded) -> None:
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    wanted, held = Reader(model, tokenizer).read(ids, 16)
    got, _ = Reader(model, tokenizer, LOSSLESS).read(ids, 16, prefix=50)
    torch.testing.assert_close(got, wanted[50:], rtol=1e-4, atol=1e-5)
    assert held.bits_per_element == 32


def test_read_feeds_chunks(loaded) -> None:
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        logits, held = Reader(model, tokenizer, "window:recent=0+kivi:bits=2").read(ids, 48, prefix=100)
    finally:
        hook.remove()
    assert sizes == [48, 48, 48, 4]  # the prefix comes from the shared prefill
    assert logits.shape == (ids.shape[1] - 100, 259)
    assert held.tokens == ids.shape[1]
    assert held.parts["codes"] > 0


def test_the_full_pass_is_kept_for_the_same_ids(loaded) -> None:
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    reader = Reader(model, tokenizer)
    first = reader.simulate(ids)
    assert reader.read(ids.clone(), 16)[0].data_ptr() == first[0].data_ptr()
    assert reader.simulate(ids[:, 1:]) is not first


@pytest.mark.parametrize("recipe", ["full", "window:recent=0,start=0+turboquant:bits=2", "snapkv:budget=0.25+exact"])
def test_packing_after_the_prompt_starts_from_exact_logits(loaded, recipe: str) -> None:
    model, tokenizer = loaded
    ask = Prompt(TEXT, "Why?", chat=False)
    first = Reader(model, tokenizer).answer(ask, 1)
    reader = Reader(model, tokenizer, recipe)
    answer = reader.answer(ask, 4, pack="after-prompt")
    assert answer.text.startswith(first.text)
    assert answer.prompt_tokens == first.prompt_tokens
    ids = torch.cat(split_ids(tokenizer, ask)[:2], dim=1)
    with reader.reading(), torch.no_grad():
        cache, logits = reader.read_prompt(ids)
        exact = model(input_ids=ids).logits[0, -1]
    assert cache.get_seq_length() == ids.shape[1]
    assert torch.allclose(logits, exact, atol=1e-5)


def test_packing_during_prefill_reads_coded_tokens(loaded) -> None:
    """The prompt's logits are those of `simulate`, and the packed tokens are those that it encoded."""
    model, tokenizer = loaded
    reader = Reader(model, tokenizer, "window:sinks=2,recent=0,start=0+kivi:bits=2,group=16")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])[:, :98]
    with torch.no_grad(), reader.reading():
        cache, last = reader.read_coded(ids)
        exact, _ = reader.read_prompt(ids)
    assert torch.allclose(last, reader.simulate(ids, sinks=2)[0][-1], atol=1e-5)
    assert cache.footprint().total_bytes == exact.footprint().total_bytes
    read = [
        (a.store.decoded(torch.float32)[0], b.store.decoded(torch.float32)[0])
        for a, b in zip(cache.layers, exact.layers, strict=True)
    ]
    first, later = (coded - plain for coded, plain in read)
    assert not first.any()  # no coded token comes before the first layer
    assert later.any()
    answer = reader.answer(Prompt(TEXT, "Why?", chat=False), 2, pack="during-prefill")
    assert answer.prompt_tokens > 98
    with pytest.raises(UserError, match=r"evicts tokens, .*: use pack=after-prompt, or the policy window"):
        Reader(model, tokenizer, "streaming+exact").answer(Prompt(TEXT, "Why?"), 2, pack="during-prefill")
