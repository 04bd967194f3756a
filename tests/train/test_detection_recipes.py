"""The recipes for COCO: what is built from them, and two steps of each on a small folder of the same layout."""

import json
from pathlib import Path

import pytest
import torch

from tests.train.boxes import coco_folder
from train.__main__ import main
from train.config import load_config
from train.recipe import create_optimizer
from train.tasks.detect import Detect

RECIPES = {"coco_retinanet_swin_tiny": 12, "coco_maskrcnn_swin_tiny": 36}
NUM_IMAGES = 117_266  # of train2017 with objects
SMALL = [
    "model.backbone={name: relpos2d_swin_tiny_patch4_window7_224, embed_dim: 24, depths: [1, 1, 1, 1], num_heads: [3, 3, 3, 3]}",
    "model.min_size=64", "model.max_size=96", "model.out_channels=16", "trainer.max_steps=2", "trainer.batch_size=2",
    "trainer.eval_every=2", "trainer.num_workers=0", "trainer.device=cpu",
    "schedule.warmup_steps=1",
]  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_of_a_recipe(name: str, tmp_path: Path) -> None:
    data = coco_folder(tmp_path / "data", num_train=4, num_test=2)
    options = [
        *SMALL,
        *(["model.box_channels=16", "model.num_proposals=20", "model.mask_channels=16"] * ("mask" in name)),
    ]
    assert main([f"detect/{name}", f"data.path={data}", f"output={tmp_path / 'run'}", *options]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == 2
    assert ("mask_AP" in metrics) is ("mask" in name)
    assert metrics["left_out"] == {"training: images without objects": 1}


@pytest.mark.parametrize("name", RECIPES)
def test_steps_and_rates_as_told(name: str) -> None:
    config = load_config(f"detect/{name}", [])
    assert config.trainer.batch_size == 16
    assert config.trainer.max_steps == NUM_IMAGES // 16 * RECIPES[name]
    assert config.model.given()["backbone"]["pretrained"]
    assert config.data.empty_images is False  # type: ignore[union-attr]


def test_what_decays(tmp_path: Path) -> None:
    data = coco_folder(tmp_path / "data", num_train=2, num_test=2)
    options = [option for option in SMALL if not option.startswith("trainer.")]
    config = load_config("detect/coco_retinanet_swin_tiny", [f"data.path={data}", *options])
    model = Detect(config).model
    optimizer = create_optimizer(model, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert set(decay) == set(names.values())
    for name, parameter in model.named_parameters():
        free = parameter.ndim < 2 or name.endswith("relative_position_bias_table")
        assert decay[name] == (0.0 if free else 0.05), name
    assert isinstance(optimizer, torch.optim.AdamW)
