"""A transformers model: its configuration, RoPE, names and weights."""
