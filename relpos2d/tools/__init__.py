"""Tools around encodings: `check` (is it really relative?) and `plot` (what it makes of each offset)."""
