"""Benchmarks run by `tersekv bench`."""
