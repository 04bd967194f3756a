"""Our names as timm backbones in other libraries: DETR and RT-DETR of transformers, segmentation-models-pytorch."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    RTDetrConfig,
    RTDetrForObjectDetection,
    TimmBackbone,
    TimmBackboneConfig,
)

from relpos2d.backbones.registry import register_backbone
from relpos2d.encoding import Encoding
from tests.backbones.builders import SMALL, draw, images

STAGES = {**SMALL["swin"][1], "depths": (1, 1, 1, 1)}
#: name -> our model, its encoding, and what makes it small
NAMES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "elsewhere_swin": ("relpos2d_swin_tiny_patch4_window7_224", {"name": "rope_mixed", "theta": 10.0}, STAGES),
    "elsewhere_swinv2": ("relpos2d_swinv2_tiny_window8_256", ["cpb", "rope_axial", "learned"], STAGES),
    "elsewhere_vit": ("relpos2d_vit_tiny_patch16_224", ["table", "sincos"], {**SMALL["vit"][1], "depth": 4}),
}
OUT = {"elsewhere_swin": [1, 2, 3], "elsewhere_swinv2": [3], "elsewhere_vit": [3]}
HEADS = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_queries": 5,
    "num_labels": 3,
}
LABELS = [
    {"class_labels": torch.tensor([0, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.4], [0.3, 0.6, 0.2, 0.1]])},
    {"class_labels": torch.zeros(0, dtype=torch.long), "boxes": torch.zeros(0, 4)},
]

for _name, (_model, _encoding, _small) in NAMES.items():
    register_backbone(_name, _model, encoding=_encoding, **_small)


def backbone(name: str, out_indices: list[int]) -> TimmBackboneConfig:
    return TimmBackboneConfig(backbone=name, out_indices=out_indices)


def rt_detr(name: str) -> Any:
    config = RTDetrConfig(
        backbone_config=backbone(name, [1, 2, 3]),
        encoder_in_channels=[48, 96, 192],
        encoder_hidden_dim=16,
        decoder_in_channels=[16, 16, 16],
        decoder_n_points=2,
        num_denoising=0,
        **HEADS,
    )
    return RTDetrForObjectDetection(config)


def encodings(model: nn.Module) -> list[str]:
    """Names of the encodings, those of one attention as one."""
    found = [m for name, m in model.named_modules() if isinstance(m, Encoding) and ".parts." not in name]
    return ["+".join(part.name for part in m.parts) if m.name == "combined" else m.name for m in found]


def train_one_step(model: nn.Module, loss: Tensor) -> None:
    """The loss is finite, and every parameter of an encoding learns."""
    assert loss.isfinite()
    loss.backward()
    positions = {name: p for name, p in model.named_parameters() if ".encoding." in name}
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in positions.values())
    before = {name: p.clone() for name, p in positions.items()}
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert all(not torch.equal(p, before[name]) for name, p in positions.items())


def batch(height: int, width: int) -> dict[str, Any]:
    """Two images of which the second is smaller."""
    mask = torch.ones(2, height, width, dtype=torch.long)
    mask[1, :, width - 14 :] = 0
    return {"pixel_values": images(height, width), "pixel_mask": mask, "labels": LABELS}


def saved_and_loaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return loaded.eval()


@pytest.mark.parametrize("name", NAMES)
def test_detr(name: str, tmp_path: Path) -> None:
    config = DetrConfig(use_timm_backbone=True, backbone_config=backbone(name, OUT[name]), **HEADS)
    model = DetrForObjectDetection(config)
    draw(model.model.backbone, 1)
    _, encoding, small = NAMES[name]
    relative = {"elsewhere_swinv2": "cpb+rope_axial", "elsewhere_swin": "rope_mixed", "elsewhere_vit": "table"}[name]
    depth = small.get("depth", 4)
    absolute = [encoding[-1]] if isinstance(encoding, list) else []
    assert sorted(encodings(model)) == sorted([relative] * depth + absolute)
    train_one_step(model, model.train()(**batch(64, 96)).loss)
    model.eval()
    for height, width in ((64, 64), (75, 101)):
        output = model(images(height, width))
        assert output.logits.shape == (2, 5, 4)
        assert output.pred_boxes.isfinite().all()
    loaded = saved_and_loaded(model, tmp_path)
    assert torch.equal(loaded(images(70, 90)).logits, model(images(70, 90)).logits)
    assert encodings(loaded) == encodings(model)


def test_a_saved_model_whose_name_nobody_registered(tmp_path: Path) -> None:
    """transformers keeps the name and nothing else: to load it without its encoding would be worse than not to load it."""
    DetrForObjectDetection(DetrConfig(backbone_config=backbone("elsewhere_swin", [3]), **HEADS)).save_pretrained(
        tmp_path
    )
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["backbone_config"]["backbone"] == "elsewhere_swin"
    config["backbone_config"]["backbone"] = "elsewhere_unknown"
    file.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="Unknown model \\(elsewhere_unknown\\)"):
        DetrForObjectDetection.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["elsewhere_swin", "elsewhere_swinv2"])
def test_rt_detr(name: str, tmp_path: Path) -> None:
    model = rt_detr(name)
    draw(model.model.backbone, 1)
    train_one_step(model, model.train()(**batch(64, 96)).loss)
    model.eval()
    for height, width in ((64, 64), (96, 160)):  # RT-DETR doubles its own maps: multiples of 32
        assert model(images(height, width)).logits.shape == (2, 5, 3)
    loaded = saved_and_loaded(model, tmp_path)
    assert torch.equal(loaded(images(96, 64)).logits, model(images(96, 64)).logits)
    assert encodings(loaded) == encodings(model)


@pytest.mark.parametrize(
    ("name", "native"), [("relpos2d_swin_tiny_patch4_window7_224", "table"), ("relpos2d_vit_tiny_patch16_224", "none")]
)
def test_registered_names_unchanged(name: str, native: str) -> None:
    model = DetrForObjectDetection(DetrConfig(backbone_config=backbone(name, [-1]), **HEADS))
    assert set(encodings(model)) == {native}
    with torch.no_grad():
        maps = model.model.backbone(images(70, 101, batch=1), torch.ones(1, 70, 101))
    stride, channels = (16, 192) if native == "none" else (32, 768)
    assert [m.shape for m, _ in maps] == [(1, channels, -(-70 // stride), -(-101 // stride))]
    loss = model.train()(**batch(64, 96)).loss
    assert loss.isfinite()
    loss.backward()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_saved_may_hold_anything(name: str) -> None:
    """transformers builds a model on the meta device and leaves such buffers of a timm backbone inside DETR as memory is."""
    model = timm.create_model(name, features_only=True, out_indices=OUT[name]).eval()
    draw(model, 1)
    expected = model(images(70, 90))
    saved = model.state_dict()
    for key, buffer in model.named_buffers():
        if key not in saved:
            buffer.fill_(torch.nan)
    for mine, theirs in zip(model(images(70, 90)), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_an_option_beside_the_name_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why register_backbone is there: transformers writes options of a timm backbone into its configuration, and uses none."""

    class Hub:
        def repo_exists(self, name: str) -> bool:
            return False

    monkeypatch.setattr(transformers.backbone_utils, "hf_api", Hub)
    options = {"out_indices": [3], "encoding": "alibi"}
    config = DetrConfig(use_timm_backbone=True, backbone="elsewhere_swin", backbone_kwargs=options, **HEADS)
    assert config.backbone_config.encoding == "alibi"
    model = DetrForObjectDetection(config)
    assert set(encodings(model)) == {"rope_mixed"}
    # where one makes the backbone oneself they do
    assert set(encodings(TimmBackbone(backbone("elsewhere_swin", [3]), encoding="alibi"))) == {"alibi"}


def test_unet(tmp_path: Path) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    name, encoding, small = NAMES["elsewhere_swin"]
    options = {"encoder_weights": None, "classes": 2, "decoder_channels": (16, 8, 8, 8, 8), "decoder_use_norm": False}
    model = smp.Unet(f"tu-{name}", encoding=encoding, **options, **small)
    assert encodings(model) == ["rope_mixed"] * 4
    draw(model.encoder, 1)
    x = images(64, 96)
    assert [f.shape[1:] for f in model.encoder(x)[2:]] == [(24, 16, 24), (48, 8, 12), (96, 4, 6), (192, 2, 3)]
    out = model.train()(x)
    assert out.shape == (2, 2, 64, 96)
    train_one_step(model, out.square().mean())
    model.eval().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["encoder_name"], config["encoding"]) == (f"tu-{name}", encoding)
    loaded = smp.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(images(32, 64)), model(images(32, 64)))
    assert encodings(loaded) == encodings(model)


@pytest.mark.parametrize("name", ["elsewhere_swinv2", "elsewhere_vit"])
def test_other_decoders(name: str) -> None:
    """A plain ViT has one stride, which only DPT can take."""
    smp = pytest.importorskip("segmentation_models_pytorch")
    narrow = {"decoder_fusion_channels": 8, "decoder_intermediate_channels": (8, 8, 8, 8)}
    if name == "elsewhere_vit":
        model, side = smp.DPT("tu-elsewhere_vit", encoder_weights=None, classes=2, **narrow), 224
    else:
        model, side = smp.FPN("tu-elsewhere_swinv2", encoder_weights=None, classes=2, decoder_pyramid_channels=8), 96
    draw(model.encoder, 1)
    out = model.train()(images(side, side))
    assert out.shape == (2, 2, side, side)
    train_one_step(model, out.square().mean())
