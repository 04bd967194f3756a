"""Where tokens stand: on a lattice wherever offsets are those of a lattice, else at coordinates counted from the real ones."""

import pytest
import torch

from relpos2d import Encoding, Grid, Points
from relpos2d.models.places import padding_side, place
from tests.refusals import refuses

NONE = Encoding(1, 2, Grid(4))
LEFT = torch.tensor([[False, False, True, True], [True, True, True, True]])
RIGHT = LEFT.flip(1)
COUNTED = [[0, 0, 0, 1], [0, 1, 2, 3]]


class KnowsQuery(Encoding):
    knows_query = True  # type: ignore[assignment]


class KnowsLength(Encoding):
    knows_length = True  # type: ignore[assignment]


def coords(points: object) -> list[list[float]]:
    assert isinstance(points, Points)
    return points.coords()[..., 0].tolist()


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("mask", [None, torch.ones(2, 4, dtype=torch.bool)])
def test_without_padding_all_stand_on_a_lattice_behind_the_past(past: int, mask: torch.Tensor | None) -> None:
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (past, 0), value=True)
    places = place("test", NONE, 4, mask, past=past)
    assert places.tokens == places.queries == Grid(4, origin=past)
    assert places.keys == Grid(past + 4)
    assert places.mask is None


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_on_the_right_is_hidden_by_a_mask_or_by_causality(is_causal: bool) -> None:
    places = place("test", KnowsQuery(1, 2, Grid(4)), 4, RIGHT, is_causal=is_causal)
    assert places.tokens == places.queries == places.keys == Grid(4)
    if is_causal:
        assert places.mask is None
    else:
        assert places.mask.tolist() == RIGHT[:, None, None].tolist()


def test_padding_on_the_left_moves_only_who_knows_the_place() -> None:
    places = place("test", NONE, 4, LEFT, is_causal=True)
    assert places.queries == places.keys == Grid(4)
    assert places.mask.tolist() == LEFT[:, None, None].tolist()
    assert coords(places.tokens) == COUNTED
    for cls in (KnowsQuery, KnowsLength):
        places = place("test", cls(1, 2, Grid(4)), 4, LEFT, is_causal=True)
        assert coords(places.tokens) == coords(places.queries) == coords(places.keys) == COUNTED
        assert places.keys.valid.tolist() == LEFT.tolist()
        assert places.mask is None


def test_who_knows_the_length_knows_it_without_padding() -> None:
    places = place("test", KnowsLength(1, 2, Grid(4)), 4, RIGHT, is_causal=True)
    assert coords(places.keys) == [[0, 1, 0, 0], [0, 1, 2, 3]]


def test_new_tokens_behind_padded_ones_are_counted_on() -> None:
    mask = torch.nn.functional.pad(LEFT, (0, 2), value=True)
    places = place("test", KnowsQuery(1, 2, Grid(4)), 2, mask, past=4)
    assert coords(places.tokens) == coords(places.queries) == [[2, 3], [4, 5]]
    assert coords(places.keys) == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_each_document_of_a_row_is_counted_anew() -> None:
    segments = torch.tensor([[7, 7, 7, 2, 2, 9], [4, 1, 1, 1, 0, 0]])
    mask = torch.tensor([[True] * 6, [False, True, True, True, True, False]])
    places = place("test", NONE, 6, mask, segments=segments)
    assert coords(places.queries) == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 0]]
    assert places.queries.segments is segments
    # the row that is padded on both ends has its last document cut by padding, not torn
    assert places.queries.valid.tolist() == mask.tolist()


def test_token_types_go_to_the_points() -> None:
    types = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    places = place("test", NONE, 4, LEFT, token_types=types)
    assert places.queries.token_types is types
    assert coords(places.queries) == COUNTED


def test_sides_of_padding() -> None:
    both = torch.tensor([[False, True, True, False]])
    assert padding_side("test", torch.ones(2, 3, dtype=torch.bool)) == "none"
    assert padding_side("test", RIGHT) == "right"
    assert padding_side("test", LEFT) == "left"
    assert padding_side("test", torch.cat((LEFT, RIGHT))) == "left"
    assert padding_side("test", both) == "left"


def test_refuses_rows_that_are_no_text() -> None:
    with refuses("test: row 1 of mask has no real token; an empty text"):
        padding_side("test", torch.tensor([[True, True], [False, False]]))
    with refuses("test: row 2 of mask has padding between real tokens"):
        padding_side("test", torch.tensor([[True, True, True], [True, True, False], [True, False, True]]))
    with refuses("test: row 1 of segments has a document in several pieces"):
        place("test", NONE, 3, segments=torch.tensor([[0, 0, 1], [0, 1, 0]]))
