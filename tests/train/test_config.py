"""Composing configs, and what is said about wrong ones."""

import inspect
from pathlib import Path

import pytest

from relpos2d.encodings import encoding_class
from train.config import (
    CONFIGS,
    GROUPS,
    TASKS,
    compose,
    encoding_argument,
    list_configs,
    load_config,
    may_load,
    resolved_yaml,
)
from train.data import DATA
from train.schema import ConfigError, Node, node_from_parameters, validate


@pytest.mark.parametrize("name", list_configs())
def test_every_config_validates_and_opens_with_four_lines(name: str) -> None:
    load_config(name)
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    assert all(line.startswith("# ") for line in lines[:4])
    assert not lines[4].startswith("#")
    assert f"# python -m train {name}" in lines[1]


NEEDED = {  # what a file of a group leaves to its user
    "data=coco": ["data.path=photos"],
    "model=mask_rcnn_swin_tiny": ["data.masks=true"],
    "data=hub": ["data.path=images"],
    "data=image_folder": ["data.path=images"],
    "data=timm": ["data.dataset=torch/cifar10", "data.root=images"],
    "data=text_folder": ["data.path=texts"],
    "data=text_jsonl": ["data.train=train.jsonl", "data.val=val.jsonl"],
    "data=text_hub": ["data.path=texts"],
    "data=speech_folder": ["data.path=recordings"],
    "data=speech_jsonl": ["data.train=train.jsonl", "data.val=val.jsonl"],
    "data=speech_hub": ["data.path=recordings"],
}
EXAMPLES = {  # a config of each task
    "classify": "classify/digits",
    "detect": "detect/digits",
    "text_classification": "text/news",
    "language_modeling": "text/verses",
    "sequence_to_sequence": "text/headlines",
    "speech_recognition": "speech/prompts",
}
TASK_OF = {
    "generation": "sequence_to_sequence",
    "decoding": "speech_recognition",
    "loss=ctc": "speech_recognition",
    "loss=detector": "detect",
}


def config_for(file: str) -> str:
    """A config that a file of a group can stand in."""
    group, name = file.split("=")
    node, _ = compose("classify/digits", [file])
    if group == "model":
        return next(
            (EXAMPLES[task] for task, kind in TASKS.items() if node["model"]["name"] in kind.models),
            EXAMPLES["classify"],
        )
    if group == "data":
        kinds = may_load(DATA[node["data"]["name"]])
        return next(EXAMPLES[task] for task, kind in TASKS.items() if kind.data in kinds)
    if task := TASK_OF.get(file, TASK_OF.get(group)):
        return EXAMPLES[task]
    axes = encoding_class(name).axes if group == "encoding" else None
    return EXAMPLES["classify" if axes is None or 2 in axes else "text_classification"]


@pytest.mark.parametrize("file", [f"{group}={name}" for group in GROUPS for name in list_configs(group)])
def test_every_group_file_validates(file: str) -> None:
    load_config(config_for(file), [file, *NEEDED.get(file, [])])


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
    written = {"pretrained": False, "absolute": None} if config.task == "classify" else {}
    assert again.model.given() == {**written, **config.model.given()}


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


WRONG_TEXT = {
    "data of texts for images": (
        "classify/digits", ["data=news"],
        ["data.name = 'news': does not go with this, task is classify; allowed: digit_scenes, digits, "]),
    "images for a text": (
        "text/news", ["data=digits"], ["data.name = 'digits'", "task is text_classification; allowed: news, order, "]),
    "running text to classify": ("text/news", ["data=verses"], ["data.name = 'verses'", "allowed: news, order, "]),
    "use of own text": (
        "text/news", ["data={name: text_jsonl, train: a, val: b, use: running}"],
        ["data.name = 'text_jsonl' with use = 'running': does not go with this"]),
    "a text model for images": (
        "classify/digits", ["model={name: language_model}"],
        ["model.name = 'language_model': task is classify, allowed: timm's backbones"]),
    "a backbone for text": (
        "text/news", ["model=swin_mini"], ["model.name = 'relpos2d_swin_tiny_patch4_window7_224'", "allowed: text_classifier"]),
    "another text model": ("text/news", ["model={name: language_model}"], ["allowed: text_classifier"]),
    "unknown argument of a text model": (
        "text/news", ["model.embed_dims=32"], ["model.embed_dims = 32: unknown key; did you mean model.embed_dim?"]),
    "what the data decide": ("text/news", ["model.vocab_size=32"], ["model.vocab_size = 32: unknown key"]),
    "an encoding of one axis": (
        "classify/digits", ["encoding=[table, t5]"], ["encoding.1.name = 't5': task is classify, on 2 axes: "]),
    "an option that one axis refuses": ("text/news", ["encoding={name: t5, num_buckets: 7}"], ["encoding: ", "num_buckets=7"]),
    "a scaling that the constructor refuses": (
        "text/code", ["encoding={name: rope, scaling: {kind: yarm, factor: 2.0}}"], ["encoding: ", "yarm"]),
    "a scaling that is no mapping": ("text/code", ["encoding={name: rope, scaling: 3}"], ["encoding.scaling = 3: "]),
    "mixup": ("text/news", ["loss.mixup=0.8"], ["loss.mixup = 0.8: is for images, task is text_classification; allowed: 0.0"]),
    "layer decay": ("text/news", ["optimizer.layer_decay=0.7"], ["optimizer.layer_decay = 0.7: is for images", "allowed: None"]),
    "stages": ("text/news", ["trainer.frozen_stages=1"], ["trainer.frozen_stages = 1: is for images", "allowed: 0"]),
    "binary": (
        "text/news", ["loss.name=binary_cross_entropy"],
        ["loss.name = 'binary_cross_entropy': task is text_", "allowed: 'cross_entropy'"]),
    "two at once": ("text/news", ["loss.mixup=0.8", "trainer.frozen_stages=1"], ["loss.mixup = 0.8", "trainer.frozen_stages = 1"]),
    "nothing to generate": ("text/news", ["generation={num_beams: 2}"], ["generation: is for sequence_to_sequence"]),
    "a penalty without beams": (
        "text/headlines", ["generation.length_penalty=2.0"],
        ["generation: length_penalty = 2.0: is for beam search, num_beams is 1"]),
    "shared out while generating": ("text/headlines", ["trainer.parallel=fsdp2"], ["trainer.parallel = 'fsdp2'", "allowed: 'ddp'"]),
    "a loss of another task": (
        "speech/prompts", ["loss=cross_entropy"], ["loss.name = 'cross_entropy': task is speech_recognition; allowed: 'ctc'"]),
    "ctc for images": (
        "classify/digits", ["loss=ctc"],
        ["loss.name = 'ctc': task is classify; allowed: 'cross_entropy', 'binary_cross_entropy'"]),
    "smoothed transcripts": ("speech/prompts", ["loss.smoothing=0.1"], ["loss.smoothing = 0.1: is for classes and tokens"]),
    "a share without a layer": (
        "speech/prompts", ["loss.intermediate_ctc=0.3", "model={name: conformer_ctc}"],
        ["loss.intermediate_ctc = 0.3: model.intermediate_layers names no layer"]),
    "batches of seconds for text": (
        "text/news", ["trainer.batch_seconds=60.0"], ["trainer.batch_seconds: is for speech_recognition, task is text_"]),
    "decoding of text": ("text/news", ["decoding=beam"], ["decoding: is for speech_recognition, task is text_classification"]),
    "beams for greedy": (
        "speech/prompts", ["decoding.beam_size=4"], ["decoding: beam_size: is for name = 'beam', name is 'greedy'"]),
    "a weight without a language model": (
        "speech/prompts", ["decoding={name: beam, lm_weight: 2.0}"],
        ["decoding: lm_weight = 2.0: is for a language model, lm is not given"]),
    "recordings for text": ("text/news", ["data=prompts"], ["data.name = 'prompts': does not go with this"]),
    "unknown task": ("text/news", ["task=language_modelling"], ["task = 'language_modelling'", "did you mean language_modeling?"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TEXT)
def test_what_does_not_go_with_the_task_is_refused(case: str) -> None:
    name, overrides, texts = WRONG_TEXT[case]
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides)
    message = str(caught.value)
    assert all(text in message for text in texts), message
    assert message.startswith(f"config {name}: 1 problem\n"), message


def test_a_mapping_goes_to_the_constructor_and_comes_back(tmp_path: Path) -> None:
    options = [
        "encoding={name: rope, scaling: {kind: yarn, factor: 4.0, original_length: 256}}",
        "encoding.scaling.factor=8.0",
    ]
    config = load_config("text/code", options)
    assert encoding_argument(config) == {
        "name": "rope",
        "scaling": {"kind": "yarn", "factor": 8.0, "original_length": 256},
    }
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    again = load_config(str(tmp_path / "config.yaml"))
    assert encoding_argument(again)["scaling"] == encoding_argument(config)["scaling"]


def test_the_length_of_a_text_model_is_its_data_s_unless_given() -> None:
    assert "max_length" not in load_config("text/news").model.given()
    assert load_config("text/news", ["model.max_length=300"]).model.given()["max_length"] == 300


def test_a_config_of_images_says_nothing_of_generation() -> None:
    """As before there was any: a run that was begun then goes on."""
    assert "generation" not in resolved_yaml(load_config("classify/digits"))
    beams = load_config("text/headlines", ["generation.num_beams=4"])
    assert "num_beams: 4" in resolved_yaml(beams)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("text/headlines", "generation={num_beams: 1}"),
        ("speech/prompts", "decoding=greedy"),
        ("speech/prompts", "decoding={name: beam, beam_size: 4}"),
        ("speech/prompts", "decoding={name: beam, lexicon: train, word_score: -1.0}"),
    ],
)
def test_only_what_is_given_of_how_a_model_writes_is_kept(name: str, options: str, tmp_path: Path) -> None:
    """A default may be refused where the option it belongs to is not used."""
    config = load_config(name, [options])
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    again = load_config(str(tmp_path / "config.yaml"))
    assert again.model_dump(serialize_as_any=True) == config.model_dump(serialize_as_any=True)


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
