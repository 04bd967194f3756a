"""The reference trainer of relpos2d: `python -m train <config> [key=value ...]`."""
