"""How a vector is made easier to code, linearly: `sketch` (Johnson-Lindenstrauss matrices)."""
