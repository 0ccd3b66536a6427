"""Tensor parallelism (`tp_plan="auto"`): models with distributed KV heads, two ranks on one CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from conftest import SHAPE
from ranks import torchrun
from tersekv.cache.parallel import HeadShard
from tersekv.codecs import Codec, methods
from tersekv.codecs.common.centred import with_centre
from tersekv.errors import UserError
from tersekv.hf.parallel import heads_of
from test_latent import built


def save_model(folder: Path) -> None:
    """Save a model with two KV heads of 64 channels and weights large enough for many different
    tokens."""
    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": 2, "head_dim": 64, "initializer_range": 0.3}
    tf.LlamaForCausalLM(tf.LlamaConfig(**shape)).save_pretrained(folder)


def test_two_ranks_give_the_result_of_one_process(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' tp_plan needs accelerate")
    save_model(tmp_path / "model")
    built("glm4_moe_lite").save_pretrained(tmp_path / "latent")
    torchrun("run_tensor_parallel.py", str(tmp_path))


def test_heads_of_each_rank(llama):
    """Heads are distributed only where transformers has distributed the model."""
    assert heads_of(llama, 2, 2) is None
    assert heads_of(llama, 1, 2) is None
    mesh = SimpleNamespace(ndim=1, size=lambda: 4, get_local_rank=lambda: 3, get_group=lambda: None)
    for model in (SimpleNamespace(_device_mesh=mesh), SimpleNamespace(_device_mesh=Meshes(ndim=2, tp=mesh))):
        heads = heads_of(model, 2, 8)
        assert (heads.first, heads.count, heads.total) == (6, 2, 8)
        with pytest.raises(UserError, match="holds 1 of 6 key-value heads, and the model is split among 4 processes"):
            heads_of(model, 1, 6)


class Meshes(SimpleNamespace):
    """Several mesh dimensions by name."""

    def __getitem__(self, name):
        return getattr(self, name)


CODECS = {
    f"{name}{i}{codec.side}": codec
    for name, method in methods().items()
    for i, options in enumerate(({}, *method.variants))
    for pair in [method.build(**options)]
    for codec in (pair.keys, pair.values)
} | {
    f"{name} centred": with_centre(methods()[name].build(**options), "prompt").keys.with_mean(torch.zeros(2, 3, 1, 64))
    for name, options in (("polarquant", {"codebook": "online"}), ("turboquant", {"bits": 2.5}))
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_share_of_the_heads_equals_that_of_all(codec: Codec):
    """Heads fitted and encoded separately decode to the same bits as all heads together.

    The tokens of other heads are gathered if a codec declares that it needs them.
    """
    x = (
        torch.randn(2, 3, 128, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 3, 9])[:, None, None]
    )
    fitted = codec.fit(x)
    expected = fitted.decode(fitted.encode(x), 64)
    for first, count in ((0, 1), (1, 2)):
        own = x[:, first : first + count]
        heads = HeadShard(first, count, 3, lambda part: x)
        learnt = heads.fit(codec, own)
        planes = heads.encode(learnt, own)
        assert torch.equal(learnt.decode(planes, 64), expected[:, first : first + count])


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_codecs_declare_their_use_of_other_heads(codec: Codec):
    """Without `fit_spans_heads` and `encode_spans_heads` the result is the same without the other
    heads."""
    x = (
        torch.randn(1, 3, 128, 64, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1.0, 3, 9])[:, None, None]
    )
    fitted = codec.fit(x)
    alone = codec.fit(x[:, :1]) if not codec.fit_spans_heads else fitted.of_heads(0, 1)
    if not codec.encode_spans_heads:
        expected = fitted.decode(fitted.encode(x), 64)[:, :1]
        assert torch.equal(alone.decode(alone.encode(x[:, :1]), 64), expected)
