"""Composing configs, and what is said about wrong ones."""

import inspect
from pathlib import Path

import pytest

from train.config import CONFIGS, GROUPS, compose, list_configs, load_config, resolved_yaml
from train.schema import ConfigError, Node, node_from_parameters, validate


@pytest.mark.parametrize("name", list_configs())
def test_every_config_validates_and_opens_with_four_lines(name: str) -> None:
    load_config(name)
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    assert all(line.startswith("# ") for line in lines[:4])
    assert not lines[4].startswith("#")
    assert f"# python -m train {name}" in lines[1]


NEEDED = {  # what a file of a group leaves to its user
    "data=hub": ["data.path=images"],
    "data=image_folder": ["data.path=images"],
    "data=timm": ["data.dataset=torch/cifar10", "data.root=images"],
}


@pytest.mark.parametrize("file", [f"{group}={name}" for group in GROUPS for name in list_configs(group)])
def test_every_group_file_validates(file: str) -> None:
    load_config("classify/digits", [file, *NEEDED.get(file, [])])


def test_a_name_replaces_the_node_and_never_merges() -> None:
    config = load_config("classify/digits", ["encoding={name: rope_mixed, theta: 3.0}"])
    assert config.encoding.given() == {"theta": 3.0}
    replaced = load_config("classify/digits", ["encoding=table"])
    assert replaced.encoding.given() == {}
    swapped, _ = compose("classify/digits", ["optimizer={name: sgd, lr: 0.5}"])
    assert swapped["optimizer"] == {"name": "sgd", "lr": 0.5}  # nothing is left of the file's weight_decay


def test_keys_of_the_command_line_come_after_its_groups() -> None:
    config = load_config("classify/digits", ["optimizer.lr=0.25", "optimizer=adamw"])
    assert config.optimizer.lr == 0.25


def test_keys_of_a_file_fall_with_the_group_that_the_command_line_replaces(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((CONFIGS / "classify/digits.yaml").read_text() + "encoding.resize: clamp\n")
    assert load_config(str(file)).encoding.given() == {"resize": "clamp"}
    assert load_config(str(file), ["encoding=rope_axial"]).encoding.given() == {}


def test_a_key_of_a_group_with_defaults_is_enough() -> None:
    assert load_config("classify/digits").loss.smoothing == 0.0
    assert load_config("classify/digits", ["loss.smoothing=0.1"]).loss.smoothing == 0.1
    assert load_config("classify/digits", ["handover=linear", "handover.steps=9"]).handover.strength(3) == 1 / 3  # type: ignore[union-attr]


def test_a_list_of_encodings_is_a_sum() -> None:
    config = load_config("classify/digits", ["encoding=[table, {name: rope_axial, theta: 50}]"])
    assert [encoding.name for encoding in config.encodings] == ["table", "rope_axial"]
    assert config.encodings[1].given() == {"theta": 50.0}


@pytest.mark.parametrize(("text", "value"), [("3e-4", 3e-4), ("1E-2", 1e-2), ("3.0e-4", 3e-4), ("1", 1.0)])
def test_yaml_floats_are_floats(text: str, value: float, tmp_path: Path) -> None:
    assert load_config("classify/digits", [f"optimizer.lr={text}"]).optimizer.lr == value
    file = tmp_path / "mine.yaml"
    file.write_text(
        (CONFIGS / "classify/digits.yaml").read_text().replace("optimizer.lr:", "#") + f"optimizer.lr: {text}\n"
    )
    assert load_config(str(file)).optimizer.lr == value


@pytest.mark.parametrize("name", list_configs())
def test_the_resolved_config_is_the_same_run(name: str, tmp_path: Path) -> None:
    config = load_config(name, ["seed=3"])
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    again = load_config(str(tmp_path / "config.yaml"))
    assert again.model_dump(serialize_as_any=True) == config.model_dump(serialize_as_any=True)
    assert again.model.given() == {"pretrained": False, "absolute": None, **config.model.given()}


WRONG = {
    "unknown key": (["optimizer.lrr=3e-4"], ["optimizer.lrr = 0.0003: unknown key; did you mean optimizer.lr?", "weight_decay"]),
    "unknown group": (["optimiser=adamw"], ["optimiser = 'adamw': unknown key; did you mean optimizer?"]),
    "unknown encoding": (["encoding=rope_mixd"], ["encoding = 'rope_mixd'", "did you mean rope_mixed?", "alibi"]),
    "unknown name in a node": (["encoding={name: tabel}"], ["encoding.name = 'tabel'", "did you mean table?"]),
    "unknown option of an encoding": (
        ["encoding={name: rope_mixed, teta: 3}"], ["encoding.teta = 3: ", "did you mean encoding.theta?"]),
    "value an encoding refuses": (["encoding={name: alibi, strength: 2.0}"], ["encoding: ", "strength", "2.0"]),
    "wrong member of a sum": (
        ["encoding=[table, {name: cpb, hiden_dim: 8}]"],
        ["encoding.1.hiden_dim = 8: unknown key; did you mean encoding.1.hidden_dim?"],
    ),
    "negative": (["optimizer.lr=-1"], ["optimizer.lr = -1: should be greater than 0"]),
    "no number": (["trainer.batch_size=many"], ["trainer.batch_size = 'many': should be a valid integer"]),
    "fraction for a count": (["trainer.max_steps=10.5"], ["trainer.max_steps = 10.5: should be a valid integer"]),
    "infinite": (["optimizer.lr=.inf"], ["optimizer.lr = inf: should be a finite number"]),
    "unknown model": (
        ["model.name=relpos2d_swin_tiny"],
        ["model.name = 'relpos2d_swin_tiny'", "relpos2d_swin_tiny_patch4_window7_224"]),
    "unknown argument of a model": (["model.embed_dims=32"], ["model.embed_dims = 32", "did you mean model.embed_dim?"]),
    "type of a model's argument": (["model.depths=two"], ["model.depths = 'two': should be a valid array"]),
    "unknown optimizer": (["optimizer.name=adamm"], ["optimizer.name = 'adamm': unknown optimizer; did you mean adam"]),
    "unknown schedule": (["schedule.name=cosin"], ["schedule.name = 'cosin': must be 'cosine'; did you mean cosine?"]),
    "key of nothing": (["data.size.height=3"], ["data.size.height = 3: there is no size in data"]),
    "key below a value": (["trainer.max_steps.x=3"], ["trainer.max_steps.x = 3: trainer.max_steps is 1800, which has no keys"]),
    "no equals sign": (["encoding"], ["'encoding': an override is written key=value"]),
    "broken yaml": (["encoding=[table"], ["encoding = '[table': no readable YAML value"]),
    "given twice": (["seed=1", "seed=2"], ["seed: given twice"]),
    "warm-up too long": (["schedule.warmup_steps=5000"], ["schedule.warmup_steps = 5000: must be less than trainer.max_steps"]),
    "scene too small": (
        ["data={name: digit_scenes, canvas: [28, 28]}"],
        ["data: canvas = 28 x 28 is too small for num_digits = 4"]),
    "scene too tight": (
        ["data={name: digit_scenes, lattice: 4, reach: 15}"],
        ["data: reach = 15: must be at least 16, the first place beside a glyph"],
    ),
    "handover without a receiver": (
        ["handover={steps: 10}", "encoding=learned"],
        ["handover: there is no relative encoding that could take over; encoding is learned"]),
    "handover of given strengths": (
        ["handover={steps: 10}", "encoding={name: table, strength: 0.5}"], ["handover: there is no relative encoding"]),
    "handover to a wrong encoding": (["handover={steps: 9}", "encoding=tabl"], ["encoding = 'tabl'", "did you mean table?"]),
    "handover of one name twice": (
        ["handover={steps: 9}", "encoding=[{name: rope_axial, theta: 10}, {name: rope_axial, strength: 1.0}]"],
        ["handover: encoding rope_axial is there with and without a strength"]),
    "threshold without a use": (
        ["loss.target_threshold=0.1"], ["loss: target_threshold = 0.1: is for binary_cross_entropy, name is cross_entropy"]),
    "handover too long": (
        ["handover={steps: 1800}"], ["handover.start + handover.steps = 0 + 1800: must be less than trainer.max_steps = 1800"]),
    "shape of a handover": (["handover={steps: 9, shape: cosin}"], ["handover.shape = 'cosin'", "did you mean cosine?"]),
    "key of no handover": (["handover.steps=9"], ["handover.steps = 9: there is no handover in this config; give one first"]),
    "unknown handover": (["handover=linaer"], ["handover = 'linaer': unknown handover file; did you mean linear?"]),
    "parts of a batch": (["trainer.accumulate=5"], ["trainer: batch_size = 32: must be a multiple of accumulate = 5"]),
    "fp16 and fsdp2": (["trainer.mixed_precision=fp16", "trainer.parallel=fsdp2"], ["mixed_precision = 'fp16'", "use bf16"]),
    "odd parts to mix": (["loss=mixed", "trainer.batch_size=9"], ["loss.mixup, loss.cutmix: need batches of even size, this is 9"]),
    "smoothing": (["loss={smoothing: 1.0}"], ["loss.smoothing = 1.0: should be less than 1"]),
    "unknown loss": (["loss.name=crossentropy"], ["loss.name = 'crossentropy'", "did you mean cross_entropy?"]),
    "layer decay": (["optimizer.layer_decay=1.5"], ["optimizer.layer_decay = 1.5: should be less than or equal to 1"]),
    "a floor above the rate": (["optimizer.lr=1e-6"], ["schedule.min_lr = 1e-05: must be at most optimizer.lr = 1e-06"]),
    "a warm-up from above": (["schedule.warmup_lr=0.1"], ["schedule.warmup_lr = 0.1: must be at most optimizer.lr = 0.002"]),
    "second order": (["optimizer.name=adahessian"], ["optimizer.name = 'adahessian': unknown optimizer"]),
    "missing": (["data={name: image_folder}"], ["data.path: missing"]),
    "all at once": (
        ["optimizer.lrr=1", "encoding=tabl", "trainer.batch_size=0", "seed=-1"],
        ["4 problems", "optimizer.lrr", "did you mean table?", "trainer.batch_size = 0", "seed = -1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configs_say_key_value_and_nearest(case: str) -> None:
    overrides, texts = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        load_config("classify/digits", overrides)
    message = str(caught.value)
    assert all(text in message for text in texts), message
    if case != "all at once":
        assert message.startswith("config classify/digits: 1 problem\n"), message


def test_unknown_config_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown config; did you mean classify/digits\?"):
        load_config("classify/digit")


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    for text, message in (
        ("- a\n- b\n", "must hold `key: value` lines"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("a: [", "YAML"),
    ):
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(str(tmp_path / "wrong.yaml"))


def test_schema_follows_the_constructor() -> None:
    class Thing:
        def __init__(self, size: int, *, ratio: float = 0.5, module: type | None = None):
            pass

    parameters = {key: p for key, p in inspect.signature(Thing.__init__).parameters.items() if key != "self"}

    class Base(Node):
        name: str

    schema = node_from_parameters("thing", parameters, Base)
    assert list(schema.model_fields) == ["name", "size", "ratio"]
    node, problems = validate(schema, {"name": "thing", "size": 3})
    assert not problems
    assert node is not None
    assert node.given() == {"size": 3}
    assert validate(schema, {"name": "thing", "module": None, "ratio": "x"})[1] == [
        "size: missing; it has no default",
        "ratio = 'x': should be a valid number",
        "module = None: unknown key; Allowed here: name, ratio, size",
    ]
