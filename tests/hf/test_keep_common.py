"""`keep_common`: a cache keeps what a new prompt begins with, and a prompt of another text is noticed."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from transformers import DynamicCache

import tersekv
from conftest import LOSSLESS, prompt
from tersekv.errors import UserError


def filled(model, ids, recipe=LOSSLESS, **kwargs):
    cache = tersekv.CompressedCache(model, recipe)
    with tersekv.compress(model, recipe), torch.no_grad():
        model(ids, past_key_values=cache, **kwargs)
    return cache


def same_start(ids, common, length, seed=5):
    """Return other ids [B, length] whose first `common` are those of `ids`."""
    other = prompt(length, len(ids), seed)
    other[:, :common] = ids[:, :common]
    other[:, common] = (ids[:, common] + 1) % 90 + 3
    return other


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_after_it_the_cache_is_that_of_the_common_tokens(models, name):
    model, ids = models[name], prompt(300)
    other = same_start(ids, 250, 340)
    cache = filled(model, ids)
    assert cache.keep_common(other) == 250
    with tersekv.compress(model, LOSSLESS), torch.no_grad():
        found = model(other[:, 250:], past_key_values=cache).logits
    wanted = model(other, past_key_values=DynamicCache(config=model.config)).logits[:, 250:]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_generated_tokens_count(llama):
    ids = prompt(60)
    with tersekv.compress(llama, "kivi:bits=4"):
        out = llama.generate(ids, max_new_tokens=80, return_dict_in_generate=True)
        cache = out.past_key_values
        assert cache.token_ids.known == cache.get_seq_length() == 139
        longer = torch.cat([out.sequences, prompt(9)], dim=1)
        assert cache.keep_common(longer) == 139
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            llama.generate(longer, past_key_values=cache, max_new_tokens=3)


@pytest.mark.parametrize(("length", "kept"), [(300, 299), (120, 119), (2, 1), (1, 0)])
def test_the_last_token_of_the_prompt_is_left(llama, length, kept):
    ids = prompt(300)
    cache = filled(llama, ids)
    assert cache.keep_common(ids[:, :length]) == kept == cache.get_seq_length()


def test_an_unrelated_prompt_leaves_an_empty_cache(llama):
    """It is fitted anew, as a new cache is."""
    ids, other, recipe = prompt(200), prompt(200, seed=7), "trellis:bits=3,calibration=prompt"
    cache = filled(llama, ids, recipe)
    assert cache.keep_common(other) == 0
    assert cache.footprint().total_bytes == 0
    with tersekv.compress(llama, recipe), torch.no_grad():
        llama(other, past_key_values=cache)
    assert cache.footprint().parts == filled(llama, other, recipe).footprint().parts


@pytest.mark.parametrize(("name", "recipe"), [("llama", "snapkv:budget=0.25+kivi:bits=4"), ("mistral", "kivi:bits=4")])
def test_where_tokens_cannot_be_removed_the_cache_is_empty(models, name, recipe):
    ids = prompt(300)
    cache = filled(models[name], ids, recipe)
    assert cache.keep_common(same_start(ids, 100, 200)) == 0
    assert cache.get_seq_length() == 0
    cache = filled(models[name], ids, recipe)
    assert cache.keep_common(torch.cat([ids, prompt(5)], dim=1)) == 300  # nothing is to be removed


def test_batches_agree_in_all_rows(llama):
    ids = prompt(120, batch=3)
    other = torch.cat([ids, prompt(20, batch=3, seed=1)], dim=1)
    other[1, 90] = (other[1, 90] + 1) % 90 + 3
    assert filled(llama, ids).keep_common(other) == 90
    assert filled(llama, ids).keep_common(other[:2]) == 0
    cache = filled(llama, ids)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    assert cache.keep_common(other[[0, 0, 2, 2]]) == 120


def test_padding_is_not_text(llama):
    ids, mask = prompt(120, batch=2), torch.ones(2, 120, dtype=torch.int64)
    mask[1, :30] = 0
    longer, longer_mask = torch.cat([ids, ids[:, :9]], dim=1), torch.cat([mask, mask[:, -9:]], dim=1)
    assert filled(llama, ids, attention_mask=mask).keep_common(longer, longer_mask) == 120
    assert filled(llama, ids, attention_mask=mask).keep_common(longer) == 0


def test_after_an_interruption(llama):
    ids = prompt(120)
    cache = filled(llama, ids[:, :100])

    def stop(*_):
        raise KeyboardInterrupt

    hook = llama.model.layers[2].register_forward_pre_hook(stop)
    with tersekv.compress(llama, LOSSLESS), torch.no_grad(), pytest.raises(KeyboardInterrupt):
        llama(ids[:, 100:110], past_key_values=cache)
    hook.remove()
    assert cache.keep_common(ids) == 100
    assert set(cache.progress.num_tokens().values()) == {100}


def test_unknown_ids(llama):
    ids = prompt(80)
    cache = tersekv.CompressedCache(llama, LOSSLESS)
    with tersekv.compress(llama, LOSSLESS), torch.no_grad():
        llama(inputs_embeds=llama.get_input_embeddings()(ids), past_key_values=cache)
    with pytest.raises(UserError, match=r"ids of this cache's 80 tokens are unknown.*cache.reset\(\)"):
        cache.keep_common(ids)
    with pytest.raises(UserError, match="prompt without tokens"):
        cache.keep_common(ids[:, :0])


def test_ids_stay_with_copies_pickles_and_files(llama, tmp_path):
    ids = prompt(80)
    cache = filled(llama, ids)
    cache.save(tmp_path / "a.cache", ids, llama)
    others = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), copy.copy(cache)]
    for other in (*others, tersekv.CompressedCache.load(tmp_path / "a.cache", llama)):
        assert other.keep_common(ids[:, :40]) == 39
    assert cache.keep_common(torch.cat([ids, ids], dim=1)) == 80


@pytest.mark.parametrize("padding", [[30], [0, 25]])
def test_padding_stays_with_files(llama, tmp_path, padding):
    """Equal ids in place of padding are other tokens, also after loading."""
    ids = prompt(80, len(padding))
    mask = (torch.arange(80) >= torch.tensor(padding)[:, None]).long()
    cache = filled(llama, ids, attention_mask=mask)
    cache.save(tmp_path / "a.cache", ids, llama)
    longer = torch.cat([ids, prompt(9, len(padding))], dim=1)
    loaded = [tersekv.CompressedCache.load(tmp_path / "a.cache", llama) for _ in range(2)]
    assert loaded[0].keep_common(longer, torch.nn.functional.pad(mask, (0, 9), value=1)) == 80
    assert loaded[1].keep_common(longer) == 0


def test_generate_notices_another_prompt(llama):
    ids, other = prompt(60), prompt(90, seed=3)
    other[:, :20] = ids[:, :20]
    other[:, 20] = (ids[:, 20] + 1) % 90 + 3
    cache = filled(llama, ids)
    with tersekv.compress(llama, LOSSLESS):
        with pytest.warns(
            UserWarning, match=r"does not begin with the 60 tokens.*differs from token 20 on.*keep_common"
        ):
            llama.generate(other, past_key_values=copy.deepcopy(cache), max_new_tokens=2)
        for short in (ids, ids[:, :50]):
            with pytest.raises(UserError, match=r"the cache that was passed holds 60.*keep_common"):
                llama.generate(short, past_key_values=cache, max_new_tokens=2)
        assert cache.keep_common(other) == 20
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            llama.generate(other, past_key_values=cache, max_new_tokens=2)


def test_generate_takes_new_tokens_alone(llama):
    """With a mask that is longer, `generate` gets the new tokens only, and nothing is compared."""
    ids, new = prompt(60), prompt(5, seed=2)
    cache = filled(llama, ids)
    with tersekv.compress(llama, LOSSLESS), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mask = torch.ones(1, 65, dtype=torch.int64)
        llama.generate(new, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
    assert cache.keep_common(torch.cat([ids, new], dim=1)) == 64
