"""Answers on one machine, one at a time: `tersekv chat`, and an OpenAI-compatible server for a laptop.

`answers` generates with a packed cache and can be stopped between two layers. `prompt_caches` keeps
caches of earlier prompts. `requests` reads what clients send, `app` is the server. To serve many at
once there is the plug-in for vLLM.
"""
