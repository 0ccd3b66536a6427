"""Transforms applied before coding: RoPE removal, rotations, sketches, polar coordinates, KLT."""
