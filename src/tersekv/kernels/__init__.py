"""Hot loops of the data path: one file per op, contract and torch reference; backends in `cpu/`."""
