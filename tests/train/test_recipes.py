"""The recipes of papers: each runs as it stands on a few images, and its numbers reach what they are meant for."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import Mixup
from timm.data.auto_augment import AutoAugment, RandAugment
from timm.data.random_erasing import RandomErasing
from timm.layers import DropPath
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import nn
from torchvision.transforms import v2

from tests.backbones.builders import draw, timm_warnings
from train.__main__ import main
from train.config import load_config
from train.recipe import create_optimizer, create_schedule
from train.tasks import create_task

SWIN = ["model.embed_dim=24", "model.depths=[1, 2]", "model.num_heads=[2, 4]"]
SMALLER = {  # what a recipe can only show on a GPU; its windows stay, and are full
    "imagenet_swin_tiny": [*SWIN, "data.image_size=56"],
    "imagenet_swinv2_tiny": [*SWIN, "data.image_size=64"],
    "imagenet_vit_small": ["model.embed_dim=48", "model.depth=2", "model.num_heads=3", "data.image_size=48"],
    "finetune_swin_384": [*SWIN, "data.image_size=96", "model.pretrained=false"],
}
SHORTER = ["trainer.batch_size=8", "trainer.accumulate=2", "trainer.num_workers=0", "trainer.device=cpu"]
CRITERIA = {"cross_entropy": SoftTargetCrossEntropy, "binary_cross_entropy": BinaryCrossEntropy}
POLICIES = {"rand-m9-mstd0.5-inc1": RandAugment, "3a": AutoAugment}
pytestmark = pytest.mark.usefixtures("undrawn")

EPOCHS = {"imagenet_swin_tiny": 300, "imagenet_swinv2_tiny": 300, "imagenet_vit_small": 400, "finetune_swin_384": 30}


def small(name: str, image_folders: Path) -> list[str]:
    return [f"data.path={image_folders}", *SMALLER[name], *SHORTER]


@pytest.mark.parametrize("name", SMALLER)
def test_two_steps(name: str, image_folders: Path, tmp_path: Path) -> None:
    warmup = ["trainer.max_steps=2", f"schedule.warmup_steps={0 if 'finetune' in name else 1}"]
    assert main([f"classify/{name}", *small(name, image_folders), *warmup, f"output={tmp_path / 'run'}"]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == 2
    assert metrics["skipped_steps"] == 0
    assert math.isfinite(metrics["loss"])
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in history)


@pytest.mark.parametrize("name", SMALLER)
def test_every_number_reaches_its_place(name: str, image_folders: Path) -> None:
    config = load_config(f"classify/{name}", small(name, image_folders))
    task: Any = create_task(config)

    mixup, loss = task.mixup, config.loss
    assert isinstance(mixup, Mixup)
    assert (mixup.mixup_alpha, mixup.cutmix_alpha) == (loss.mixup, loss.cutmix) == (0.8, 1.0)
    assert mixup.label_smoothing == loss.smoothing
    assert isinstance(task.criterion, CRITERIA[loss.name])

    data: Any = config.data
    steps = task.train_data.transform.transforms
    crop = next(step for step in steps[0].transforms if isinstance(step, v2.RandomResizedCrop))
    assert tuple(crop.scale) == data.crop_scale == (0.08, 1.0)
    assert crop.interpolation == v2.InterpolationMode.BICUBIC
    assert sum(isinstance(step, POLICIES[data.auto_augment]) for step in steps) == 1
    jitters = [tuple(step.brightness) for step in steps if isinstance(step, v2.ColorJitter)]
    assert jitters == ([] if data.color_jitter is None else [(1 - data.color_jitter, 1 + data.color_jitter)])
    erasings = [step.probability for step in steps if isinstance(step, RandomErasing)]
    assert erasings == ([data.random_erasing] if data.random_erasing else [])

    rates = [module.drop_prob for module in task.model.modules() if isinstance(module, DropPath)]
    assert max(rates, default=0.0) == pytest.approx(config.model.given()["drop_path_rate"])

    optimizer = create_optimizer(task.model, config)
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    decaying = {
        names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"] if p.ndim > 1
    }
    for parameter, decay in decaying.items():
        is_free = ".encoding." in parameter or parameter.endswith(("cls_token", "logit_scale"))
        assert decay == (0.0 if is_free else config.optimizer.weight_decay), parameter
    assert any(".encoding." in parameter for parameter in decaying)
    for group in optimizer.param_groups:
        assert tuple(group["betas"]) == (0.9, 0.999)
        assert group["eps"] == 1e-8
    if config.optimizer.name == "lamb":
        assert optimizer.param_groups[0]["max_grad_norm"] == 1.0

    schedule = create_schedule(optimizer, config)
    at = {}
    for step in (0, config.schedule.warmup_steps, config.trainer.max_steps):
        schedule.step_update(step)
        at[step] = optimizer.param_groups[0]["lr"]
    assert at[0] == (config.schedule.warmup_lr if config.schedule.warmup_steps else config.optimizer.lr)
    assert config.optimizer.lr * 0.98 < at[config.schedule.warmup_steps] <= config.optimizer.lr
    assert at[config.trainer.max_steps] == pytest.approx(config.schedule.min_lr)


@pytest.mark.parametrize("name", SMALLER)
def test_steps_and_rates_as_told(name: str) -> None:
    config = load_config(f"classify/{name}")
    assert config.trainer.max_steps == 1_281_167 // config.trainer.batch_size * EPOCHS[name]
    epochs_of_warmup = {"imagenet_swin_tiny": 20, "imagenet_swinv2_tiny": 20, "imagenet_vit_small": 5}
    steps = 1_281_167 // config.trainer.batch_size * epochs_of_warmup.get(name, 0)
    assert config.schedule.warmup_steps == steps


def test_lamb_and_the_rotary_positions_of_vit_small() -> None:
    config = load_config("classify/imagenet_vit_small")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("lamb", 4e-3, 0.03)
    assert (config.encodings[0].name, config.encodings[0].given()) == ("rope_mixed", {"theta": 10.0})
    assert config.trainer.clip_grad_norm is None


def test_fine_tuning_starts_from_weights_of_imagenet_1k(tmp_path: Path) -> None:
    """The name stands for weights trained on nothing more; its windows of 7 become windows of 12, all else stays."""
    config = load_config("classify/finetune_swin_384")
    assert config.model.pretrained
    small: dict[str, Any] = {"embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4)}
    weights = draw_weights(timm.create_model(config.model.name.removeprefix("relpos2d_"), img_size=56, **small))
    save_file(weights, tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    with timm_warnings():
        model: Any = timm.create_model(
            config.model.name, True, pretrained_cfg_overlay=overlay, img_size=96, window_size=12, **small
        )
    assert model.pretrained_cfg["hf_hub_id"] == "timm/swin_base_patch4_window7_224.ms_in1k"
    for name, parameter in model.named_parameters():
        weight = weights[name.replace("encoding.", "")]
        if name.endswith("relative_position_bias_table"):
            assert (weight.shape[0], parameter.shape[0]) == (13 * 13, 23 * 23)
            corners_and_middle = parameter[[0, 22, 264, 528]], weight[[0, 12, 84, 168]]
            torch.testing.assert_close(*corners_and_middle, rtol=0, atol=1e-4)
        else:
            assert torch.equal(parameter, weight), name


def draw_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    draw(model, seed=2)
    return {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
