"""From `classify/digits encoding=rope_mixed optimizer.lr=3e-4` to one checked, typed config.

A config is a list of assignments, in a file and then on the command line: `group: name` puts in the file configs/group/name.yaml
(replacing the node, never merging into it), `group: {...}` or a list replaces it too, and `group.key: value` sets one key.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import timm
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    create_model,
    field_validator,
    model_validator,
)
from timm.models import is_model, list_models
from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers

import relpos2d
from relpos2d import Grid, create_encoding, list_encodings
from relpos2d.encodings import encoding_class, encoding_options
from relpos2d.models import ConformerCTC, EncoderDecoder, LanguageModel, TextClassifier
from relpos2d.models.detection import DETECTORS, OPTIONS_OF, create_detector
from train.data import DATA, Data, Images
from train.data.boxes import Boxed
from train.data.recordings import Recordings
from train.data.texts import Labelled, Pairs, Running
from train.schema import AnyNode, ConfigError, Node, node_from_parameters, unknown_name, validate

CONFIGS = Path(__file__).parent.parent / "configs"
GROUPS = (
    *("model", "encoding", "data", "loss", "optimizer", "schedule", "handover"),
    *("generation", "decoding", "scoring", "trainer"),
)

TaskName = Literal[
    "classify", "detect", "text_classification", "language_modeling", "sequence_to_sequence", "speech_recognition"
]
GRIDS = {1: Grid(15), 2: Grid(3, 5)}


@dataclass(frozen=True)
class TaskKind:
    """What a task works on. `models`: of our own, none for any timm backbone; `data`: what the data's load() gives."""

    models: tuple[str, ...]
    data: type
    num_axes: int


TASKS: dict[TaskName, TaskKind] = {
    "classify": TaskKind((), Images, num_axes=2),
    "detect": TaskKind(DETECTORS, Boxed, num_axes=2),
    "text_classification": TaskKind(("text_classifier",), Labelled, num_axes=1),
    "language_modeling": TaskKind(("language_model",), Running, num_axes=1),
    "sequence_to_sequence": TaskKind(("encoder_decoder",), Pairs, num_axes=1),
    "speech_recognition": TaskKind(("conformer_ctc",), Recordings, num_axes=1),
}
LOSSES: dict[TaskName, tuple[str, ...]] = {  # of the other tasks: cross_entropy
    "classify": ("cross_entropy", "binary_cross_entropy"),
    "detect": ("detector",),
    "speech_recognition": ("ctc",),
}
USES = {"labels": Labelled, "running": Running, "pairs": Pairs}
OWN_MODELS: dict[str, Callable[..., Any]] = {
    "text_classifier": TextClassifier,
    "language_model": LanguageModel,
    "encoder_decoder": EncoderDecoder,
    "conformer_ctc": ConformerCTC,
    **{name: functools.partial(create_detector, name) for name in DETECTORS},
}


class Model(Node):
    """A model by name; further keys are its constructor's, but for what follows from the data."""

    name: str


class Backbone(Model):
    """A timm backbone. Image size, channels and classes come from the data."""

    pretrained: bool = False
    absolute: Literal["keep", "fade", "remove"] | None = None


class DetectorModel(Model):
    """One of torchvision's detectors; `backbone` is a timm model, by name or with options of its constructor."""

    backbone: str | dict[str, Any]

    @field_validator("backbone")
    @classmethod
    def backbone_is_known(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        tree = {"name": value} if isinstance(value, str) else value
        name = tree.get("name")
        try:
            if name in OWN_MODELS:
                raise ValueError(name)
            schema = model_node(name)  # type: ignore[arg-type]
        except (ValueError, AttributeError):
            raise ValueError(
                f"{name!r}: unknown backbone; allowed: timm's and {', '.join(list_models('relpos2d_*'))}"
            ) from None
        img_size = tree.get("img_size", 224)  # of pretraining, which cuts windows to it
        _, problems = validate(schema, {key: given for key, given in tree.items() if key != "img_size"})
        sides = img_size if isinstance(img_size, list) and len(img_size) == 2 else [img_size]
        if not all(isinstance(side, int) and side > 0 for side in sides):
            problems.append(f"img_size = {img_size!r}: must be pixels of a side, or height and width")
        if "absolute" in tree:
            problems.append("absolute: is the detector's, model.absolute")
        if problems:
            raise ValueError(f"{name}: {'; '.join(problems)}")
        return value


class Encoding(Node):
    """A position encoding by name; further keys are the arguments of its constructor, which is asked whether it takes them."""

    name: str

    @model_validator(mode="after")
    def constructor_agrees(self) -> "Encoding":
        axes = encoding_class(self.name).axes
        allowed = [number for number in (2, 1) if axes is None or number in axes]
        refusals = []
        for number in allowed:  # which of them is wanted, the task knows
            try:
                self.make(number)
                return self
            except ValueError as error:
                refusals.append(error)
        raise refusals[0]

    def make(self, num_axes: int) -> relpos2d.Encoding:
        """The encoding in a small size.

        Raises:
            ValueError: what its constructor says.
        """
        spec = {"name": self.name, **self.given()}
        return create_encoding(spec, num_heads=2, head_dim=32, positions=GRIDS[num_axes])


class Loss(Node):
    """What is minimised, with label smoothing; for images also timm's Mixup and CutMix.

    `mixup` and `cutmix` are the alphas of their beta distributions (0: off); a batch or an example (`mix_mode`) is mixed with
    probability `mix_prob`, by CutMix with probability `switch_prob` where both are on. The partner is looked for in the part of
    the batch that a process works on at once. With `target_threshold`, binary cross entropy takes every class with a share
    above it as present (0: both of a mixed image, as DeiT III has it). `ctc` is for speech: the layers of model.intermediate_layers
    have a share of `intermediate_ctc` in it (0.3 unless given). `detector` is the sum of the losses that a detector has.
    """

    name: Literal["cross_entropy", "binary_cross_entropy", "ctc", "detector"] = "cross_entropy"
    smoothing: float = Field(0.0, ge=0, lt=1)
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    mix_prob: float = Field(1.0, ge=0, le=1)
    switch_prob: float = Field(0.5, ge=0, le=1)
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    target_threshold: float | None = Field(None, ge=0, lt=1)
    intermediate_ctc: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def threshold_has_a_use(self) -> "Loss":
        if self.target_threshold is not None and self.name != "binary_cross_entropy":
            raise ValueError(
                f"target_threshold = {self.target_threshold}: is for binary_cross_entropy, name is {self.name}"
            )
        return self

    @property
    def mixes(self) -> bool:
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


class Optimizer(Node):
    """One of timm's optimizers by name; further keys are its constructor's. Biases, norms and positions never decay.

    With `layer_decay` a layer learns at the rate of the next one times this factor, but at least at `layer_decay_min_scale`.
    The parameters of encodings learn `position_lr_scale` times as fast as the others: a bias has to grow to several units before
    attention follows it, where a weight of a projection hardly moves.
    """

    name: str
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    layer_decay: float | None = Field(None, gt=0, le=1)
    layer_decay_min_scale: float = Field(0.0, ge=0, le=1)
    position_lr_scale: PositiveFloat = 1.0


class Schedule(Node):
    """The learning rate by step: linear warm-up from `warmup_lr`, then down to `min_lr` at the last step."""

    name: Literal["cosine"]
    warmup_steps: NonNegativeInt = 0
    warmup_lr: NonNegativeFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0


class Handover(Node):
    """From absolute to relative positions during training: over `steps` steps, after `start` steps without any change, the
    strength of the relative encodings goes from 0 to 1 and that of the absolute ones from 1 to 0.

    Encodings whose config gives a `strength` keep it. A backbone's own position embedding fades too, unless model.absolute says
    otherwise.
    """

    steps: PositiveInt
    shape: Literal["linear", "cosine"] = "linear"
    start: NonNegativeInt = 0

    def strength(self, step: int) -> float:
        """The strength of the relative encodings in the step that comes after `step` steps; 0 in the first."""
        done = min(max((step - self.start) / self.steps, 0.0), 1.0)
        return done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2


class Generation(Node):
    """How an encoder-decoder writes what is evaluated: the likeliest token each time, or beam search with `num_beams`."""

    num_beams: PositiveInt = 1
    length_penalty: float = 1.0

    @model_validator(mode="after")
    def penalty_has_a_use(self) -> "Generation":
        if self.num_beams == 1 and "length_penalty" in self.given():
            raise ValueError(f"length_penalty = {self.length_penalty}: is for beam search, num_beams is 1")
        return self


class Decoding(Node):
    """How a recogniser of speech turns frames into text: the likeliest token of each frame, or beam search over texts.

    Beam search keeps `beam_size` texts, none of which is more than `beam_threshold` less likely (in nats) than the best. `lexicon`
    allows the words of the training texts ("train") or of a file, one a line, alone. `lm` is a KenLM file; its logarithms count
    `lm_weight` times, each word adds `word_score`.
    """

    name: Literal["greedy", "beam"] = "greedy"
    beam_size: PositiveInt = 16
    beam_threshold: PositiveFloat = 50.0
    lexicon: str | None = None
    lm: str | None = None
    lm_weight: float = 1.0
    word_score: float = 0.0

    @model_validator(mode="after")
    def options_have_a_use(self) -> "Decoding":
        if self.name == "greedy" and self.given():
            raise ValueError(f"{', '.join(sorted(self.given()))}: is for name = 'beam', name is 'greedy'")
        if self.lm is None and "lm_weight" in self.given():
            raise ValueError(f"lm_weight = {self.lm_weight}: is for a language model, lm is not given")
        if self.lexicon is None and "word_score" in self.given():
            raise ValueError(f"word_score = {self.word_score}: is for a lexicon, lexicon is not given")
        return self


class Scoring(Node):
    """How detections are scored: by which package, which of them all give the same numbers (`numpy` has no masks), and by how many
    detections in an image, the last of which is for the average precision."""

    backend: Literal["pycocotools", "faster_coco_eval", "numpy"] = "pycocotools"
    max_detections: tuple[PositiveInt, PositiveInt, PositiveInt] = (1, 10, 100)


class Trainer(Node):
    """How long, in which batches and where to train, and how often to log, evaluate and save (in steps).

    `batch_size` counts the whole batch of a step: all processes, all of the `accumulate` parts whose gradients are summed. With
    `batch_seconds` a batch holds recordings of about equal length that last so long together, with their padding (as they were
    recorded: at a lower speed they last longer), and `batch_size` of them at most. In detection a batch has images of about the
    same height / width, before they are augmented, of which there are `aspect_groups` an octave (3 unless given; 0: any).
    `trainable: positions` trains the encodings alone; `frozen_stages` keeps the stem and so many stages (Swin) or blocks (ViT; of a
    detector: stages, which end with a global block) as they are, all of a ViT's with its last norm. `ema_decay` keeps an average of
    the weights (timm's, with its warm-up), which is then what is evaluated. A step whose loss or gradient is not finite is left out
    and counted; after more than `max_skipped_steps` of them in a row the run stops. `num_threads` of the CPU work on one operation;
    left open, torch takes all cores, which small models on a busy machine pay for by a factor of ten. `parallel` is for several
    processes: copies of the model (ddp) or one that is shared out (fsdp2); on one process both are the plain model. `allow_changes`
    continues a run with a config that differs from the one it was started with.
    """

    max_steps: PositiveInt
    batch_size: PositiveInt
    batch_seconds: PositiveFloat | None = None
    aspect_groups: NonNegativeInt | None = None
    accumulate: PositiveInt = 1
    trainable: Literal["all", "positions"] = "all"
    frozen_stages: NonNegativeInt = 0
    ema_decay: float | None = Field(None, gt=0, lt=1)
    clip_grad_norm: PositiveFloat | None = 1.0
    max_skipped_steps: NonNegativeInt = 10
    log_every: PositiveInt = 10
    eval_every: PositiveInt = 200
    save_every: PositiveInt = 200
    keep_checkpoints: PositiveInt = 2
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    compile: bool = False
    device: Literal["auto", "cpu"] = "auto"
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    num_workers: NonNegativeInt = 0
    num_threads: PositiveInt | None = None
    overwrite: bool = False
    allow_changes: bool = False

    @model_validator(mode="after")
    def options_go_together(self) -> "Trainer":
        if self.batch_seconds is None and self.batch_size % self.accumulate:
            raise ValueError(f"batch_size = {self.batch_size}: must be a multiple of accumulate = {self.accumulate}")
        if self.parallel == "fsdp2" and self.mixed_precision == "fp16":
            raise ValueError("mixed_precision = 'fp16': its loss scaling is not made for parallel = 'fsdp2'; use bf16")
        return self


class Config(Node):
    """A whole run."""

    task: TaskName
    seed: int = Field(0, ge=0, lt=2**31)
    output: str | None = None
    model: Model
    encoding: Encoding | tuple[Encoding, ...]
    data: Data
    loss: Loss = Loss.model_validate({})
    optimizer: Optimizer
    schedule: Schedule
    handover: Handover | None = None
    generation: Generation | None = None
    decoding: Decoding | None = None
    scoring: Scoring | None = None
    trainer: Trainer

    @model_validator(mode="after")
    def parts_fit_the_task(self) -> "Config":
        if misfits := list(self.misfits()):
            raise ValueError("; ".join(misfits))
        return self

    def misfits(self) -> Iterator[str]:
        """What does not go with the task. What has a wrong name has a line already."""
        kind, task = TASKS[self.task], f"task is {self.task}"
        names = kind.models or OWN_MODELS
        if isinstance(self.model, Model) and (self.model.name in names) is not bool(kind.models):
            allowed = ", ".join(kind.models) or "timm's backbones and relpos2d's (relpos2d_...)"
            yield f"model.name = {self.model.name!r}: {task}, allowed: {allowed}"
        if isinstance(self.data, Data) and not gives(self.data, kind.data):
            allowed = ", ".join(sorted(name for name, data in DATA.items() if kind.data in may_load(data)))
            use = getattr(self.data, "use", None)
            used = f" with use = {use!r}" if use else ""
            yield f"data.name = {self.data.name!r}{used}: does not go with this, {task}; allowed: {allowed}"
        for number, encoding in enumerate(self.encodings):
            if isinstance(encoding, Encoding):
                where = f"encoding.{number}" if isinstance(self.encoding, tuple) else "encoding"
                try:
                    encoding.make(kind.num_axes)
                except ValueError as error:
                    yield f"{where}.name = {encoding.name!r}: {task}, on {kind.num_axes} axes: {error}"
        if self.task != "sequence_to_sequence" and self.generation is not None:
            yield f"generation: is for sequence_to_sequence, {task}; allowed: none"
        yield from self.options_of_speech(task)
        yield from self.options_of_detection(task)
        if self.task == "sequence_to_sequence" and self.trainer.parallel == "fsdp2":
            yield "trainer.parallel = 'fsdp2': texts of different lengths are generated, which it cannot; allowed: 'ddp'"
        if kind.models:
            yield from self.options_of_images(task)

    def options_of_speech(self, task: str) -> Iterator[str]:
        is_speech = self.task == "speech_recognition"
        if self.loss.name not in (names := LOSSES.get(self.task, ("cross_entropy",))):
            yield f"loss.name = {self.loss.name!r}: {task}; allowed: {', '.join(map(repr, names))}"
        if is_speech and self.loss.smoothing:
            yield f"loss.smoothing = {self.loss.smoothing}: is for classes and tokens, {task}; allowed: 0.0"
        if is_speech and self.loss.intermediate_ctc and not getattr(self.model, "intermediate_layers", None):
            yield f"loss.intermediate_ctc = {self.loss.intermediate_ctc}: model.intermediate_layers names no layer"
        options = (
            ("decoding", self.decoding),
            ("trainer.batch_seconds", self.trainer.batch_seconds),
            ("loss.intermediate_ctc", self.loss.intermediate_ctc),
        )
        for path, value in options:
            if not is_speech and value is not None:
                yield f"{path}: is for speech_recognition, {task}; allowed: none"

    def options_of_detection(self, task: str) -> Iterator[str]:
        for path, value in (("scoring", self.scoring), ("trainer.aspect_groups", self.trainer.aspect_groups)):
            if self.task != "detect" and value is not None:
                yield f"{path}: is for detect, {task}; allowed: none"
        if self.task != "detect":
            return
        if self.loss.smoothing:
            yield f"loss.smoothing = {self.loss.smoothing}: is for classes and tokens, {task}; allowed: 0.0"
        if self.trainer.compile:
            yield f"trainer.compile = true: batches are of many sizes, {task}; allowed: false"
        wants_masks = self.model.name == "mask_rcnn"
        if isinstance(self.data, Data) and getattr(self.data, "masks", wants_masks) != wants_masks:
            yield f"data.masks = {not wants_masks}: model.name is {self.model.name!r}; allowed: {wants_masks}"
        if wants_masks and self.scoring is not None and self.scoring.backend == "numpy":
            yield "scoring.backend = 'numpy': has no masks, model.name is 'mask_rcnn'; allowed: pycocotools, faster_coco_eval"

    def options_of_images(self, task: str) -> Iterator[str]:
        options: list[tuple[str, Any, Any]] = [
            ("loss.mixup", self.loss.mixup, 0.0),
            ("loss.cutmix", self.loss.cutmix, 0.0),
        ]
        if self.task != "detect":
            options += [
                ("trainer.frozen_stages", self.trainer.frozen_stages, 0),
                ("optimizer.layer_decay", self.optimizer.layer_decay, None),
            ]
        for path, value, allowed in options:
            if value != allowed:
                yield f"{path} = {value!r}: is for images, {task}; allowed: {allowed!r}"

    @model_validator(mode="after")
    def changes_end_before_training(self) -> "Config":
        last = self.trainer.max_steps
        if self.schedule.warmup_steps >= last:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps}: must be less than trainer.max_steps = {last}"
            )
        rates = [("min_lr", self.schedule.min_lr)]
        rates += [("warmup_lr", self.schedule.warmup_lr)] if self.schedule.warmup_steps else []
        for key, rate in rates:
            if rate > self.optimizer.lr:
                raise ValueError(f"schedule.{key} = {rate}: must be at most optimizer.lr = {self.optimizer.lr}")
        if self.handover and self.handover.start + self.handover.steps >= last:
            raise ValueError(
                f"handover.start + handover.steps = {self.handover.start} + {self.handover.steps}: "
                f"must be less than trainer.max_steps = {last}"
            )
        return self

    @model_validator(mode="after")
    def handover_has_a_receiver(self) -> "Config":
        if self.handover is None or None in self.encodings:  # a wrong encoding has a line already
            return self
        moving = {encoding.name for encoding in self.moving()}
        if not moving:
            raise ValueError(
                f"handover: there is no relative encoding that could take over; encoding is "
                f"{', '.join(encoding.name for encoding in self.encodings)} "
                f"(one whose strength is given keeps it)"
            )
        if twice := moving & {encoding.name for encoding in self.encodings if "strength" in encoding.given()}:
            raise ValueError(
                f"handover: encoding {', '.join(sorted(twice))} is there with and without a strength; they are told apart by name"
            )
        return self

    @model_validator(mode="after")
    def batches_can_be_mixed(self) -> "Config":
        part = self.trainer.batch_size // self.trainer.accumulate
        if self.loss.mixes and part % 2:
            raise ValueError(f"loss.mixup, loss.cutmix: need batches of even size, this is {part}")
        return self

    def moving(self) -> tuple[Encoding, ...]:
        """The relative encodings that a handover moves."""
        family = {entry.name: entry.family for entry in list_encodings()}
        return tuple(
            e for e in self.encodings if family[e.name] not in ("absolute", "none") and "strength" not in e.given()
        )

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        return self.encoding if isinstance(self.encoding, tuple) else (self.encoding,)


def may_load(data: type[Data]) -> tuple[type, ...]:
    """What the data of a class can give: images, labelled or running text, pairs of texts, or recordings."""
    given = inspect.signature(data.load, eval_str=True).return_annotation
    return get_args(given) or (given,)


def gives(data: Data, wanted: type) -> bool:
    """Whether these data give what is wanted; own text says by `use` as what it is meant, and data that do not say may try."""
    kinds = may_load(type(data))
    return kinds == (Any,) or (kinds[0] if len(kinds) == 1 else USES[data.use]) is wanted  # type: ignore[attr-defined]


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Composes and checks a config.

    Args:
        name: a file in configs/ without .yaml (`classify/digits`), or the path of a .yaml file of one's own.
        overrides: `key=value`, applied after the file.

    Raises:
        ConfigError: with every problem that was found, not only the first.
    """
    tree, problems = compose(name, overrides)
    schema, more = schema_for(tree, problems)
    config, wrong = validate(schema, tree)
    if problems or more or wrong or config is None:
        raise ConfigError(name, [*problems, *more, *wrong])
    return config


def compose(name: str, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The plain tree of a config, and the problems met on the way. Wrong groups are left out of the tree."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(name, [unknown_name("config", name, list_configs())])
    problems: list[str] = []
    tree: dict[str, Any] = {}
    for assignments in (read_yaml(path, problems), parse_overrides(overrides, problems)):
        # whole nodes first: `optimizer.lr=1 optimizer=adamw` keeps the learning rate
        for key, value in sorted(assignments.items(), key=lambda item: "." in item[0]):
            assign(tree, key, value, problems)
    try:
        tree = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        problems.append(str(error).splitlines()[0])
    return tree, problems


def list_configs(folder: str = "") -> list[str]:
    """Names of the runnable configs, or of the files of one group."""
    found = (path.relative_to(CONFIGS / folder) for path in (CONFIGS / folder).rglob("*.yaml"))
    return sorted(p.with_suffix("").as_posix() for p in found if folder or p.parts[0] not in GROUPS)


def read_yaml(path: Path, problems: list[str]) -> dict[str, Any]:
    """The mapping in a YAML file. OmegaConf's reader takes 3e-4 as a number and refuses a key that stands there twice."""
    try:
        loaded = OmegaConf.load(path)
        if OmegaConf.is_dict(loaded):
            return {str(key): value for key, value in OmegaConf.to_container(loaded).items()}  # type: ignore[union-attr]
        problems.append(f"{path.name}: must hold `key: value` lines")
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        problems.append(f"{path.name}: no readable YAML: {' '.join(str(error).split())}")
    return {}


def parse_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            problems.append(f"{override!r}: an override is written key=value, for example optimizer.lr=3e-4")
            continue
        if key in parsed:
            problems.append(f"{key}: given twice on the command line")
        try:
            parsed[key] = OmegaConf.to_container(OmegaConf.create(f"value: {value}"))["value"]  # type: ignore[index, call-overload]
        except (yaml.YAMLError, OmegaConfBaseException):
            problems.append(f"{key} = {value!r}: no readable YAML value")
    return parsed


def assign(tree: dict[str, Any], key: str, value: Any, problems: list[str]) -> None:
    """Replaces one node or sets one key of the tree."""
    parent, _, leaf = key.rpartition(".")
    if not parent:
        node = load_node(key, value, problems)
        tree.pop(key, None)
        if node is not None or key not in GROUPS:
            tree[key] = node
        return
    node: Any = tree  # type: ignore[no-redef]
    for part in parent.split("."):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        elif node is tree and part not in GROUPS:
            problems.append(unknown_name("group", part, GROUPS, where=key))
            return
        elif node is tree and Config.model_fields[part].is_required():
            return  # the group is missing, which is said once
        elif node is tree and part == "handover":
            problems.append(f"{key} = {value!r}: there is no handover in this config; give one first: handover=linear")
            return
        elif node is tree:
            node = tree[part] = {}
        else:
            problems.append(f"{key} = {value!r}: there is no {part} in {parent}")
            return
    if isinstance(node, dict):
        node[leaf] = value
    else:
        problems.append(f"{key} = {value!r}: {parent} is {node!r}, which has no keys")


def load_node(group: str, value: Any, problems: list[str]) -> Any:
    """What stands for a group: a name is replaced by its file, in a list too; None if there is no such file."""
    if group not in GROUPS or value is None:
        return value
    if isinstance(value, list):
        members = [load_node(group, member, problems) for member in value]
        return [member for member in members if member is not None] or None
    if isinstance(value, Mapping):
        return dict(value)
    path = CONFIGS / group / f"{value}.yaml"
    if isinstance(value, str) and path.is_file():
        return read_yaml(path, problems)
    problems.append(unknown_name(f"{group} file", value, list_configs(group), where=group))
    return None


def schema_for(tree: dict[str, Any], told: Iterable[str] = ()) -> tuple[type[Config], list[str]]:
    """The schema of exactly this tree: each node's keys follow from its name. Wrong names come back as problems."""
    problems: list[str] = []

    def node(group: str, value: Any, where: str) -> type[Node]:
        base, names, make = NODES[group]
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            return base  # whose check says that the name is missing
        try:
            return make(name)
        except (ValueError, KeyError):
            problems.append(unknown_name(group, name, names(), where=f"{where}.name"))
            return AnyNode

    fields: dict[str, Any] = {}
    for group in NODES:
        value = tree.get(group)
        if group == "encoding" and isinstance(value, list):
            members = tuple(node(group, member, f"{group}.{i}") for i, member in enumerate(value))
            fields[group] = (tuple[members], ...)  # type: ignore[valid-type]
        elif value is not None:
            fields[group] = (node(group, value, group), ...)
        elif any(problem.startswith(f"{group} =") for problem in told):
            fields[group] = (Any, None)  # its wrong name has a line already
    return create_model("Config", __base__=Config, **fields), problems


@functools.cache
def model_node(name: str) -> type[Model]:
    """Keys from the class that timm builds under this name (built without memory, to see which class it is)."""
    import torch

    if name in OWN_MODELS:
        return own_model_node(name)
    source = name.removeprefix("relpos2d_")
    if not is_model(name) or not is_model(source):
        raise ValueError(name)
    with torch.device("meta"):
        model = timm.create_model(source)
    parameters = inspect.signature(type(model).__init__).parameters
    optional = {key: p.replace(default=None) for key, p in parameters.items() if key != "self"}
    return node_from_parameters(name, optional, Backbone, leave_out=("img_size", "in_chans", "num_classes"))


def own_model_node(name: str) -> type[Model]:
    """Keys from the constructor of one of our own models, but for what the data say and what the model has no use for."""
    parameters = inspect.signature(OWN_MODELS[name], eval_str=True).parameters
    of_data = ("vocab_size", "num_classes", "sample_rate", "encoding", "padding_id", "mean", "std", "device", "dtype")
    of_others = (option for option, names in OPTIONS_OF.items() if name not in names)
    base = DetectorModel if name in DETECTORS else Model
    return node_from_parameters(name, parameters, base, leave_out=(*of_data, *of_others))


@functools.cache
def encoding_node(name: str) -> type[Encoding]:
    return node_from_parameters(name, encoding_options(encoding_class(name)), Encoding)


def optimizer_names() -> list[str]:
    return [str(name) for name in list_optimizers() if not get_optimizer_info(str(name)).second_order]


@functools.cache
def optimizer_node(name: str) -> type[Optimizer]:
    if get_optimizer_info(name).second_order:
        raise ValueError(name)  # its backward pass is one of a kind
    return node_from_parameters(
        name, inspect.signature(get_optimizer_class(name, bind_defaults=False)).parameters, Optimizer
    )


NODES: dict[str, tuple[type[Node], Callable[[], list[str]], Callable[[str], type[Node]]]] = {
    # group -> its fields under any name, the names there are, the node of a name
    "model": (Model, lambda: [*list_models("relpos2d_*"), *OWN_MODELS], model_node),
    "encoding": (Encoding, lambda: [encoding.name for encoding in list_encodings()], encoding_node),
    "data": (Data, lambda: list(DATA), DATA.__getitem__),
    "optimizer": (Optimizer, optimizer_names, optimizer_node),
}


def resolved_yaml(config: Config) -> str:
    """The config as YAML, complete: reading it gives the same run."""
    tree = config.model_dump(mode="json", serialize_as_any=True)
    # what a model's config leaves open is decided by timm under that name, and not by None
    always = (Backbone if isinstance(config.model, Backbone) else Model).model_fields
    tree["model"] = {key: value for key, value in tree["model"].items() if key in always or key in config.model.given()}
    # a default that was not given may be none that goes with the others
    for group in ("generation", "decoding", "scoring"):
        node = getattr(config, group)
        del tree[group]
        if node is not None:
            tree[group] = node.model_dump(include=node.model_fields_set)
    # a strength that is not given is the handover's
    members = tree["encoding"] if isinstance(tree["encoding"], list) else [tree["encoding"]]
    for encoding, member in zip(config.encodings, members, strict=True):
        if "strength" not in encoding.given():
            member.pop("strength", None)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def encoding_argument(config: Config) -> Any:
    """What a model's `encoding` takes: a dict, or a list of dicts for a sum."""

    def plain(encoding: Encoding) -> dict[str, Any]:
        return {"name": encoding.name, **encoding.given()}

    return plain(config.encoding) if isinstance(config.encoding, Encoding) else [plain(e) for e in config.encoding]


def default_output(name: str, config: Config) -> str:
    """runs/<config>-<encoding>-<seed>: `runs/classify/digits-table-0`."""
    encoding = "+".join(encoding.name for encoding in config.encodings)
    return os.path.join(
        "runs", f"{Path(name).with_suffix('') if name.endswith('.yaml') else name}-{encoding}-{config.seed}"
    )
