"""Hugging Face transformers: cache, attention that reads packed bytes, models. Only this folder imports it."""
