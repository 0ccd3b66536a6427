"""Integration with Hugging Face transformers: the compressed cache, attention over packed bytes,
and models.

Only this folder imports transformers.
"""
