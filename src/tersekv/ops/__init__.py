"""Hot loops of the data path: one file per op with its contract and torch reference; backends in `cpu/` and `triton/`."""
