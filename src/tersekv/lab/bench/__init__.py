"""Benchmarks that the program runs: `tersekv bench`."""
