"""Evaluations, plots and benchmarks of tersekv. They need the dependencies of the extra `lab`."""
