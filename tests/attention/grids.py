"""Queries and keys of every kind that lies on a lattice: what flex and lowrank must both do."""

from relpos2d import Grid

GRIDS = {
    "one axis": (Grid(5), Grid(5)),
    "two axes": (Grid(3, 4), Grid(3, 4)),
    "three axes": (Grid(2, 3, 2), Grid(2, 3, 2)),
    "prefix": (Grid(3, 4, num_prefix_tokens=2), Grid(3, 4, num_prefix_tokens=2)),
    "prefix on one side": (Grid(4, num_prefix_tokens=1), Grid(3)),
    "pooled keys": (Grid(4, 3, num_prefix_tokens=1), Grid(4, 3, num_prefix_tokens=1).pool(2)),
    "no common step": (Grid(6, step=1.5), Grid(7, step=2, origin=-1)),
    "one query": (Grid(1, origin=6), Grid(7)),
}
