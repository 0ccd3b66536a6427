"""Recipes: the codecs of keys and values, the token policy, and exceptions for single layers.

    recipe  = [policy "+"] coder {";" layers "=" coder}     kivi:bits=2;0-1=exact
    coder   = method ["/" method]                           keys / values: qjl/uniform:bits=4
    method  = name [":" option "=" value {"," ...}]         window:sinks=8,recent=64+kivi:bits=4,pre_rope=true
    layers  = "3" | "0-14" | "-1"                           -1 is the last layer

A coder can also be the name of a preset: `default` or `safe`, as in snapkv:budget=0.25+safe. `small`, which has a
policy, is a whole recipe.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tersekv.codecs import Codec, Method, Pair, method_of, methods, registered
from tersekv.codecs.common.centred import with_centre
from tersekv.errors import UserError, hint, of_other_tools
from tersekv.plan import LayerPlan as LayerPlan
from tersekv.policies import TokenPolicy, policies
from tersekv.policies.mixed import RECOMMENDED

PRESETS = {
    "default": "trellis:bits=3.5,calibration=prompt",
    "safe": "trellis:bits=4,calibration=prompt",
    "small": RECOMMENDED,
}
"""Named recipes that need no calibration. `default` and `safe` find in long texts what the full cache finds, `small`
nearly all of it (docs/recipes.md). Commands use `default` if no recipe is given."""

DEFAULT_POLICY = "window"

PRE_ROPE, CENTRE = "pre_rope", "centre"
"""Options that every method has: keys are coded before RoPE; the mean of keys before RoPE is removed."""

CALIBRATION = "calibration"
"""Name of the option that says where fitted tensors are from. Every method with `centre=true` has it."""


@dataclass(frozen=True)
class Term:
    """Name of a method or policy with its options, sorted by name."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = ",".join(f"{k}={written(v)}" for k, v in self.options)
        return f"{self.name}:{options}" if options else self.name

    def to_dict(self) -> dict[str, Any]:
        """Return the term as a dictionary with the keys "name" and "options"."""
        return {"name": self.name, "options": dict(self.options)}


@dataclass(frozen=True)
class Coder:
    """Method of the keys and, if different, of the values."""

    keys: Term
    values: Term | None = None

    def __str__(self) -> str:
        return str(self.keys) if self.values is None else f"{self.keys}/{self.values}"

    def at(self, layer: int) -> tuple[Codec, Codec]:
        """Return the codecs of the keys and values of one layer."""
        keys, values = _build(self.keys).at(layer)
        return keys, values if self.values is None else _build(self.values).at(layer)[1]


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe. Parsing its `str()` or `to_json()` gives an equal recipe."""

    coder: Coder
    tokens: Term = field(default_factory=lambda: Term(DEFAULT_POLICY))
    layers: tuple[tuple[str, Coder], ...] = ()

    def __post_init__(self) -> None:
        policy = self.policy()
        for keys, values in [coder.at(0) for coder in self.coders]:
            try:
                policy.check(keys, values)
            except UserError as error:
                raise UserError(f"{self.tokens.name}: {error}") from error

    @staticmethod
    def parse(recipe: str | Recipe | None) -> Recipe:
        """Parse a recipe string. A Recipe is returned unchanged."""
        if isinstance(recipe, Recipe):
            return recipe
        if not isinstance(recipe, str) or not recipe.strip():
            raise UserError(
                f"a recipe is a string like 'kivi:bits=4', got {recipe!r}; `tersekv list` shows the methods"
            )
        head, *rest = _without_spaces(recipe).split(";")
        policy, plus, coder = PRESETS.get(head, head).rpartition("+")
        _check_order(policy, plus, coder)
        tokens = _term(policy, policies(), "token policy") if plus else Term(DEFAULT_POLICY)
        overrides = [_override(part, recipe) for part in rest]
        return Recipe(_coder(coder), tokens, tuple((spec, _coder(other)) for spec, other in overrides))

    def __str__(self) -> str:
        policy = "" if self.tokens == Term(DEFAULT_POLICY) else f"{self.tokens}+"
        return policy + ";".join([str(self.coder), *(f"{spec}={coder}" for spec, coder in self.layers)])

    @property
    def name(self) -> str:
        """Name of the preset if the recipe is one, otherwise the recipe itself."""
        return next((name for name, preset in PRESETS.items() if preset == str(self)), str(self))

    def to_json(self) -> str:
        """Return the recipe as JSON with keys, values, tokens and layers."""
        layers = [{"layers": spec, **_coder_dict(coder)} for spec, coder in self.layers]
        return json.dumps({**_coder_dict(self.coder), "tokens": self.tokens.to_dict(), "layers": layers})

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Parse the output of `to_json`. Names and options are checked as in `parse`."""
        try:
            data = json.loads(text)
            tokens = _checked(data["tokens"], policies(), "token policy")
            layers = tuple((str(entry["layers"]), _coder_from(entry)) for entry in data["layers"])
            return Recipe(_coder_from(data), tokens, layers)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"this is not a recipe in JSON ({error}); write one with Recipe.to_json()") from error

    @property
    def coders(self) -> tuple[Coder, ...]:
        """The coder of most layers, and those of the overrides."""
        return self.coder, *(coder for _, coder in self.layers)

    def with_terms(self, changed: Callable[[Term], Term]) -> Recipe:
        """Return the recipe with every method changed in this way."""

        def coder(one: Coder) -> Coder:
            return Coder(changed(one.keys), one.values and changed(one.values))

        return Recipe(coder(self.coder), self.tokens, tuple((spec, coder(one)) for spec, one in self.layers))

    def learning_from_prompt(self) -> Recipe | None:
        """Return the recipe with `calibration=prompt` set for every method that has this option.

        None if a method then still needs a calibration corpus.
        """

        def term(one: Term) -> Term:
            options, method = dict(one.options), methods()[one.name]
            fitted = CALIBRATION in method.parameters or options.get(CENTRE)
            return Term(one.name, tuple(sorted((options | ({CALIBRATION: "prompt"} if fitted else {})).items())))

        other = self.with_terms(term)
        return None if any(codec.needs_fit == "corpus" for one in other.coders for codec in one.at(0)) else other

    def policy(self) -> TokenPolicy:
        """Build the token policy."""
        try:
            return policies()[self.tokens.name](**dict(self.tokens.options))
        except UserError as error:
            raise UserError(f"{self.tokens.name}: {error}") from error

    def plan(self, layer: int, layers: int) -> LayerPlan:
        """Return the codecs and policy of one layer.

        If several overrides name the layer, the last one wins.
        """
        coder = self.coder
        for spec, other in self.layers:
            if layer in _layer_range(spec, layers):
                coder = other
        return LayerPlan(*coder.at(layer), self.policy(), layer, layers)


def register_codec(name: str, codec: type[Codec] | Method) -> None:
    """Make a codec of your own a method that recipes name, until this process ends.

    Registering the same name again replaces the codec. A saved cache that uses it loads only where it is registered.

    name: lower-case letters, digits and underscores, for example "mulaw". codec: a frozen dataclass derived from
    `tersekv.codecs.Codec`, which then codes keys and values, or a `Method`, which says what codes which side.

    Raises:
        UserError: a name that a recipe cannot hold or that is taken, a class that is not a dataclass, options without
            a default.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{name!r} is not a valid name of a method; use a-z, 0-9 and _, for example 'mulaw'")
    taken = {*methods(), *policies(), *PRESETS} - registered.keys()
    if name in taken:
        raise UserError(f"'{name}' is taken; choose a name other than {', '.join(sorted(taken))}")
    registered[name] = codec if isinstance(codec, Method) else method_of(name, codec)
    methods.cache_clear()


def written(value: Any) -> str:
    """Format an option's value as in a recipe."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _layer_range(spec: str, layers: int) -> range:
    first, dash, last = spec.partition("-") if not spec.startswith("-") else (spec, "", "")
    start = int(first) % layers if first.startswith("-") and int(first) >= -layers else int(first)
    stop = int(last) if dash else start
    if not 0 <= start <= stop < layers:
        raise UserError(f"layers '{spec}' do not exist; the model has layers 0 to {layers - 1}")
    return range(start, stop + 1)


def _build(term: Term) -> Pair:
    options, method = dict(term.options), methods()[term.name]
    pre_rope = options.pop(PRE_ROPE, None)
    centre = CENTRE not in method.parameters and options.pop(CENTRE, False)
    source: Any = options.get(CALIBRATION)
    if CALIBRATION not in method.parameters:
        source = options.pop(CALIBRATION, None)
        if source is not None and not centre:
            raise UserError(f"{term.name}: calibration={source} is of the mean of keys, so it needs centre=true")
    try:
        pair = method.build(**options)
        pair = pair if pre_rope is None else pair.with_pre_rope(pre_rope)
        source = source or getattr(pair.keys, CALIBRATION, "prompt")
        return with_centre(pair, source) if centre else pair
    except UserError as error:
        raise UserError(f"{term.name}: {error}") from error


def _coder(text: str) -> Coder:
    coder = PRESETS.get(text, text)
    if "+" in coder:
        raise UserError(f"{text} is a preset with a policy of its own; use it alone, or default, as in snapkv+default")
    keys, slash, values = coder.partition("/")
    _check_presets(keys, values, text)
    return Coder(_term(keys, methods(), "method"), _term(values, methods(), "method") if slash else None)


def _coder_dict(coder: Coder) -> dict[str, Any]:
    return {"keys": coder.keys.to_dict(), "values": coder.values.to_dict() if coder.values else None}


def _coder_from(data: Mapping[str, Any]) -> Coder:
    values = data["values"]
    return Coder(_checked(data["keys"], methods(), "method"), _checked(values, methods(), "method") if values else None)


def _term(text: str, known: Mapping[str, Any], what: str) -> Term:
    """Parse name:option=value,…"""
    name, colon, rest = text.partition(":")
    if not name:
        raise UserError(
            f"a {what} is missing; write policy+method, keys/values or just a method. Known are {', '.join(known)}"
        )
    first = re.split(r"[=,]", name)[0]
    if first != name:
        _check_presets(first, "", text)
        if first in known:
            raise UserError(
                f"'{name}' lacks a colon; write {first}:option=value, for example {first}:{_example(known[first])}"
            )
    options = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = part.partition("=")
        if not equals or not value or not option.isidentifier():
            example = _example(known.get(name))
            raise UserError(
                f"'{part}' in '{text}' is not an option; write name=value, for example {example}, and commas"
            )
        if option in options:
            raise UserError(f"option '{option}' occurs twice in '{text}'; give it once")
        options[option] = value
    return _checked({"name": name, "options": options}, known, what)


def _checked(data: Mapping[str, Any], known: Mapping[str, Any], what: str) -> Term:
    """Build a term after checking its name, its options and the types of their values."""
    name, options = data["name"], data["options"]
    if name not in known:
        everything = [*known, *PRESETS] if what == "method" else known
        near = (what == "method" and of_other_tools(name)) or hint(name, everything) or "."
        raise UserError(f"unknown {what} '{name}'{near} Known are {', '.join(everything)}")
    defaults = _defaults(known[name])
    for option in options:
        if option not in defaults:
            of = next((p for p in ("window", *policies()) if option in _defaults(policies()[p])), None)
            tip = f"; the token policy {of} has it." if of and what == "method" else hint(option, defaults) or "."
            raise UserError(f"{what} '{name}' has no option '{option}'{tip} {name} has {', '.join(defaults) or 'none'}")
    typed = {option: _typed(name, option, value, defaults[option]) for option, value in options.items()}
    return Term(name, tuple(sorted(typed.items())))


def _example(entry: Any) -> str:
    """Return one option of a method or policy with its default, for error messages."""
    defaults = {"bits": 4} if entry is None else _defaults(entry)
    option = "bits" if "bits" in defaults else next(iter(defaults))
    return f"{option}={written(defaults[option])}"


def _defaults(entry: Any) -> dict[str, Any]:
    if isinstance(entry, type):
        return dict(vars(entry()))
    every = {PRE_ROPE: entry.build().keys.pre_rope, CENTRE: False, CALIBRATION: "prompt"}
    return every | {name: parameter.default for name, parameter in entry.parameters.items()}


def _typed(name: str, option: str, value: Any, default: Any) -> Any:
    """Convert `value` to the type of `default`."""
    kind = type(default)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text]
        if kind is float and not (re.fullmatch(r"[\d.eE+-]+", text) and math.isfinite(float(text))):
            raise ValueError(text)
        return kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        if kind is int and re.fullmatch(r"-?\d+\.0*", text):
            raise UserError(f"{name}:{option}={value} is wrong; write {option}={text.split('.')[0]}") from None
        raise UserError(
            f"{name}:{option}={value} is wrong; {option} takes {wanted}, for example {written(default)}"
        ) from None


# ---------------------------------------------------------------- recipe text and its errors


def _without_spaces(recipe: str) -> str:
    """Check that a recipe is ASCII and remove the spaces around its separators."""
    if odd := next((letter for letter in recipe if not letter.isascii()), None):
        raise UserError(
            f"recipe '{recipe}' has the character '{odd}' (U+{ord(odd):04X}); write it in ASCII, such as kivi:bits=4"
        )
    text = re.sub(r"\s*([+/;:,=])\s*", r"\1", recipe.strip())
    if re.search(r"\s", text):
        example = re.sub(r"(?i)(?<=\d)\s+(?=[kmgt]i?b\b)", "", text)  # 512 MB
        example = re.sub(r"^([\w+/]+)\s+", r"\1:", example)
        example = re.sub(r"\s+(?=[\w.]+($|[,/;+]))", "=", example)
        example = re.sub(r"\s+", ",", example)
        raise UserError(f"recipe '{recipe}' has a space where a separator is missing; write for example {example}")
    return text


def _check_order(policy: str, plus: str, coder: str) -> None:
    """Raise UserError if a policy is where a method belongs, or the other way round."""
    for sign, part, form in (("+", policy, "policy+method"), ("/", coder.partition("/")[2], "keys/values")):
        if sign in part:
            raise UserError(f"'{policy}{plus}{coder}' has more than one {sign}; write {form}, with one of each")
    name, method = (re.split(r"[:/]", part)[0] for part in (policy, coder))
    kind = "preset" if name in PRESETS else "method"
    coders = (*methods(), *PRESETS)
    if method in policies():
        if name in coders:
            _coder(name)  # raises UserError for a preset that has a policy
            raise UserError(f"{name} is a {kind} and {method} a token policy, which goes first: write {coder}+{policy}")
        chosen, _, other = coder.partition("/")
        after = f"{chosen}+{'default' if not other or other in PRESETS else other}"
        after = (coder == method and policies()[method].recommended) or after
        raise UserError(f"{method} is a token policy, not a method; write {after}, or another method after the +")
    if name in coders:
        raise UserError(
            f"{name} is a {kind}, not a token policy; write keys/values (kivi:bits=4/int4) for two methods, or one of "
            f"the policies {', '.join(policies())} before the +"
        )


def _override(part: str, recipe: str) -> tuple[str, str]:
    """Split an override such as 0-1=exact into its layers and its coder."""
    spec, equals, coder = part.partition("=")
    if not part or (equals and not coder):
        what = f"ends in '{part}'" if part else "has nothing after a semicolon"
        raise UserError(f"recipe '{recipe}' {what}; write layers=method there, for example ;-1=exact, or leave it out")
    if any(spec in method.parameters for method in methods().values()):
        raise UserError(f"'{part}' in recipe '{recipe}' is an option, and a semicolon starts layers; use a comma there")
    if not equals or not re.fullmatch(r"-?\d+|\d+-\d+", spec):
        raise UserError(
            f"'{part}' in recipe '{recipe}' is not a layer override; write one layer or a range each, for example "
            ";0-1=exact;-1=exact"
        )
    first, dash, last = spec.partition("-") if spec[0] != "-" else (spec, "", "")
    if dash and int(first) > int(last):
        raise UserError(f"layers {spec} in recipe '{recipe}' run backwards; write {last}-{first}")
    if "+" in PRESETS.get(coder, coder):
        raise UserError(
            f"'{part}' in recipe '{recipe}' has a token policy, and one policy serves all layers; leave it out"
        )
    return spec, coder


def _check_presets(keys: str, values: str, text: str) -> None:
    """Raise UserError if a preset has options or is one of two methods."""
    names = [part.partition(":")[0] for part in (keys, values)]
    if preset := next((name for name in names if name in PRESETS), None):
        raise UserError(f"{preset} is a preset, which cannot be combined; in '{text}' write {PRESETS[preset]} instead")
