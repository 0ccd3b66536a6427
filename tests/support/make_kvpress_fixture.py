"""Record the tokens that NVIDIA's kvpress keeps of one prompt on one tiny model in
tests/support/kvpress_kept.json.

kvpress needs transformers < 5.3, so this runs in its own environment:

    python -m venv kvpress-env
    kvpress-env/bin/pip install torch kvpress "transformers<5.3"
    kvpress-env/bin/python tests/support/make_kvpress_fixture.py

tests/policies/test_kvpress.py builds the same model and prompt with `tiny_llama` and `PROMPT` and compares.
The kept tokens come from kvpress's own gather: it compresses positions instead of values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FILE = Path(__file__).with_name("kvpress_kept.json")
PROMPT = torch.randint(3, 97, (1, 256), generator=torch.Generator().manual_seed(5))
RECIPES = {
    "streaming": "streaming:budget=0.3",
    "observed attention": "h2o:budget=0.3,sinks=0,heavy=1,score=mean",
    "snapkv": "snapkv:budget=0.3,sinks=0",
    "snapkv, kernel 5, window 64": "snapkv:budget=0.5,sinks=0,kernel=5,window=64",
    "pyramidkv": "pyramidkv:budget=0.3,sinks=0,window=16,recent=16,beta=4",
}
"""Our recipes for kvpress's methods with the same settings."""


def tiny_llama(attention: str = "sdpa") -> LlamaForCausalLM:
    """Build a Llama whose weights do not depend on a library's initialisation."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def kept_by(press: Any, attention: str = "sdpa") -> list[list[list[int]]]:
    """Return the sorted kept positions by layer and KV head."""
    kept: list[list[list[int]]] = []
    original = press.compress

    def compress(module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        positions = torch.arange(keys.shape[2], dtype=keys.dtype)[None, None, :, None].expand_as(values)
        _, chosen = original(module, hidden, keys, positions, attentions, kwargs)
        kept.append([sorted(int(p) for p in head[:, 0]) for head in chosen[0]])
        return original(module, hidden, keys, values, attentions, kwargs)

    press.compress = compress
    model = tiny_llama(attention)
    with torch.no_grad(), press(model):
        model(PROMPT, output_attentions=attention == "eager")
    return kept


def main() -> None:
    """Run every press and write the file."""
    import kvpress

    presses = {
        "streaming": kvpress.StreamingLLMPress(0.7, n_sink=4),
        "observed attention": kvpress.ObservedAttentionPress(0.7),
        "snapkv": kvpress.SnapKVPress(0.7, window_size=32, kernel_size=7),
        "snapkv, kernel 5, window 64": kvpress.SnapKVPress(0.5, window_size=64, kernel_size=5),
        "pyramidkv": kvpress.PyramidKVPress(0.7, window_size=16, kernel_size=7, beta=4),
    }
    kept = {name: kept_by(press, "eager" if "attention" in name else "sdpa") for name, press in presses.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(layers)}" for name, layers in kept.items())
    FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
