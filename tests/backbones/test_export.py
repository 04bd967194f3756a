"""torch.compile, torch.export and ONNX of swapped models."""

import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor

from relpos2d import Grid
from tests.backbones.builders import images, swapped
from tests.oracles import gradients
from tests.tolerances import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

#: two stages are enough to see all that a compiler sees
STAGES: dict[str, Any] = {"depths": (2, 1), "num_heads": (3, 6)}


def block_and_input(family: str, index: int, encoding: Any) -> tuple[Any, Tensor]:
    if family == "vit":
        model = swapped(family, encoding, img_size=(48, 80), dtype=torch.float64)
        return model.blocks[index], torch.randn(2, 16, 48, dtype=torch.float64)
    model = swapped(family, encoding, img_size=(40, 72), dtype=torch.float64, **STAGES)
    block = model.layers[0].blocks[index]
    assert any(block.shift_size) == (index == 1)
    return block, torch.randn(2, 10, 18, 24, dtype=torch.float64)


@pytest.mark.parametrize(
    ("family", "index", "encoding"),
    [
        ("vit", 0, ["cpb", "rope_mixed"]),
        ("swin", 1, "table"),
        ("swinv2", 1, ["alibi", "rope_axial"]),
        *[pytest.param(*block, "table", marks=pytest.mark.long) for block in (("vit", 0), ("swin", 0), ("swinv2", 1))],
    ],
    ids=str,
)
def test_a_block_compiles_into_one_graph(family: str, index: int, encoding: Any) -> None:
    block, x = block_and_input(family, index, encoding)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert_close(compiled(x), block(x))


def test_gradients_of_a_compiled_block() -> None:
    block, x = block_and_input("swin", 1, "table")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    parameters = list(block.parameters())
    for mine, theirs in zip(gradients(compiled(x), parameters), gradients(block(x), parameters), strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("family", "encoding"),
    [pytest.param(*case, marks=pytest.mark.long) for case in (("vit", "table"), ("swin", "rope_mixed"))],
)
def test_c8_compiled_at_two_sizes(family: str, encoding: str) -> None:
    stages: dict[str, Any] = {"depth": 1} if family == "vit" else STAGES
    model = swapped(family, encoding, img_size=(64, 64), dynamic_img_size=True, **stages)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for size in ((64, 64), (96, 64), (64, 64)):
            assert_close(compiled(images(*size)), model(images(*size)))


#: the last grid, 6x7, fits into one window
FOUR_STAGES: dict[str, Any] = {"window_size": 7, "depths": (1, 1, 1, 1), "num_heads": (3, 6, 6, 12)}
TWO_STAGES: dict[str, Any] = {"window_size": 7, **STAGES}
EXPORTED: list[Any] = [
    pytest.param("vit", ["table", "rope_mixed"], (64, 96), {"depth": 1}, marks=pytest.mark.long),
    pytest.param("deit3", ["cpb", "sincos"], (64, 96), {"depth": 1}, marks=pytest.mark.long),
    pytest.param("swin", "table", (192, 224), FOUR_STAGES, marks=pytest.mark.long),
    ("swin", "table", (48, 56), {**TWO_STAGES, "depths": (1, 1)}),
    pytest.param("swinv2", "cpb", (48, 56), {**TWO_STAGES, "depths": (1, 1)}, marks=pytest.mark.long),
]


def exported(model: Any, size: tuple[int, int]) -> Any:
    batch = torch.export.Dim("batch", min=2, max=64)
    return torch.export.export(model, (images(*size),), dynamic_shapes=({0: batch},), strict=False)


@pytest.mark.parametrize(("family", "encoding", "size", "options"), EXPORTED, ids=str)
def test_c9_export_with_a_dynamic_batch(
    family: str, encoding: Any, size: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    model = swapped(family, encoding, img_size=size, **options)
    with torch.no_grad():
        # weights of a usual size, so that 1e-4 means something
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "encoding" not in name:
                parameter.mul_(0.5)
        if "window_size" in options:
            assert model.layers[-1].blocks[0].window_size == (6, 7)
        program = exported(model, size)
        for batch in (2, 5):
            assert_close(program.module()(images(*size, batch=batch)), model(images(*size, batch=batch)))

        path = tmp_path / "model.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own
            torch.onnx.export(program, (), str(path), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for batch in (2, 3):
            image = images(*size, batch=batch)
            (out,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
            assert (torch.from_numpy(out) - model(image)).abs().max() < 1e-4


def test_export_of_a_model_that_hides_padding() -> None:
    model = swapped("swin", "table", img_size=(60, 92), mask_padding=True, **STAGES)
    with torch.no_grad():
        program = exported(model, (60, 92))
        assert_close(program.module()(images(60, 92, batch=3)), model(images(60, 92, batch=3)))


def test_export_of_a_fading_embedding_with_a_dynamic_batch() -> None:
    model = swapped("vit", "rope_axial", img_size=(48, 80), absolute="fade", depth=1)
    model.absolute_strength.fill_(0.25)
    with torch.no_grad():
        program = exported(model, (48, 80))
        assert_close(program.module()(images(48, 80, batch=5)), model(images(48, 80, batch=5)))


def test_export_changes_nothing_in_the_model() -> None:
    model = swapped("vit", "table", img_size=(64, 96), depth=1)
    before: dict[str, Tensor] = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        expected = model(images(64, 96))
        exported(model, (64, 96))
        assert model.blocks[0].positions == Grid(4, 6, num_prefix_tokens=1)
        assert torch.equal(model(images(64, 96)), expected)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
