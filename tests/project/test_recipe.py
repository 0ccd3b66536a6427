"""Recipes: grammar, JSON, layers, and errors that say what to do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersekv.codecs import methods
from tersekv.errors import UserError
from tersekv.policies import policies
from tersekv.recipe import PRESETS, Recipe

STRINGS = [
    "kivi",
    "kivi:bits=4",
    "qjl/uniform:bits=4",
    "qjl:orthogonal=false,sketch=100",
    "window:recent=64,sinks=8+kivi:bits=4",
    "kivi:bits=2;0-1=exact;-1=int4",
    "window:exact=bf16+qjl/kivi:bits=4;3=exact/int4:group=32",
]


@pytest.mark.parametrize("text", STRINGS)
def test_round_trips(text):
    recipe = Recipe.parse(text)
    assert str(recipe) == text
    assert Recipe.parse(str(recipe)) == recipe
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.parse(recipe) is recipe
    assert hash(recipe) == hash(Recipe.parse(text))


def test_spaces_and_order_do_not_matter():
    assert Recipe.parse(" window : sinks=8 , recent=64 + kivi : bits = 4 ") == Recipe.parse(
        "window:recent=64,sinks=8+kivi:bits=4"
    )


names = st.sampled_from(sorted(methods()))


@given(keys=names, values=st.none() | names, layer=st.integers(0, 5), sinks=st.integers(0, 99))
def test_any_composition_round_trips(keys, values, layer, sinks):
    text = f"window:sinks={sinks}+{keys}" + (f"/{values}" if values else "") + f";{layer}={keys}"
    recipe = Recipe.parse(text)
    assert Recipe.parse(str(recipe)) == recipe == Recipe.from_json(recipe.to_json())
    assert recipe.plan(layer, 6).policy.sinks == sinks


def test_plan_per_layer():
    recipe = Recipe.parse("kivi:bits=2;0-1=exact;-1=int4;5=kivi:bits=3")
    bits = [recipe.plan(i, 8).keys.true_bits(64) for i in range(8)]
    assert bits == [16, 16, 3, 3, 3, 4, 3, 4.5]


def test_sides():
    plan = Recipe.parse("kivi:bits=4/int4").plan(0, 2)
    assert (plan.keys.side, plan.keys.options()["axis"]) == ("keys", "channel")
    assert (plan.values.side, plan.values.options()["group"]) == ("values", 64)


def test_initial_layers_of_a_composed_recipe():
    recipe = Recipe.parse("qjl/kivi:bits=4")
    assert [recipe.plan(i, 30).keys.options()["initial"] for i in (0, 14, 15, 29)] == [True, True, False, False]
    assert {recipe.plan(i, 30).values.options()["bits"] for i in range(30)} == {4}
    swapped = Recipe.parse("kivi:bits=4/qjl")
    assert {type(swapped.plan(i, 30).keys).__name__ for i in range(30)} == {"Uniform"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kivy", "unknown method 'kivy', did you mean 'kivi'"),
        ("zzz", "unknown method 'zzz'. Known are"),
        ("windw+kivi", "unknown token policy 'windw', did you mean 'window'"),
        ("kivi:bit=2", "method 'kivi' has no option 'bit', did you mean 'bits'"),
        ("kivi:recent=20", "'kivi' has no option 'recent'; the token policy window has it. kivi has pre_rope"),
        ("small,recent=20", "small is a preset, which cannot be combined"),
        ("snapkv/small", r"write snapkv\+default, or"),
        ("window:sink=1+kivi", "did you mean 'sinks'"),
        ("kivi:bits=9", "bits=9 is out of range; allowed are 1 to 8"),
        ("kivi:group=0", "group=0 is out of range"),
        ("qjl:seed=-1", "seed=-1 is out of range"),
        ("kivi:bits=2.5", "bits takes a whole number"),
        ("kivi:bits=two", "bits takes a whole number"),
        ("kivi:bits", "'bits' in 'kivi:bits' is not an option"),
        ("kivi:bits=2,bits=3", "occurs twice"),
        ("qjl:orthogonal=maybe", "takes true or false"),
        ("window:sinks=-1+kivi", "sinks=-1 is negative"),
        ("window:recent=99999999999999999999+kivi", "recent=99999999999999999999 is out of range"),
        ("h2o:budget=1e30+kivi", "budget=1e\\+30 is not allowed"),
        ("snapkv:window=99999999999999999999+kivi", "window=99999999999999999999 is not allowed"),
        ("subgen:variant=stream,delta=1e300+kivi", "delta=1e\\+300 is not allowed"),
        ("window:exact=fp8+kivi", "exact=fp8 is not allowed"),
        ("+kivi", "a token policy is missing"),
        ("kivi/", "a method is missing"),
        ("kivi;x=exact", "not a layer override"),
        ("kivi;3", "not a layer override"),
        ("kivi;3=exakt", "did you mean 'exact'"),
        ("", "a recipe is a string like"),
        (None, "a recipe is a string like"),
        ("snapkv:budget=0.25", r"snapkv is a token policy, not a method; write snapkv:budget=0.25\+default"),
        ("snapkv/kivi", r"not a method; write snapkv\+kivi, or"),
        ("kivi:bits=4+window", r"kivi is a method and window a token policy, .* first: write window\+kivi:bits=4$"),
        (
            "default+window:recent=8",
            r"default is a preset and window a .* write window:recent=8\+default",
        ),
        ("kivi+int4", "kivi is a method, not a token policy; write keys/values"),
        ("kivi bits=4", "has a space where a separator is missing; write for example kivi:bits=4$"),
        ("kivi:bits=4 group=16", "write for example kivi:bits=4,group=16$"),
        ("kivi:bits 4", "write for example kivi:bits=4$"),
        ("h2o:memory=512 MB+kivi", r"write for example h2o:memory=512MB\+kivi$"),
        ("h2o:memory 1.5 gib,recent=16+kivi", r"write for example h2o:memory=1.5gib,recent=16\+kivi$"),
        ("kivi,bits=4", "'kivi,bits=4' lacks a colon"),
        ("kivi=4", "lacks a colon; write kivi:option=value, for example kivi:bits=2"),
        ("KIVI", "did you mean 'kivi'"),
        ("kivi:BITS=4", "did you mean 'bits'"),
        ("defualt", "did you mean 'default'"),
        ("default:bits=2", "default is a preset, .* write trellis:bits=3.5,calibration=prompt instead"),
        ("safe/kivi", "safe is a preset, which cannot be combined"),
        ("kivi:bits=4.0", "kivi:bits=4.0 is wrong; write bits=4$"),
        ("kivi:bits=\uff14", r"has the character '.' \(U\+FF14\); write it in ASCII"),
        ("kivi:", "'' in 'kivi:' is not an option"),
        ("kivi:bits=4,", "'' in 'kivi:bits=4,' is not an option"),
        ("kivi::bits=4", "':bits=4' in .* is not an option"),
        ("kivi:=4", "'=4' in .* is not an option"),
        ("kivi;", "has nothing after a semicolon"),
        ("kivi;-1=", "ends in '-1='; write layers=method"),
        ("kivi;3-1=exact", "layers 3-1 in recipe .* run backwards; write 1-3"),
        ("kivi;bits=2", "is an option, and a semicolon starts layers; use a comma there"),
        ("kivi;0=window+exact", "has a token policy, and one policy serves all layers"),
        ("kivi;0=small", "has a token policy, and one policy serves all layers"),
        ("window+window+kivi", r"has more than one \+; write policy\+method"),
        ("++", r"has more than one \+"),
        ("kivi/int4/exact", "has more than one /; write keys/values"),
        ("snapkv:budget=2%+kivi", "budget takes a number"),
        ("snapkv:kernel=2+kivi", "snapkv: kernel=2 is not allowed"),
        ("kivi/turboquant:bits=9", "turboquant: bits=9 is not allowed"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UserError, match=message):
        Recipe.parse(text)


@pytest.mark.parametrize("layers", ["8", "3-9", "-9"])
def test_layers_that_do_not_exist(layers):
    with pytest.raises(UserError, match="the model has layers 0 to 7"):
        Recipe.parse(f"kivi;{layers}=exact").plan(0, 8)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"keys": {"name": "kivi"}})])
def test_wrong_json(text):
    with pytest.raises(UserError, match="not a recipe in JSON"):
        Recipe.from_json(text)


def test_json_is_checked_like_strings():
    data = json.loads(Recipe.parse("kivi").to_json())
    data["keys"]["options"] = {"bits": 99}
    with pytest.raises(UserError, match="bits=99 is out of range"):
        Recipe.from_json(json.dumps(data))
    data["keys"]["options"] = {"bit": 2}
    with pytest.raises(UserError, match="has no option 'bit'"):
        Recipe.from_json(json.dumps(data))


def test_policies_are_found_in_their_folder():
    assert "window" in policies()


def test_invalid_numbers():
    with pytest.raises(UserError, match="bits=1e400 is wrong; bits takes a number"):
        Recipe.parse("turboquant:bits=1e400")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_recipes_by_name(name):
    assert Recipe.parse(name) == Recipe.parse(PRESETS[name])
    assert Recipe.parse(f"{name};0=exact").coder == Recipe.parse(PRESETS[name]).coder
    assert str(Recipe.parse(name)) == PRESETS[name]
    assert Recipe.parse(name).plan(0, 1).keys.fits_on != "corpus"


def test_a_preset_with_a_policy_takes_no_other():
    assert Recipe.parse("snapkv:budget=0.25+default;0=exact").coder == Recipe.parse("default").coder
    for recipe in ("snapkv+small", "small+snapkv"):
        with pytest.raises(
            UserError, match=r"small is a preset with a policy of its own; use it alone, or .*\+default"
        ):
            Recipe.parse(recipe)


def test_a_preset_is_known_by_name():
    assert Recipe.parse("default").name == Recipe.parse(str(Recipe.parse("default"))).name == "default"
    assert Recipe.parse("snapkv:budget=0.25+default").name.startswith("snapkv:budget=0.25+trellis")
    assert Recipe.parse("kivi:bits=2").name == "kivi:bits=2"
