"""Cases of the benchmark that are small enough for tests: one attention of each kind, odd and not square."""

from relpos2d import Grid
from relpos2d.tools.cases import Case

SMALL = {"num_heads": 2, "head_dim": 8}
WINDOWS = Case("small-windows", "windows", Grid(3, 5), batch=2, num_windows=(2, 3), **SMALL)
SHIFTED = Case("small-shifted", "windows", Grid(3, 5), batch=2, num_windows=(2, 3), is_shifted=True, **SMALL)
SEQUENCE = Case("small-sequence", "sequence", Grid(11), batch=2, **SMALL)
CAUSAL = Case("small-causal", "sequence", Grid(11), is_causal=True, **SMALL)
IMAGE = Case("small-image", "image grid", Grid(3, 5), **SMALL)
PREFIX = Case("small-prefix", "image grid", Grid(3, 5, num_prefix_tokens=2), **SMALL)
DECODE = Case("small-decode", "decode", Grid(1, origin=10), Grid(11), **SMALL)
CASES = [WINDOWS, SHIFTED, SEQUENCE, CAUSAL, IMAGE, PREFIX, DECODE]
