"""`tersekv.register_codec`: a class outside the library becomes a method that recipes name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv import codecs
from tersekv.codecs.base import Codec, Method, Pair, for_both_sides
from tersekv.codecs.exact import Exact
from tersekv.codecs.normalfloat import NormalFloat


@dataclass(frozen=True)
class Coarse(NormalFloat):
    bits: int = 3
    group: int = 32


pytestmark = pytest.mark.usefixtures("unregister")


def test_a_class_is_a_method(llama):
    tersekv.register_codec("coarse", Coarse)
    assert "coarse" in codecs.methods()
    assert list(codecs.methods()) == sorted(codecs.methods())
    assert str(tersekv.Recipe.parse("coarse:bits=2")) == "coarse:bits=2"
    with pytest.raises(tersekv.UserError, match="bits=9 is out of range"):
        tersekv.Recipe.parse("coarse:bits=9")
    with tersekv.compress(llama, "window:recent=16+coarse/kivi:bits=2"), torch.no_grad():
        cache = tersekv.CompressedCache(llama, "window:recent=16+coarse/kivi:bits=2")
        assert torch.isfinite(llama(prompt(200), past_key_values=cache).logits).all()
    assert cache.footprint().ratio() > 1


def test_a_method_may_code_each_side_otherwise():
    tersekv.register_codec("two_sides", Method("two sides", "", lambda: Pair(Coarse(), Exact(side="values"))))
    keys, values = tersekv.Recipe.parse("two_sides").coder.at(0)
    assert isinstance(keys, Coarse)
    assert isinstance(values, Exact)


def test_registering_again_replaces():
    tersekv.register_codec("coarse", Coarse)
    tersekv.register_codec("coarse", Method("coarse", "", for_both_sides(Exact)))
    assert isinstance(tersekv.Recipe.parse("coarse").coder.at(0)[0], Exact)


@pytest.mark.parametrize("name", ["", "Coarse", "my-codec", "4bit", "a:b", "with space"])
def test_names_that_no_recipe_can_hold(name):
    with pytest.raises(tersekv.UserError, match="not a valid name"):
        tersekv.register_codec(name, Coarse)


@pytest.mark.parametrize("name", ["kivi", "snapkv", "default"])
def test_names_that_are_taken(name):
    with pytest.raises(tersekv.UserError, match=f"'{name}' is taken"):
        tersekv.register_codec(name, Coarse)
    assert codecs.registered == {}


def test_what_is_no_codec():
    class Forgotten(NormalFloat):
        bits: int = 3

    @dataclass(frozen=True)
    class Unfinished(Codec):
        bits: int = 3

    class WithoutDefault(Exact):
        def __init__(self, bits):
            raise NotImplementedError

    WithoutDefault = dataclass(frozen=True, init=False)(WithoutDefault)

    for one in (Forgotten, dict, Coarse()):
        with pytest.raises(tersekv.UserError, match="is not a codec"):
            tersekv.register_codec("mine", one)
    for one in (Unfinished, WithoutDefault):
        with pytest.raises(tersekv.UserError, match=f"{one.__name__} cannot be built without options"):
            tersekv.register_codec("mine", one)
    assert codecs.registered == {}


def test_a_saved_cache_needs_its_codec(llama, tmp_path):
    tersekv.register_codec("coarse", Coarse)
    with tersekv.compress(llama, "coarse"), torch.no_grad():
        cache = tersekv.CompressedCache(llama, "coarse")
        llama(prompt(300), past_key_values=cache)
    cache.save(tmp_path / "one.cache")
    assert tersekv.CompressedCache.load(tmp_path / "one.cache", llama).footprint() == cache.footprint()
    codecs.registered.clear()
    codecs.methods.cache_clear()
    with pytest.raises(tersekv.UserError, match="unknown method 'coarse'"):
        tersekv.CompressedCache.load(tmp_path / "one.cache", llama)
