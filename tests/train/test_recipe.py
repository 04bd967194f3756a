"""What is trained, at which rate, averaged how, and how positions are handed over."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from relpos2d import Combined, Encoding
from tests.backbones.builders import draw
from train.config import Config, Trainer, load_config
from train.learner import Learner
from train.loop import create_accelerator
from train.recipe import (
    Strengths,
    choose_trainable,
    create_average,
    create_optimizer,
    create_schedule,
    position_names,
)
from train.tasks import create_task

SIZES = {
    "vit": {"patch_size": 7, "embed_dim": 24, "depth": 2, "num_heads": 3, "global_pool": "avg"},
    "swin": {"patch_size": 2, "window_size": 7, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4)},
}
SOURCES = {"vit": "vit_tiny_patch16_224", "swin": "swin_tiny_patch4_window7_224"}
SWIN_LAYERS = {"layers.0.blocks.0": 1, "layers.1.downsample": 2, "layers.1.blocks.0": 2, "layers.1.blocks.1": 3}
MIXED_SUM = "encoding=[{name: table, strength: 1.0}, rope_axial]"
SCHEDULE = ["optimizer.lr=0.2", "schedule.warmup_lr=0.01", "schedule.min_lr=0.03"]


def rate(step: int) -> float:
    """Five steps up from 0.01 to 0.2, then half a wave down to 0.03 at step 40."""
    if step < 5:
        return 0.01 + step * (0.2 - 0.01) / 5
    return 0.03 + (0.2 - 0.03) * math.cos(math.pi / 2 * step / 40) ** 2


def node(family: str) -> str:
    """The small model of a family as the config would have it."""
    keys = {"name": f"relpos2d_{SOURCES[family]}", **SIZES[family]}
    keys = {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
    return f"model={keys}".replace("'", "")


@pytest.fixture
def configure(digits_csv: str) -> Any:
    def load(family: str, *overrides: str) -> Config:
        short = ["trainer.batch_size=8", "trainer.max_steps=40", "schedule.warmup_steps=5", "trainer.device=cpu"]
        given = [f"data.path={digits_csv}", node(family), *short, *overrides]
        return load_config("classify/digits", [*{each.split("=")[0]: each for each in given}.values()])

    return load


def built(config: Config) -> Any:
    return create_task(config).model


def batch(size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, 1, 28, 28, generator=generator), torch.arange(size)


def learner_of(config: Config) -> tuple[Learner, nn.Module]:
    """A learner and its model."""
    task = create_task(config)
    return Learner(config, task, create_accelerator(config)), task.model


def layer_of(family: str, name: str, num_layers: int) -> int:
    """Where a parameter stands between stem (0) and head (the last layer), by its name."""
    if name.startswith(("patch_embed", "encoding", "pos_embed", "cls_token")):
        return 0
    if name.startswith(("head", "fc_norm")):
        return num_layers - 1
    if name.startswith("norm"):
        return num_layers - 2
    if family == "vit":
        return int(name.split(".")[1]) + 1
    return next(layer for prefix, layer in SWIN_LAYERS.items() if name.startswith(prefix))


@pytest.mark.parametrize(
    ("family", "encoding"),
    [
        ("vit", "table"),
        ("vit", "learned"),
        ("vit", "rope_mixed"),
        ("vit", "[learned, table]"),
        ("swin", "table"),
        ("swin", "learned"),
        ("swin", "rope_mixed"),
        ("swin", "[cpb, rope_mixed]"),
    ],
)
def test_layer_decay(family: str, encoding: str, configure: Any) -> None:
    options = [*SCHEDULE, "optimizer.layer_decay=0.7", "optimizer.weight_decay=0.05"]
    config = configure(family, f"encoding={encoding}", *options)
    model = built(config)
    optimizer = create_optimizer(model, config)
    schedule = create_schedule(optimizer, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    num_layers = 4 if family == "vit" else 5
    seen = set()
    for step in (0, 3, 17):
        schedule.step_update(step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                distance = num_layers - 1 - layer_of(family, name, num_layers)
                assert group["lr"] == pytest.approx(rate(step) * 0.7**distance), name
                free = parameter.ndim < 2 or "encoding." in name or name in ("cls_token", "pos_embed")
                assert group["weight_decay"] == (0.0 if free else 0.05), name
                seen.add(name)
    assert seen == set(names.values())
    assert any(".encoding." in name or name.startswith("encoding.") for name in seen)


@pytest.mark.parametrize("options", [[], ["optimizer.layer_decay=0.5"]])
def test_positions_learn_faster(options: list[str], configure: Any) -> None:
    config = configure("vit", *SCHEDULE, "optimizer.position_lr_scale=20.0", *options)
    plain = configure("vit", *SCHEDULE, *options)
    model = create_task(config).model
    rates = []
    for each in (config, plain):
        optimizer = create_optimizer(model, each)
        create_schedule(optimizer, each).step_update(5)
        rates.append({id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]})
    assert rates[0].keys() == rates[1].keys()
    names = position_names(model)
    assert names
    for name, parameter in model.named_parameters():
        (rate, decay), (usual, usual_decay) = (each[id(parameter)] for each in rates)
        assert rate == pytest.approx(usual * (20 if name in names else 1)), name
        assert decay == usual_decay


def test_layer_decay_has_a_lowest_scale(configure: Any) -> None:
    config = configure("vit", "optimizer.layer_decay=0.5", "optimizer.layer_decay_min_scale=0.3")
    scales = {group["lr_scale"] for group in create_optimizer(built(config), config).param_groups}
    assert scales == {0.3, 0.5, 1.0}  # stem and first block would have 1/8 and 1/4


FROZEN = {  # stages -> what stays as it is
    "vit": {
        1: ("patch_embed.", "cls_token", "pos_embed", "blocks.0."),
        2: ("patch_embed.", "cls_token", "pos_embed", "blocks."),
    },
    "swin": {
        1: ("patch_embed.", "layers.0."),
        2: ("patch_embed.", "layers."),
    },
}
MOST = [(family, stages) for family, most in FROZEN.items() for stages in most]


@pytest.mark.parametrize(("family", "stages"), MOST)
def test_frozen_stages_stay_as_they_are(family: str, stages: int, configure: Any) -> None:
    learner, model = learner_of(configure(family, f"trainer.frozen_stages={stages}", "optimizer.lr=0.1"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in (1, 2):
        learner.step(step, batch)
        learner.update(finite=True)
    for name, parameter in model.named_parameters():
        frozen = name.startswith(FROZEN[family][stages])
        assert parameter.requires_grad is not frozen, name
        assert (parameter.grad is None) is frozen, name
        assert torch.equal(parameter, before[name]) is frozen, name


@pytest.mark.parametrize("decay", ["optimizer.weight_decay=0.0", "optimizer.layer_decay=0.8"])
def test_positions_alone(decay: str, configure: Any) -> None:
    learner, model = learner_of(configure("vit", "encoding=[learned, table]", "trainer.trainable=positions", decay))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tables = [
        f"blocks.{i}.attn.encoding.{name}" for i in (0, 1) for name in ("relative_position_bias_table", "prefix_bias")
    ]
    assert trained == {"encoding.pos_embed", *tables}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in (1, 2):
        learner.step(step, batch)
        learner.update(finite=True)
    assert {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])} == trained


REFUSED = {
    "stages that there are not": (
        ["trainer.frozen_stages=3"],
        r"^trainer\.frozen_stages = 3: must be at most 2, the stages of this model$",
    ),
    "positions without parameters": (
        ["trainer.trainable=positions", "encoding=rope_axial"],
        r"^trainer\.trainable = 'positions': the encodings of this model have no parameters$",
    ),
    "nothing": (
        ["trainer.trainable=positions", "trainer.frozen_stages=2", "encoding=table"],
        r"^trainer: trainable and frozen_stages together leave nothing to train$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("family", SIZES)
def test_refused(family: str, case: str, configure: Any) -> None:
    overrides, message = REFUSED[case]
    config = configure(family, *overrides)
    with pytest.raises(ValueError, match=message):
        choose_trainable(built(config), config.trainer)


def test_m1_learning_rate_by_step(configure: Any) -> None:
    config = configure("vit", *SCHEDULE)
    optimizer = create_optimizer(nn.Linear(3, 2), config)
    schedule = create_schedule(optimizer, config)
    for step in (0, 1, 4, 5, 23, 40):
        schedule.step_update(step)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate(step)] * 2)


def test_m2_learning_rate_of_a_restored_run(configure: Any) -> None:
    """At step 5000 it is the same after 5000 steps, after none, and after a later one; the optimizer's own is written over."""
    config = configure("vit", *SCHEDULE, "trainer.max_steps=12000", "schedule.warmup_steps=700")
    straight = create_optimizer(nn.Linear(3, 2), config)
    schedule = create_schedule(straight, config)
    for step in range(5001):
        schedule.step_update(step)
    restored = create_optimizer(nn.Linear(3, 2), config)
    again = create_schedule(restored, config)
    state = straight.state_dict()
    state["param_groups"] = [{**group, "lr": 7.0} for group in state["param_groups"]]
    restored.load_state_dict(state)
    for earlier in (0, 11000):
        again.step_update(earlier)
        again.step_update(5000)
        assert [g["lr"] for g in restored.param_groups] == [g["lr"] for g in straight.param_groups]


class Counting(nn.Module):
    """A parameter, a statistic and a count."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def move(self, step: int) -> None:
        with torch.no_grad():
            self.weight.fill_(step / 2000)
        self.mean.fill_(step / 7)
        self.count.fill_(step)


def test_m4_an_average_of_a_short_run_is_of_use_and_buffers_are_copied() -> None:
    model = Counting()
    average = create_average(model, Trainer(max_steps=2000, batch_size=1, ema_decay=0.99999))
    assert average is not None
    expected = 0.0
    for step in range(1, 2001):
        model.move(step)
        average.update(model, step=step)
        share = step ** (-2 / 3)  # of the newest; never 1e-5 in so short a run
        expected += share * (step / 2000 - expected)
        if step in (1, 2, 3, 2000):
            torch.testing.assert_close(average.module.weight.detach(), torch.full((3,), expected))
            assert torch.equal(average.module.mean, model.mean)
            assert torch.equal(average.module.count, model.count)
    assert 0.9 < expected < 0.95  # without a warm-up it would be at 0.01


def test_no_average_unless_told() -> None:
    assert create_average(Counting(), Trainer(max_steps=2, batch_size=1)) is None


def test_m4_the_average_has_the_strengths_of_its_model(configure: Any) -> None:
    config = configure("vit", "encoding=rope_mixed", "handover={steps: 4}", "trainer.ema_decay=0.99999")
    learner, model = learner_of(config)
    for step in (1, 2, 3):
        learner.step(step, batch)
        learner.update(finite=True)
    assert learner.evaluated is not model
    averaged = dict(learner.evaluated.named_buffers())
    assert averaged["blocks.0.attn.encoding.strength"] == 0.5
    assert averaged["absolute_strength"] == 0.5
    assert all(torch.equal(averaged[name], buffer) for name, buffer in model.named_buffers())


SHAPES = {
    "linear": {0: 0.0, 3: 0.0, 4: 0.125, 7: 0.5, 11: 1.0, 39: 1.0},
    "cosine": {0: 0.0, 3: 0.0, 5: (1 - math.sqrt(0.5)) / 2, 7: 0.5, 9: (1 + math.sqrt(0.5)) / 2, 11: 1.0, 39: 1.0},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_strengths_by_step(shape: str, configure: Any) -> None:
    config = configure("vit", "encoding=[learned, rope_axial]", f"handover={{steps: 8, start: 3, shape: {shape}}}")
    model = built(config)
    strengths = Strengths(model, config)
    assert strengths.value == 0.0
    for step, value in SHAPES[shape].items():
        strengths.before_step(step)
        assert strengths.value == pytest.approx(value)
        assert [float(block.attn.encoding.strength) for block in model.blocks] == pytest.approx([value] * 2)
        assert float(model.encoding.strength) == pytest.approx(1 - value)


MOVES = {  # encoding, further options -> (rising, falling, number of embeddings that fade)
    "one": ("vit", ["encoding=table"], ["table"] * 2, [], 1),
    "sum as a whole": ("vit", ["encoding=[table, rope_axial]"], ["combined"] * 2, [], 1),
    "part of a sum": ("vit", [MIXED_SUM], ["rope_axial"] * 2, [], 1),
    "absolute encoding": ("vit", ["encoding=[learned, table]"], ["table"] * 2, ["learned"], 0),
    "absolute encoding that stays": (
        "vit", ["encoding=[{name: learned, strength: 1.0}, table]"], ["table"] * 2, [], 0),
    "kept embedding": ("vit", ["encoding=table", "model.absolute=keep"], ["table"] * 2, [], 0),
    "removed embedding": ("vit", ["encoding=table", "model.absolute=remove"], ["table"] * 2, [], 0),
    "windows": ("swin", ["encoding=cpb"], ["cpb"] * 3, [], 0),
    "windows beside their table": ("swin", [MIXED_SUM], ["rope_axial"] * 3, [], 0),
    "windows with an absolute encoding": ("swin", ["encoding=[sincos, cpb]"], ["cpb"] * 3, ["sincos"], 0),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_what_a_handover_moves(case: str, configure: Any) -> None:
    family, overrides, rising, falling, num_embeddings = MOVES[case]
    config = configure(family, *overrides, "handover={steps: 8}")
    model = built(config)
    strengths = Strengths(model, config)
    assert [encoding.name for encoding in strengths.rising] == rising
    assert [encoding.name for encoding in strengths.falling] == falling
    assert len(strengths.embeddings) == num_embeddings
    moved = {id(encoding) for encoding in (*strengths.rising, *strengths.falling)}
    strengths.before_step(2)
    for module in model.modules():
        if isinstance(module, Combined) or (isinstance(module, Encoding) and id(module) not in moved):
            assert float(module.strength) == (0.25 if id(module) in moved else 1.0)
    if num_embeddings:
        assert float(model.absolute_strength) == 0.75


def test_without_a_handover_nothing_moves(configure: Any) -> None:
    config = configure("vit", "encoding={name: table, strength: 0.5}")
    model = built(config)
    strengths = Strengths(model, config)
    strengths.before_step(7)
    assert strengths.value is None
    assert [float(block.attn.encoding.strength) for block in model.blocks] == [0.5, 0.5]


PRESERVING: Sequence[tuple[str, str]] = [
    *(
        ("vit", f"encoding={name}")
        for name in ("table", "cpb", "rope_axial", "rope_mixed", "alibi", "[cpb, rope_mixed]")
    ),
    ("swin", MIXED_SUM),
]


@pytest.mark.parametrize(("family", "encoding"), PRESERVING)
def test_fine_tuning_begins_with_the_function_that_was_trained(family: str, encoding: str, configure: Any) -> None:
    options = {"in_chans": 1, "num_classes": 10, "img_size": 28, "drop_path_rate": 0.0}
    original = timm.create_model(SOURCES[family], **options, **SIZES[family])
    draw(original, seed=4)
    config = configure(family, encoding, "handover={steps: 3}", "model.drop_path_rate=0.0", "optimizer.lr=1e-3")
    task: Any = create_task(config)
    draw(task.model, seed=5)  # so that no encoding hides behind zeros
    missing, unexpected = task.model.load_state_dict(original.state_dict(), strict=False)
    assert not unexpected
    assert all("encoding." in name for name in missing)
    images, labels = batch()

    learner = Learner(config, task, create_accelerator(config))
    loss, _, _ = learner.step(1, lambda: (images, labels))
    with torch.no_grad():
        expected = F.cross_entropy(original.train()(images), labels)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)

    learner.update(finite=True)
    last, _, _ = learner.step(4, lambda: (images, labels))
    rising = learner.strengths.rising
    assert rising
    assert all(float(encoding.strength) == 1 for encoding in rising)
    assert float(last) != pytest.approx(float(loss), rel=1e-5)
    if family == "vit":
        assert float(task.model.absolute_strength) == 0
        alone = built(configure(family, encoding, "model.absolute=remove", "model.drop_path_rate=0.0"))
        state = copy.deepcopy(task.model.state_dict())
        for name in ("absolute_strength", "pos_embed"):
            del state[name]
        alone.load_state_dict(state)
        with torch.no_grad():
            torch.testing.assert_close(alone.train()(images), task.model(images))
