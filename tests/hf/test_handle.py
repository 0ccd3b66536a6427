"""The handle returned by `update`: a tensor-like object that becomes the tensor when it is used."""

from __future__ import annotations

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.hf.handle import PendingTokens


@pytest.fixture
def handles(llama):
    """Return the handles of keys and values of one token after 200, as our attention gets them, and
    the layer."""
    with tersekv.compress(llama, "kivi:bits=4"), torch.no_grad():
        cache = tersekv.CompressedCache(llama.config, "kivi:bits=4")
        llama(prompt(200), past_key_values=cache)
        keys, values = torch.randn(2, 1, 2, 1, 32).unbind(0)
        yield *cache.update(keys, values, 0), cache.layers[0], keys, values


def test_it_has_shape_and_dtype_of_its_tensor(handles):
    key, value, layer, keys, _ = handles
    assert isinstance(key, PendingTokens)
    assert key.shape == value.shape == (1, 2, 201, 32)
    assert (key.dtype, key.device) == (torch.float32, keys.device)
    assert layer.get_seq_length() == 200


def test_any_tensor_operation_decodes_it_and_appends_once(handles):
    key, value, layer, keys, values = handles
    query = torch.randn(1, 2, 1, 32)
    scores = torch.matmul(query, key.transpose(-1, -2))
    assert scores.shape == (1, 2, 1, 201)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert out.shape == (1, 2, 1, 32)
    assert torch.cat([key, keys], dim=2).shape[2] == 202
    assert torch.stack((value, value)).shape[0] == 2
    assert torch.equal(key[:, :, -1:], keys)
    assert torch.equal(value[:, :, -1:], values)
    assert layer.get_seq_length() == 201


def test_repeated_heads_stay_a_handle(handles):
    key, _, layer, *_ = handles
    repeated = key.repeat(1, 3, 1, 1)
    assert isinstance(repeated, PendingTokens)
    assert repeated.shape == (1, 6, 201, 32)
    assert layer.get_seq_length() == 200
    assert torch.equal(repeated.decoded(), key.decoded().repeat(1, 3, 1, 1))
    for sizes in ((2, 1, 1, 1), (1, 3, 1, 2), (1, 1, 1, 1, 1), ((1, 3, 1, 1),)):
        assert torch.equal(key.repeat(*sizes), key.decoded().repeat(*sizes))


def test_unknown_attributes_are_those_of_the_tensor(handles):
    key, *_ = handles
    assert key.ndim == 4
    with pytest.raises(AttributeError):
        _ = key.no_such_thing
