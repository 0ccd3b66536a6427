"""Packed layouts, each with the view that attention reads.

- `grid`: codes, codebook and scales
- `trellis`: trellis codes and gains
- `polar`: angles and radii
- `signs`: 1-bit sketches
- `sparse`: outliers
- `exact`: floats
"""
