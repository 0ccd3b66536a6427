"""The same packed bytes inside serving engines, which page, schedule and share them.

`slots` and `pages` know of no engine: what a token's slot is made of, and how a pool of pages is written and read. Each
engine has a module of its own: `vllm` is a plug-in of vLLM, `lmcache` a serializer of LMCache.
"""
