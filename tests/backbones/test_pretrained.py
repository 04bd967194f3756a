"""Weights of timm and our own go through timm's own loading, from local files and folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from relpos2d import swap
from tests.backbones.builders import ENCODINGS, NATIVE, SMALL, build, draw, images, timm_warnings
from tests.tolerances import assert_close

#: registered model and the family of the small model it comes from
REGISTERED = {family: "relpos2d_" + SMALL[family][0] for family in ("vit", "deit3", "swin", "swinv2")}
IMAGE = (64, 96)


def create(family: str, **kwargs: Any) -> Any:
    return timm.create_model(REGISTERED[family], **{"img_size": IMAGE, **SMALL[family][1], **kwargs}).eval()


def save(model: nn.Module, path: Path) -> str:
    """As torch.save or safetensors, by the name of the file."""
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return str(path)


def source(family: str, num_classes: int = 1000, **kwargs: Any) -> Any:
    """timm's own small model with its usual number of classes."""
    name, sizes = SMALL[family]
    model = timm.create_model(name, num_classes=num_classes, **{"img_size": IMAGE, **sizes, **kwargs})
    draw(model, 3)
    return model.eval()


@pytest.mark.parametrize("family", REGISTERED)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_timm(family: str, suffix: str, tmp_path: Path) -> None:
    timm_model = source(family)
    overlay = {"file": save(timm_model, tmp_path / f"weights{suffix}")}
    model = create(family, pretrained=True, pretrained_cfg_overlay=overlay)
    assert_close(model(images(*IMAGE)), timm_model(images(*IMAGE)))
    with_encoding = create(family, pretrained=True, pretrained_cfg_overlay=overlay, encoding="rope_axial")
    own = dict(with_encoding.named_parameters())
    for name, parameter in timm_model.named_parameters():
        if "relative_position_bias_table" not in name and "cpb_mlp" not in name:
            assert torch.equal(own[name], parameter), name


@pytest.mark.parametrize("family", REGISTERED)
def test_another_number_of_classes_and_channels(family: str, tmp_path: Path) -> None:
    timm_model = source(family)
    overlay = {"file": save(timm_model, tmp_path / "weights.pth")}
    for encoding in (NATIVE.get(family, "none"), "rope_mixed"):
        model = create(
            family, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, in_chans=1, encoding=encoding
        )
        assert model(images(*IMAGE)[:, :1]).shape == (2, 3)
        block = "blocks.0" if family in ("vit", "deit3") else "layers.0.blocks.0"
        assert torch.equal(
            model.get_parameter(f"{block}.attn.qkv.weight"), timm_model.get_parameter(f"{block}.attn.qkv.weight")
        )
        assert model.patch_embed.proj.weight.shape[1] == 1


@pytest.mark.parametrize("family", REGISTERED)
def test_another_image_size(family: str, tmp_path: Path) -> None:
    """timm fits its own weights to the size before the swap, and tables stay learned for that size."""
    overlay = {"file": save(source(family, img_size=64), tmp_path / "weights.pth")}
    name, sizes = SMALL[family]
    options = {**sizes, "img_size": (96, 160), "pretrained": True, "pretrained_cfg_overlay": overlay}
    with timm_warnings():
        timm_model = timm.create_model(name, **options).eval()
        model = timm.create_model(REGISTERED[family], **options).eval()
    assert_close(model(images(96, 160)), timm_model(images(96, 160)))


@pytest.mark.parametrize("family", REGISTERED)
def test_features_of_pretrained_weights(family: str, tmp_path: Path) -> None:
    timm_model = source(family)
    overlay = {"file": save(timm_model, tmp_path / "weights.pth")}
    options: dict[str, Any] = {"features_only": True, "out_indices": (0, 1)}
    model = create(family, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    expected = timm_model.forward_intermediates(images(*IMAGE), indices=[0, 1], intermediates_only=True)
    for mine, theirs in zip(model(images(*IMAGE)), expected, strict=True):
        assert_close(mine / theirs.std(), theirs / theirs.std())


OTHERS: dict[str, tuple[str, Any]] = {
    "resnet": ("vit", lambda: timm.create_model("resnet10t")),
    "Swin V2": ("swin", lambda: source("swinv2")),
    "Swin V1": ("swinv2", lambda: source("swin")),
    "ViT": ("swin", lambda: source("vit")),
    "Swin": ("vit", lambda: source("swin")),
    "a wider ViT": ("vit", lambda: source("vit", embed_dim=60)),
    "a deeper ViT": ("vit", lambda: source("vit", depth=3)),
    "a shallower ViT": ("vit", lambda: source("vit", depth=1)),
    "a deeper Swin": ("swin", lambda: source("swin", depths=(2, 2, 3, 1))),
    "a wider Swin V2": ("swinv2", lambda: source("swinv2", embed_dim=48)),
    "nothing": ("vit", lambda: nn.Identity()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_of_another_architecture_are_refused(name: str, tmp_path: Path) -> None:
    family, other = OTHERS[name]
    overlay = {"file": save(other(), tmp_path / "weights.pth")}
    for options in ({}, {"encoding": "rope_mixed"}, {"num_classes": 3}, {"features_only": True, "out_indices": (0, 1)}):
        with pytest.raises(
            ValueError, match=rf"{REGISTERED[family]}: the weights in .*weights\.pth (are of|do not fit)"
        ):
            create(family, pretrained=True, pretrained_cfg_overlay=overlay, **options)


@pytest.mark.parametrize("family", REGISTERED)
@pytest.mark.parametrize("encoding", [*ENCODINGS, ["table", "rope_mixed"]])
def test_checkpoint_path_with_our_weights_and_with_those_of_timm(family: str, encoding: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"encoding": encoding, "num_classes": 5}
    trained = create(family, **options)
    draw(trained, 9)
    ours = save(trained, tmp_path / "ours.pth")
    model = create(family, checkpoint_path=ours, **options)
    assert torch.equal(model(images(*IMAGE)), trained(images(*IMAGE)))
    theirs = save(source(family, num_classes=5), tmp_path / "theirs.safetensors")
    model = create(family, checkpoint_path=theirs, **options)
    if model.swap_report.same_function:
        assert_close(model(images(*IMAGE)), source(family, num_classes=5)(images(*IMAGE)))


@pytest.mark.parametrize("family", REGISTERED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoding": "rope_mixed", "theta": 4.0},
        {"encoding": {"name": "table", "strength": 0.5}},
        {"encoding": ["cpb", {"name": "rope_axial", "layout": "half"}, "sincos"]},
    ],
)
def test_a_saved_folder_restores_the_encoding_and_the_outputs(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    trained = create(family, num_classes=5, **options)
    draw(trained, 9)
    save_for_hf(trained, str(tmp_path), safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == REGISTERED[family]
    assert config["model_args"]["encoding"] == options.get("encoding", NATIVE.get(family, "none"))
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(model) is type(trained)
    assert model.state_dict().keys() == trained.state_dict().keys()
    assert torch.equal(model(images(*IMAGE)), trained(images(*IMAGE)))
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=2).eval()
    assert again(images(*IMAGE)).shape == (2, 2)
    drawn_anew = timm.create_model(f"local-dir:{tmp_path}").eval()
    assert not torch.equal(drawn_anew(images(*IMAGE)), trained(images(*IMAGE)))


@pytest.mark.parametrize("family", REGISTERED)
def test_features_of_a_saved_folder(family: str, tmp_path: Path) -> None:
    trained = create(family, num_classes=5, encoding=["table", "rope_mixed"])
    draw(trained, 9)
    save_for_hf(trained, str(tmp_path), safe_serialization=True)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=True, out_indices=(0, 1)).eval()
    expected = trained.forward_intermediates(images(*IMAGE), indices=[0, 1], intermediates_only=True)
    for mine, theirs in zip(model(images(*IMAGE)), expected, strict=True):
        assert_close(mine / theirs.std(), theirs / theirs.std())


def test_a_saved_fading_embedding_keeps_its_strength(tmp_path: Path) -> None:
    trained = create("vit", num_classes=5, encoding="rope_axial", absolute="fade")
    trained.absolute_strength.fill_(0.25)
    save_for_hf(trained, str(tmp_path), safe_serialization=True)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert float(model.absolute_strength) == 0.25
    assert torch.equal(model(images(*IMAGE)), trained(images(*IMAGE)))


def test_weights_saved_by_timm_load_into_a_swapped_model_and_ours_do_not_into_another(tmp_path: Path) -> None:
    model = swap(build("swin", img_size=IMAGE), "rope_mixed")
    other = swap(build("swin", img_size=IMAGE), "cpb")
    with pytest.raises(RuntimeError, match="encoding"):
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("family", REGISTERED)
def test_our_own_weights_in_a_file(family: str, tmp_path: Path) -> None:
    trained = create(family, num_classes=1000, encoding="rope_axial")
    draw(trained, 9)
    overlay = {"file": save(trained, tmp_path / "ours.safetensors")}
    model = create(family, pretrained=True, pretrained_cfg_overlay=overlay, encoding="rope_axial")
    assert torch.equal(model(images(*IMAGE)), trained(images(*IMAGE)))
    with pytest.raises(ValueError, match=r"the weights in .*ours.safetensors do not fit"):
        create(family, pretrained=True, pretrained_cfg_overlay=overlay, encoding="rope_mixed")


@pytest.mark.parametrize("family", REGISTERED)
def test_a_second_swap_is_what_is_saved(family: str, tmp_path: Path) -> None:
    model = swap(create(family, num_classes=5, encoding="rope_mixed", theta=3.0), "rope_axial", layout="half")
    draw(model, 9)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    args = json.loads((tmp_path / "config.json").read_text())["model_args"]
    assert args["encoding"] == {"name": "rope_axial", "layout": "half"}
    assert "theta" not in args
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images(*IMAGE)), model.eval()(images(*IMAGE)))


@pytest.mark.parametrize("family", REGISTERED)
def test_an_unknown_argument_names_the_nearest(family: str) -> None:
    with pytest.raises(ValueError, match=r"unknown argument 'thetta'; did you mean 'theta'\? options of 'rope_axial'"):
        create(family, encoding="rope_axial", thetta=3.0)
