"""Recipes as text: presets, separators, and what is said where they are wrong. `recipe.py` reads what is between."""

from __future__ import annotations

import re

from tersekv.codecs import methods
from tersekv.errors import UserError
from tersekv.policies import policies

PRESETS = {
    "small": "trellis:bits=2,calibration=prompt",
    "default": "trellis:bits=3,calibration=prompt",
    "safe": "trellis:bits=4,calibration=prompt",
}
"""Coders by name that need no corpus; measured in docs/methods/trellis.md. Commands take `default` without a recipe."""


def without_spaces(recipe: str) -> str:
    """A recipe in ASCII without the spaces around its separators."""
    if odd := next((letter for letter in recipe if not letter.isascii()), None):
        raise UserError(
            f"recipe '{recipe}' has the character '{odd}' (U+{ord(odd):04X}); write it in ASCII, such as kivi:bits=4"
        )
    text = re.sub(r"\s*([+/;:,=])\s*", r"\1", recipe.strip())
    if re.search(r"\s", text):
        example = re.sub(r"^([\w+/]+)\s+", r"\1:", text)
        example = re.sub(r"\s+(?=[\w.]+($|[,/;+]))", "=", example)
        example = re.sub(r"\s+", ",", example)
        raise UserError(f"recipe '{recipe}' has a space where a separator is missing; write for example {example}")
    return text


def check_order(policy: str, plus: str, coder: str) -> None:
    """Raise UserError where a policy stands in a method's place, or a method in a policy's."""
    for sign, part, form in (("+", policy, "policy+method"), ("/", coder.partition("/")[2], "keys/values")):
        if sign in part:
            raise UserError(f"'{policy}{plus}{coder}' has more than one {sign}; write {form}, with one of each")
    name, method = (re.split(r"[:/]", part)[0] for part in (policy, coder))
    kind = "preset" if name in PRESETS else "method"
    coders = (*methods(), *PRESETS)
    if method in policies():
        if name in coders:
            why = f"{name} is a {kind} and {method} a token policy, which comes first"
            raise UserError(f"{why}: write {coder}+{policy}")
        after = coder.replace("/", "+", 1) if "/" in coder else f"{coder}+default"
        raise UserError(f"{method} is a token policy, not a method; write {after}, or another method after the +")
    if name in coders:
        raise UserError(
            f"{name} is a {kind}, not a token policy; write keys/values (kivi:bits=4/int4) for two methods, or one of "
            f"the policies {', '.join(policies())} before the +"
        )


def override(part: str, recipe: str) -> tuple[str, str]:
    """Split 0-1=exact into the layers and what they get."""
    spec, equals, coder = part.partition("=")
    if not part or (equals and not coder):
        what = f"ends in '{part}'" if part else "has nothing after a semicolon"
        raise UserError(f"recipe '{recipe}' {what}; write layers=method there, for example ;-1=exact, or leave it out")
    if any(spec in method.parameters for method in methods().values()):
        raise UserError(f"'{part}' in recipe '{recipe}' is an option, and a semicolon begins layers; put a comma there")
    if not equals or not re.fullmatch(r"-?\d+|\d+-\d+", spec):
        raise UserError(
            f"'{part}' in recipe '{recipe}' is no layer override; write one layer or a range each, for example "
            ";0-1=exact;-1=exact"
        )
    first, dash, last = spec.partition("-") if spec[0] != "-" else (spec, "", "")
    if dash and int(first) > int(last):
        raise UserError(f"layers {spec} in recipe '{recipe}' run backwards; write {last}-{first}")
    if "+" in coder:
        raise UserError(
            f"'{part}' in recipe '{recipe}' has a token policy, and one policy serves all layers; leave it out"
        )
    return spec, coder


def check_presets(keys: str, values: str, text: str) -> None:
    """Raise UserError where a preset has options or is one of two methods."""
    for part in (keys, values):
        preset = part.partition(":")[0]
        if preset in PRESETS:
            raise UserError(f"{preset} is a preset, which stands alone; in '{text}' write {PRESETS[preset]} instead")
