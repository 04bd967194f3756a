"""Small inputs on which public software of this kind has failed, at the level of models."""

import pytest
import timm
import torch
from timm.layers import resize_rel_pos_bias_table
from timm.models._manipulate import reinit_non_persistent_buffers

from relpos2d import Grid, swap
from tests.backbones.builders import NATIVE, SMALL, WINDOWED, build, draw, images, swapped, timm_warnings
from tests.backbones.window_oracle import window_attention
from tests.tolerances import assert_close


@pytest.mark.parametrize(("window", "size"), [((7, 9), (224, 288)), ((3, 5), (96, 160)), ((9, 7), (288, 224))])
@pytest.mark.parametrize("family", WINDOWED)
def test_a6_rectangular_windows_in_models(family: str, window: tuple[int, int], size: tuple[int, int]) -> None:
    name, sizes = SMALL[family]
    model = timm.create_model("relpos2d_" + name, encoding="table", img_size=size, window_size=window, **sizes)
    draw(model.double().eval(), 1)
    for stage in model.layers:
        for block in stage.blocks:
            table = block.attn.encoding.relative_position_bias_table
            height, width = block.window_size
            assert (height, width) == window
            assert table.shape[0] == (2 * height - 1) * (2 * width - 1)
    last = model.layers[3].blocks[0]
    assert last.input_resolution == window
    for block in (last, model.layers[2].blocks[0]):
        channels = block.norm1.weight.shape[0]
        x = torch.randn(*block.input_resolution, channels, dtype=torch.float64) * 0.3
        if block.input_resolution == window:
            assert_close(block._attn(x[None])[0], window_attention(block, x))
    assert model(images(*size, batch=1, dtype=torch.float64)).isfinite().all()


def test_a6_a_table_of_seven_by_nine_has_221_rows() -> None:
    model = swapped("swin", "table", img_size=(224, 288), window_size=(7, 9))
    rows = {block.attn.encoding.relative_position_bias_table.shape[0] for s in model.layers for block in s.blocks}
    assert rows == {221}


def test_b1_window_of_seven_into_twelve_by_state_dict() -> None:
    small = build("swin", img_size=224, window_size=7)
    model = swap(build("swin", img_size=384, window_size=12), "table")
    weights = small.state_dict()
    assert weights["layers.0.blocks.0.attn.relative_position_bias_table"].shape[0] == 169
    model.load_state_dict(weights, strict=True)
    encoding = model.layers[0].blocks[0].attn.encoding
    assert encoding.relative_position_bias_table.shape[0] == 529
    old = weights["layers.0.blocks.0.attn.relative_position_bias_table"].T.reshape(1, 3, 13, 13)
    new = encoding.relative_position_bias_table.detach().T.reshape(3, 23, 23)
    with timm_warnings():
        expected = resize_rel_pos_bias_table(old.reshape(3, 169).T, new_window_size=(12, 12), new_bias_shape=(529, 3))
    assert_close(encoding.relative_position_bias_table.detach(), expected)
    # the middle, offset (0, 0), stays the middle, and the same size is an exact copy
    assert_close(new[:, 11, 11], old[0, :, 6, 6], torch.float16)
    same = swap(build("swin", img_size=224, seed=2), "table")
    same.load_state_dict(weights, strict=True)
    for name, value in weights.items():
        if "table" in name:
            path = name.replace("relative_position", "encoding.relative_position")
            assert torch.equal(same.state_dict()[path], value)


@pytest.mark.parametrize("family", WINDOWED)
def test_b3_masks_are_not_in_the_weights(family: str) -> None:
    model = swapped(family, NATIVE[family], img_size=(64, 96))
    assert not any("mask" in key or "index" in key or "coords" in key for key in model.state_dict())
    larger = swapped(family, NATIVE[family], img_size=(128, 192), window_size=7)
    weights = {**model.state_dict()}
    # other people's weights hold them
    for key in list(weights):
        if key.endswith("norm1.weight"):
            weights[key.replace("norm1.weight", "attn_mask")] = torch.zeros(4, 49, 49)
            weights[key.replace("norm1.weight", "attn.relative_position_index")] = torch.zeros(49, 49).long()
    model.load_state_dict(weights, strict=True)
    assert larger(images(128, 192)).isfinite().all()
    model.set_input_size((128, 192))
    assert model(images(128, 192)).isfinite().all()


@pytest.mark.parametrize("encoding", ["none", "learned", "table"])
def test_b5_a_model_set_to_a_rectangle_takes_any_image(encoding: str) -> None:
    """800x1008 of patches of 16, on a smaller scale: 80x112 of patches of 16."""
    model = swapped("vit", encoding, img_size=(80, 112), dynamic_img_size=True)
    first = model(images(80, 112))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for size in ((64, 64), (112, 80), (48, 144)):
        assert model(images(*size)).isfinite().all()
    assert torch.equal(model(images(80, 112)), first)
    model.set_input_size((112, 80))
    model(images(112, 80))
    model.set_input_size((80, 112))
    if encoding != "none" and encoding != "table":
        assert torch.equal(model(images(80, 112)), first)
        assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


def test_b6_every_multiple_of_the_patch() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=48, num_heads=3)
    swap(model, ["learned", "table"])
    with timm_warnings():
        for side in (*range(1, 40), 61, 115, 122):
            model.set_input_size((16 * side, 16 * (side // 2 + 1)))
            grid = (side, side // 2 + 1)
            assert model.blocks[0].positions.shape == grid
            assert model.encoding.window_size == grid
            matrices = model.encoding.resize_matrices
            sizes = (14, 14) if matrices is None else tuple(len(matrix) for matrix in matrices)
            assert sizes == grid
            table = model.blocks[0].attn.encoding
            assert table.window_size == grid
            rows = table.resize_matrices
            assert tuple(map(len, rows)) == tuple(2 * n - 1 for n in grid) if rows is not None else grid == (14, 14)


@pytest.mark.parametrize("family", WINDOWED)
def test_b10_sizes_that_do_not_fit_say_so_or_are_padded(family: str) -> None:
    model = swapped(family, NATIVE[family], img_size=(64, 96))
    with pytest.raises(AssertionError, match=r"Input height \(80\) doesn't match model \(64\)"):
        model(images(80, 96))
    anything = swapped(family, NATIVE[family], img_size=(64, 96), dynamic_img_size=True)
    for size in ((80, 96), (36, 100), (28, 28)):
        features = anything.forward_features(images(*size))
        assert features.shape[1:3] == (-(-size[0] // 32), -(-size[1] // 32))
    first = model(images(64, 96))
    with timm_warnings():
        model.set_input_size((128, 224))
        assert model(images(128, 224)).isfinite().all()
        model.set_input_size((64, 96))
    assert torch.equal(model(images(64, 96)), first)


@pytest.mark.parametrize("encoding", ["table", "rope_axial", "rope_mixed", "cpb", "alibi", "sincos", "learned"])
@pytest.mark.parametrize("family", ["vit", *WINDOWED])
@pytest.mark.usefixtures("nan_memory")
def test_c1_c2_nothing_is_garbage_after_the_meta_device(family: str, encoding: str) -> None:
    real = swapped(family, encoding, img_size=(64, 96))
    name, sizes = SMALL[family]
    with torch.device("meta"):
        model = timm.create_model(name, img_size=(64, 96), num_classes=5, **sizes)
        swap(model, encoding)
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(real.state_dict())
    reinit_non_persistent_buffers(model)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), real.buffers(), strict=True))
    if encoding == "rope_axial":
        attention = model.blocks[0].attn if family == "vit" else model.layers[0].blocks[0].attn
        pairs = attention.encoding.head_dim // 4
        expected = torch.tensor([1 / 100 ** (j / pairs) for j in range(pairs)])
        assert_close(attention.encoding.inv_freq, expected)
    assert torch.equal(model(images(64, 96)), real(images(64, 96)))


@pytest.mark.parametrize("encoding", ["table", "cpb", "rope_axial", "rope_mixed", "sincos", "learned"])
@pytest.mark.parametrize("family", ["vit", "swin", "swinv2"])
def test_c5_training_after_inference_mode(family: str, encoding: str) -> None:
    model = swapped(family, encoding, img_size=(64, 96))
    with torch.inference_mode():
        expected = model(images(64, 96))
    out = model.train()(images(64, 96))
    assert_close(out.detach(), expected)
    out.sum().backward()
    with torch.inference_mode():
        model.set_input_size((96, 64))
        model(images(96, 64))
    model.zero_grad()
    model(images(96, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_e7_the_first_patch_is_turned_by_its_own_place() -> None:
    """With registers in front, patch (0, 0) is token 5, and the second patch of the second row stands at (1, 1)."""
    model = swapped("vit", "rope_axial", img_size=(48, 80), reg_tokens=4, dtype=torch.float64)
    encoding, grid = model.blocks[0].attn.encoding, Grid(3, 5, num_prefix_tokens=5)
    x = torch.randn(1, 3, grid.num_tokens, 16, dtype=torch.float64)
    turned = encoding.rotate(x, grid)
    assert turned.shape == x.shape
    assert torch.equal(turned[:, :, :5], x[:, :, :5])
    assert torch.equal(turned[:, :, 5], x[:, :, 5]), "the place of the first patch is 0"
    for token in range(6, grid.num_tokens):
        assert not torch.allclose(turned[:, :, token], x[:, :, token])
    moved = encoding.rotate(x, Grid(3, 5, num_prefix_tokens=5, origin=1))
    assert not torch.allclose(moved[:, :, 5], x[:, :, 5])
    assert torch.equal(moved[:, :, :5], x[:, :, :5])
    one = encoding.rotate(x[:, :, 11:12], Grid(1, 1, origin=1))
    assert_close(turned[:, :, 11:12], one)
