"""Codebooks: fixed, Lloyd-Max (for a density), k-means (for samples), and of trellis codes."""
