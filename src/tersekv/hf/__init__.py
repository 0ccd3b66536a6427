"""Integration with Hugging Face transformers: the compressed cache, and attention over packed bytes."""
