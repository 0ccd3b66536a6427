"""Evaluations of a model with a packed cache.

Each file in `tasks/` is one task. `harness` runs tasks with several recipes on the same samples.
"""
