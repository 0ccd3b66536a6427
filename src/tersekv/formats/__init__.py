"""How codes lie in memory: `grid` (codes × table × scale/offset), `signs` (1-bit sketches), `polar` (angles), `exact`."""
