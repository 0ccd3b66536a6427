"""Hugging Face transformers: the cache, the attention that reads packed bytes, and models. Only this folder imports it."""
