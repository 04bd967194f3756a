"""Resizing lattices and reading between their places, against torch, timm and one value at a time."""

import pytest
import torch

from relpos2d.interpolation import corners, read, resize, resize_matrices, resize_matrix
from tests.oracles import gradients, multilinear
from tests.tolerances import assert_close


@pytest.mark.parametrize("method", ["bicubic", "antialias"])
@pytest.mark.parametrize(("old", "new"), [((5, 7), (9, 4)), ((3, 8), (3, 5)), ((14, 2), (5, 9))])
def test_torch_interpolate(method: str, old: tuple[int, int], new: tuple[int, int]) -> None:
    values = torch.randn(*old, 3)
    expected = torch.nn.functional.interpolate(
        values.permute(2, 0, 1)[None], new, mode="bicubic", antialias=method == "antialias"
    )[0].permute(1, 2, 0)
    assert_close(resize(values, resize_matrices(old, new, method)), expected)


@pytest.mark.parametrize("method", ["timm", "bicubic", "antialias"])
@pytest.mark.parametrize(("old", "new"), [(13, 23), (23, 13), (7, 9), (3, 5), (5, 3), (1, 5), (5, 1), (1, 1), (13, 13)])
def test_rows_add_up_to_one_and_mirror(method: str, old: int, new: int) -> None:
    matrix = resize_matrix(old, new, method)
    assert matrix.shape == (new, old)
    assert matrix.dtype == torch.float32
    assert_close(matrix.sum(1), torch.ones(new))
    assert_close(matrix, matrix.flip(0, 1), torch.float32)
    if old == new and method != "timm":
        assert_close(matrix, torch.eye(old))


def test_timm_keeps_the_middle_and_the_ends() -> None:
    matrix = resize_matrix(5, 9, "timm")
    assert_close(matrix[4], torch.eye(5)[2])
    assert_close(matrix[0], torch.eye(5)[0], torch.float16)


def test_matrices_are_plain_whatever_the_mode_they_are_made_in() -> None:
    for method in ("timm", "bicubic"):
        with torch.device("meta"), torch.inference_mode():
            matrix = resize_matrix(5, 9, method)
        assert not matrix.is_inference()
        assert not matrix.requires_grad
        assert torch.equal(matrix, resize_matrix(5, 9, method))


def test_matrices_ignore_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert resize_matrix(5, 9, "bicubic").dtype == torch.float32
        assert resize_matrix(5, 9, "timm").dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    values, matrices = torch.randn(5, 7, 2, dtype=dtype), resize_matrices((5, 7), (9, 11), "timm")
    with torch.autocast("cpu", torch.bfloat16):
        resized = resize(values, matrices)
    assert resized.dtype == torch.float32
    assert torch.equal(resized, resize(values, matrices))
    assert resize(values.to("meta"), matrices).shape == (9, 11, 2)


def test_resize_goes_axis_by_axis_and_carries_gradients() -> None:
    values = torch.randn(3, 4, 5, 2, dtype=torch.float64, requires_grad=True)
    matrices = [torch.randn(new, old, dtype=torch.float64) for old, new in ((3, 2), (4, 6), (5, 3))]
    out = resize(values, matrices)
    expected = torch.einsum("abcx,ia,jb,kc->ijkx", values, *matrices)
    assert_close(out, expected)
    assert_close(gradients(out, [values])[0], gradients(expected, [values])[0])


def test_resize_works_in_float32_at_least() -> None:
    matrices = [torch.eye(3)]
    assert resize(torch.ones(3, 1, dtype=torch.bfloat16), matrices).dtype == torch.float32
    assert resize(torch.ones(3, 1, dtype=torch.float64), matrices).dtype == torch.float64


@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 3, 4)])
def test_read_is_multilinear_and_clamped(sizes: tuple[int, ...]) -> None:
    values = torch.randn(*sizes, 2, dtype=torch.float64, requires_grad=True)
    places = torch.rand(11, len(sizes), dtype=torch.float64) * 7 - 1.5
    places[0], places[1] = 0, torch.tensor([size - 1.0 for size in sizes])
    out = read(values, places)
    expected = []
    for place in places.tolist():
        inside = tuple(min(max(p, 0.0), size - 1.0) for p, size in zip(place, sizes, strict=True))
        expected.append(multilinear(lambda index: values[index], inside))
    assert_close(out, torch.stack(expected))
    assert_close(gradients(out, [values])[0], gradients(torch.stack(expected), [values])[0])


def test_read_keeps_the_shape_of_places() -> None:
    assert read(torch.randn(3, 4, 7), torch.zeros(2, 5, 6, 2)).shape == (2, 5, 6, 7)
    assert read(torch.randn(3, 4, 7, dtype=torch.bfloat16), torch.zeros(2)).dtype == torch.float32


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_corners_surround_the_place_and_weigh_one(num_axes: int) -> None:
    places = torch.randn(9, num_axes, dtype=torch.float64) * 3
    found = list(corners(places))
    assert len(found) == 2**num_axes
    assert_close(sum(weight for _, weight in found), torch.ones(9, dtype=torch.float64))
    assert_close(sum(weight[:, None] * whole for whole, weight in found), places)
    for whole, weight in found:
        assert torch.equal(whole, whole.round())
        assert (whole - places).abs().max() <= 1
        assert weight.min() >= 0
    whole_places = torch.tensor([[2.0] * num_axes], dtype=torch.float64)
    first, weight = next(iter(corners(whole_places)))
    assert (torch.equal(first, whole_places), weight.item()) == (True, 1.0)
