"""Codebooks: fixed, optimal for a density (Lloyd-Max), fitted to samples (k-means), and of trellis
codes.
"""
