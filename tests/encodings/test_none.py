"""No position: attention over a set."""

import pytest
import torch

from relpos2d import Grid, attend, create_encoding
from tests.oracles import pair_attention
from tests.tolerances import assert_close


def test_is_plain_attention() -> None:
    grid = Grid(2, 3, num_prefix_tokens=1)
    encoding = create_encoding("none", 2, 3, grid)
    q, k, v = torch.randn(3, 2, 2, 7, 3, dtype=torch.float64)
    assert_close(attend(q, k, v, encoding, grid), pair_attention(q, k, v, 3**-0.5))


def test_does_not_see_an_order() -> None:
    grid = Grid(2, 3)
    encoding = create_encoding("none", 2, 3, grid)
    q, k, v = torch.randn(3, 1, 2, 6, 3, dtype=torch.float64)
    order = torch.randperm(6)
    out = attend(q, k, v, encoding, grid)
    assert_close(attend(q[:, :, order], k[:, :, order], v[:, :, order], encoding, grid), out[:, :, order])


def test_hooks_do_nothing() -> None:
    grid = Grid(2, 3)
    encoding = create_encoding("none", 2, 3, grid)
    x = torch.randn(1, 2, 6, 3)
    assert encoding.rotate(x, grid) is x
    assert encoding.embed(x[0], grid) is x[0] or torch.equal(encoding.embed(x[0], grid), x[0])
    assert encoding.bias(grid, grid) is None
    assert encoding.score(x, x, grid, grid, 1.0) is None
    assert encoding.value(torch.ones(1, 2, 6, 6), grid, grid) is None
    assert encoding.content(x, x) is None
    assert encoding.terms() == []
    assert list(encoding.parameters()) == []
    with pytest.raises(NotImplementedError, match="NoEncoding: an encoding of the family 'none' has no numbers"):
        encoding.at(torch.zeros(2))
