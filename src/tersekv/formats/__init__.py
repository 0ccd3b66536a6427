"""How codes lie in memory: `grid` (codes × table × scale/offset), `signs` (1-bit sketches), `exact` (floats)."""
