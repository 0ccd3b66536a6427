"""GGUF files of tiny models with random weights, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
BYTE_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PIECE_SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda **o: tf.LlamaConfig(**SIZES, **({"head_dim": 8, "tie_word_embeddings": True} | o)),
    "qwen2": lambda **o: tf.Qwen2Config(**SIZES, **({"tie_word_embeddings": False} | o)),
    "qwen3": lambda **o: tf.Qwen3Config(**SIZES, **({"head_dim": 16, "tie_word_embeddings": True} | o)),
    "gemma3": lambda **o: tf.Gemma3TextConfig(
        **SIZES, **({"head_dim": 16, "query_pre_attn_scalar": 256, "sliding_window": 24} | o)
    ),
}


def model_of(architecture: str, **options: Any) -> Any:
    """Return a model with random weights. options: of its config."""
    vocabulary = len(PIECE_SPECIALS) + 2 + 256 + 94 if architecture == "gemma3" else len(BYTE_SPECIALS) + 258
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[architecture](vocab_size=vocabulary, **options)).eval()
    for parameter in model.parameters():
        # Biases are zero and norms one in a new model, where a mistake would not show.
        if parameter.dim() == 1:
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape)
    return model


def write(path: Path, architecture: str = "llama", model: Any = None, template: str | None = "", **values: Any) -> Any:
    """Write a model to a GGUF file, and return it.

    template: "" for the architecture's own, None for none. values: further metadata, with __ for
    dots, under the architecture's name if it has no dot; None leaves a key out. `tensors` are added
    tensors, `dtype` the type of matrices.
    """
    model = model or model_of(architecture)
    tensors, dtype = values.pop("tensors", {}), values.pop("dtype", np.float32)
    writer = gguf.GGUFWriter(str(path), values.pop("named", architecture))
    for key, value in (
        _shape(model.config, architecture) | _tokens(architecture) | _further(architecture, values)
    ).items():
        if value is not None:
            _add(writer, key, value)
    if template is not None:
        writer.add_chat_template(template or (GEMMA if architecture == "gemma3" else CHATML))
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        stored = _as_llama_cpp(architecture, model.config, name, weight.float().numpy())
        writer.add_tensor(f"{names.get_name(module)}.{kind}", stored.astype(dtype if stored.ndim > 1 else np.float32))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_llama_cpp(architecture: str, config: Any, name: str, weight: np.ndarray) -> np.ndarray:
    """Return a weight in llama.cpp's layout: Llama's rotated channels are interleaved, and Gemma's
    norms contain the one."""
    if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
        heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
    return weight + 1 if architecture == "gemma3" and "norm" in name else weight


def _shape(config: Any, architecture: str) -> dict[str, Any]:
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]),
    }
    if architecture == "llama":
        keys["rope.dimension_count"] = config.head_dim
    if architecture in ("qwen3", "gemma3"):
        keys["attention.key_length"] = config.head_dim
    if architecture == "gemma3":
        keys["attention.sliding_window"] = config.sliding_window
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _tokens(architecture: str) -> dict[str, Any]:
    from tokenizers.pre_tokenizers import ByteLevel

    if architecture == "gemma3":
        letters = [chr(code) for code in range(33, 127)]
        tokens = [*PIECE_SPECIALS, "▁", "▁a", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
        types = [3] * len(PIECE_SPECIALS) + [1, 1] + [6] * 256 + [1] * len(letters)
        ids = {"bos": 2, "eos": 1, "unknown": 3, "padding": 0}
        more = {"model": "llama", "scores": [-float(i) for i in range(len(tokens))], "add_bos_token": True}
    else:
        letters = sorted(ByteLevel.alphabet())
        tokens = [*BYTE_SPECIALS, *letters, letters[70] + letters[71], letters[72] + letters[73]]
        types, ids = [3] * len(BYTE_SPECIALS) + [1] * 258, {"bos": 0, "eos": 2, "padding": 0}
        merges = [f"{letters[70]} {letters[71]}", f"{letters[72]} {letters[73]}"]
        more = {"model": "gpt2", "pre": "qwen2", "merges": merges, "add_bos_token": False}
    more |= {"tokens": tokens, "token_type": types} | {f"{kind}_token_id": value for kind, value in ids.items()}
    return {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def _further(architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    return {key if "." in key and not key.startswith(("rope", "attention")) else f"{architecture}.{key}": value
            for key, value in dotted.items()}  # fmt: skip


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a GGUF file of a tiny Llama."""
    write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def leftovers(cache: Path) -> list[str]:
    """Return the folders of conversions that did not end."""
    return [p.name for p in (cache / "models").glob(".*partial*")] if cache.exists() else []
