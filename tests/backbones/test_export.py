"""torch.compile, torch.export and ONNX of swapped models."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos2d import Grid
from tests.backbones.builders import images, swapped
from tests.oracles import gradients
from tests.tolerances import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

EAGER_GRAPH = {"backend": "aot_eager", "fullgraph": True}


@pytest.mark.parametrize("encoding", ["table", "cpb", "rope_mixed", ["alibi", "rope_axial"]], ids=str)
@pytest.mark.parametrize(
    ("family", "block", "shape"),
    [
        ("vit", 0, (2, 16, 48)),
        ("swin", 0, (2, 10, 18, 24)),
        ("swin", 1, (2, 10, 18, 24)),
        ("swinv2", 1, (2, 10, 18, 24)),
    ],
)
def test_a_block_compiles_into_one_graph(encoding: Any, family: str, block: int, shape: tuple[int, ...]) -> None:
    size = (48, 80) if family == "vit" else (40, 72)
    model = swapped(family, encoding, img_size=size, dtype=torch.float64)
    module = model.blocks[block] if family == "vit" else model.layers[0].blocks[block]
    assert family == "vit" or any(module.shift_size) == (block == 1)
    x = torch.randn(*shape, dtype=torch.float64)
    compiled = torch.compile(module, **EAGER_GRAPH)
    assert_close(compiled(x), module(x))
    parameters = list(module.parameters())
    for mine, theirs in zip(gradients(compiled(x), parameters), gradients(module(x), parameters), strict=True):
        assert_close(mine, theirs)


def test_a_block_compiles_with_inductor() -> None:
    model = swapped("swin", ["table", "rope_mixed"], img_size=(40, 72))
    block = model.layers[0].blocks[1]
    x = torch.randn(1, 10, 18, 24)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        assert_close(torch.compile(block, fullgraph=True)(x), block(x))


@pytest.mark.parametrize("family", ["vit", "swin", "swinv2"])
@pytest.mark.parametrize("encoding", ["table", "rope_mixed"])
def test_c8_compiled_at_two_sizes(family: str, encoding: str) -> None:
    model = swapped(family, encoding, img_size=(64, 64), dynamic_img_size=True)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for size in ((64, 64), (96, 64), (64, 160), (64, 64)):
            assert_close(compiled(images(*size)), model(images(*size)))


EXPORTED: list[tuple[str, Any, tuple[int, int]]] = [
    ("vit", "table", (64, 96)),
    ("vit", "cpb", (64, 96)),
    ("vit", "rope_mixed", (64, 96)),
    ("distilled", ["rope_axial", "sincos"], (64, 96)),
    ("swin", "table", (192, 224)),
    ("swin", "rope_mixed", (192, 224)),
    ("swinv2", "cpb", (192, 224)),
    ("swinv2", "rope_axial", (192, 224)),
]


def exported(model: Any, size: tuple[int, int]) -> Any:
    batch = torch.export.Dim("batch", min=2, max=64)
    return torch.export.export(model, (images(*size),), dynamic_shapes=({0: batch},), strict=False)


@pytest.mark.parametrize(("family", "encoding", "size"), EXPORTED, ids=str)
def test_c9_export_with_a_dynamic_batch(family: str, encoding: Any, size: tuple[int, int], tmp_path: Path) -> None:
    import onnxruntime

    window = {"window_size": 7} if family in ("swin", "swinv2") else {}
    model = swapped(family, encoding, img_size=size, **window)
    with torch.no_grad():
        # weights of a usual size, so that 1e-4 means something
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "encoding" not in name:
                parameter.mul_(0.5)
        if family == "swin":
            assert model.layers[3].blocks[0].window_size == (6, 7)
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
    model = swapped("swin", "table", img_size=(60, 92), mask_padding=True)
    with torch.no_grad():
        program = exported(model, (60, 92))
        assert_close(program.module()(images(60, 92, batch=3)), model(images(60, 92, batch=3)))


def test_export_changes_nothing_in_the_model() -> None:
    model = swapped("vit", "table", img_size=(64, 96))
    before: dict[str, Tensor] = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        expected = model(images(64, 96))
        exported(model, (64, 96))
        assert model.blocks[0].positions == Grid(4, 6, num_prefix_tokens=1)
        assert torch.equal(model(images(64, 96)), expected)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
