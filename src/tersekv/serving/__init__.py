"""Packed caches inside serving engines, which do their own paging, scheduling and prefix sharing.

`slots`, `pages` and `steps` are independent of any engine. They define the bytes of a token's slot,
and how pools of pages are written and read. `vllm` is a plug-in for vLLM, `lmcache` a serializer
for LMCache.
"""
