"""The model families that the tests build, as the table of docs/models.md.

    python tests/support/list_families.py           # write the table into docs/models.md
    python tests/support/list_families.py --print   # print it

The configs of the tests' models tell if a family's keys have a bias. Names of classes are read from
the sources.
"""

from __future__ import annotations

import ast
import copy
import importlib
import re
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "models.md"
BEGIN, END = "<!-- families: made by tests/support/list_families.py -->", "<!-- end of families -->"
FAMILIES = (("conftest.py", "MODELS"), ("hf/test_architectures.py", "BUILD"), ("hf/test_recent_families.py", "RECENT"))
"""Files, and the dictionaries in them whose values build a model."""

ELSEWHERE = {
    "diffllama": ("hf/test_transformers.py", "DiffLlamaForCausalLM"),
    "glm": ("models/test_rope.py", "GlmForCausalLM"),
    "qwen3_next": ("hf/test_compiled.py", "Qwen3NextForCausalLM"),
}
"""Families that single tests build, by name."""

SPECIAL = {
    "llama": "full attention, grouped queries",
    "mistral": "sliding window in every layer",
    "qwen2": "full attention, biases on q, k and v",
    "qwen3": "full attention, norms on q and k",
    "gemma2": "sliding and full layers in turn, soft-capped scores",
    "gemma3": "sliding and full layers with two RoPEs",
    "phi3": "one projection for q, k and v",
    "gpt_oss": "sliding and full layers, attention sinks as logits, experts",
    "deepseek_v3": "latent attention, policies that keep every token",
    "moshi": "a window in the config that its mask does not follow",
    "afmoe": "sliding and full layers, experts",
    "whisper": "the decoder alone",
    "bart": "the decoder alone",
    "bigbird_pegasus": "the decoder alone",
    "diffllama": "uses values before attention, as Doge does: tokens are decoded",
    "glm": "RoPE over a part of the channels, pairs side by side",
    "qwen3_next": "attention layers beside recurrent ones",
    "qwen3_5": "attention layers beside recurrent ones, RoPE over a part of the channels",
    "qwen3_5_moe": "as qwen3_5, with experts",
    "gemma3n": "layers that share keys: tokens are decoded, token policies that evict are refused",
    "gemma4": "as gemma3n; refused if its full layers have other head dims, which is the default of its config",
    "smollm3": "some layers without RoPE",
    "granitemoehybrid": "attention layers beside recurrent ones, with or without RoPE, experts",
    "cohere2": "sliding layers with RoPE, full layers without",
}
"""Properties of a family that matter to a cache."""


def families() -> list[tuple[str, str]]:
    """Names of families with the class of transformers that is built."""
    found = []
    for file, name in FAMILIES:
        for node in ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Assign) and any(getattr(t, "id", "") == name for t in node.targets)
            if named and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    model = re.search(r"tf\.(\w+For\w+)\(", ast.unparse(value))
                    if isinstance(key, ast.Constant) and model:
                        found.append((str(key.value), model.group(1)))
    return found + [(name, model) for name, (file, model) in ELSEWHERE.items() if model in (TESTS / file).read_text()]


def key_bias(model: str, built: Any = None) -> str:
    """Answer if the keys of a class of models have a bias, and which field of the config decides.

    built: a function that builds a small model of the class, whose config is used. By default it is
        the class's usual config with four layers.
    """
    import torch
    import transformers

    from tersekv.models.config import has_key_bias

    usual = getattr(transformers, model).config_class
    with torch.device("meta"):
        config = built().config if built else usual(num_hidden_layers=4)
    fields = [name for name, value in vars(config).items() if "bias" in name and isinstance(value, bool)]
    for name in fields:
        setattr(config, name, False)
    if has_key_bias(config):
        return "always"
    for name in fields:
        biased = copy.deepcopy(config)
        setattr(biased, name, True)
        if has_key_bias(biased):
            return f"`{name}`, on by default" if getattr(usual(), name) else f"`{name}`"
    return "never"


def table() -> str:
    """The table in Markdown."""
    builders: dict[str, Any] = {}
    for file, name in FAMILIES:
        builders |= getattr(importlib.import_module(Path(file).stem), name)
    lines = ["| family | class in transformers | special about it | bias of keys |", "|---|---|---|---|"]
    for name, model in families():
        lines.append(f"| {name} | `{model}` | {SPECIAL.get(name, '')} | {key_bias(model, builders.get(name))} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table between its marks."""
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> None:
    """Print the table, or write it."""
    if "--print" in sys.argv[1:]:
        print(table())
        return
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.path += map(str, TESTS.glob("**/"))  # as under pytest
    main()
