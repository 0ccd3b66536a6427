"""How codes lie in memory: `grid` (codes × table × scale), `signs` (1-bit sketches), `polar` (angles), `exact`."""
