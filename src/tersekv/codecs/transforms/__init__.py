"""How a vector is made easier to code: `sketch` (Johnson-Lindenstrauss matrices), `rotation`, `polar` coordinates."""
