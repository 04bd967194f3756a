"""`python -m train.evaluate CHECKPOINT [key=value ...]`: a trained model on other data, or at another size."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from relpos2d.backbones.resize import by, set_image_size
from train.checkpoint import replace_text
from train.config import TASKS, Config, Encoding, load_config
from train.data.description import Description, SpeechDescription, check_same_tokenizer
from train.data.images import Example, Images
from train.data.recordings import UNUSABLE
from train.data.texts import LabelledTexts, PairRows, PairTexts, Rows
from train.loop import create_accelerator
from train.restore import Restored, find_checkpoint, restore, without_pretrained
from train.run_folder import CONFIG, METRICS, records_text
from train.schema import nearest
from train.tasks import create_task
from train.tool import check_free, create_parser, parse_size, run_command, run_tool, written_aside

SIZE_KEYS = ("image_size", "canvas")  # of data that come in any size
FOR_TASKS = {
    "image_size": ("classify",),
    "permute_tokens": ("classify",),
    "length": ("text_classification", "language_modeling"),
}
OWN_KEYS = ("image_size", "permute_tokens", "length", "output")
MODEL_KEYS = tuple(  # of detectors, which make no other weights
    f"model.{key}" for key in ("min_size", "max_size", "score_threshold", "nms_threshold", "detections_per_image")
)
TRAINER_KEYS = tuple(
    f"trainer.{key}" for key in ("batch_size", "num_workers", "num_threads", "device", "mixed_precision")
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = create_parser(
        "evaluate",
        "Measures a trained model on a test split, and writes nothing unless told to. The run's own config holds; "
        "key=value changes it as in training, except for what would be another model.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="data=image_folder data.path=FOLDER, image_size=48 or 48x64 (what each encoding makes of it is told), "
        "encoding.resize=clamp, decoding=beam, trainer.batch_size=8; permute_tokens=true shuffles the patches of each image, a "
        "control; length=2048 reads texts so many tokens at once; output=FOLDER writes metrics.json and the records",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return run_tool(evaluate, parser.parse_intermixed_args(arguments))


def evaluate(given: argparse.Namespace) -> int:
    overrides, own = take_own(given.overrides)
    permuted = own.get("permute_tokens", "false")
    if permuted not in ("true", "false"):
        raise ValueError(f"permute_tokens = {permuted!r}: must be true or false")
    output = Path(own["output"]) if "output" in own else None
    if output is not None:
        check_free(output, "name another output")

    folder, found = find_checkpoint(Path(given.checkpoint))
    config = changed_config(folder / CONFIG, overrides, own)
    restored = restore(found, given.weights, config)
    accelerator = create_accelerator(config)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)

    with accelerator.local_main_process_first():  # which may have to fetch the data
        task = create_task(without_pretrained(config))
    seen = adapt(task, restored, own)
    metrics, records = task.evaluate(restored.model.to(accelerator.device), accelerator)

    if accelerator.is_main_process:
        about = {
            "checkpoint": str(restored.checkpoint),
            "weights": restored.weights,
            "data": config.data.name,
            **seen,
        }
        if output is not None:
            with written_aside(output) as aside:
                aside.mkdir()
                replace_text(aside / task.records_name, records_text(task.records_name, records))
                replace_text(aside / METRICS, json.dumps({**metrics, **about}, indent=2) + "\n")
        print(json.dumps({**metrics, **about}) if given.json else as_text(metrics, about))
    accelerator.end_training()
    return 0


def adapt(task: Any, restored: Restored, own: Mapping[str, str]) -> dict[str, Any]:
    """Lets a task see its data as the model was trained to; returns what is to be told of it."""
    if restored.config.task == "classify":
        return adapt_images(task, restored, own)
    if restored.config.task == "detect":
        return task.as_trained(restored.description)
    return adapt_texts(task, restored, own) if restored.is_text else adapt_recordings(task, restored)


def adapt_images(task: Any, restored: Restored, own: Mapping[str, str]) -> dict[str, Any]:
    """Lets a task see images as the model was trained to, at their size; returns what is to be told of it."""
    images = as_trained(task.images, restored.description)
    policy = set_image_size(restored.model, images.height, images.width)
    permuted = own.get("permute_tokens") == "true"
    if permuted:
        embed: Any = restored.model.patch_embed
        images = replace(images, test=PermutedPatches(images, embed.patch_size))
    task.images, task.classes = images, restored.description.classes
    return {"image_size": [images.height, images.width], "permute_tokens": permuted, "resize": policy}


def adapt_texts(task: Any, restored: Restored, own: Mapping[str, str]) -> dict[str, Any]:
    """Lets a task read texts as the model was trained to, so many tokens at once; returns what is to be told of it."""
    if task.about != restored.description.model_copy(update={"max_length": task.about.max_length}):
        task.data = texts_as_trained(task.data, restored)
    task.about = restored.description
    if restored.config.task == "language_modeling":
        task.length = int(own["length"]) if "length" in own else restored.description.max_length
        return {"length": task.length}
    return {"length": task.data.max_length}


def adapt_recordings(task: Any, restored: Restored) -> dict[str, Any]:
    """Lets a task write texts in the tokens of the model.

    Raises:
        ValueError: recordings at another sample rate, characters that the model cannot write, or a lexicon of texts that are not
            those of training.
    """
    about, tokenizer = restored.description, restored.tokenizer
    if task.about.sample_rate != about.sample_rate:
        raise ValueError(
            f"data.sample_rate = {task.about.sample_rate}: the model hears {about.sample_rate} Hz; recordings of any rate are "
            f"resampled to data.sample_rate={about.sample_rate}"
        )
    if task.decoding.get("lexicon") == "train" and not has_texts_of_training(restored, task.about):
        raise ValueError(
            "decoding.lexicon = 'train': these data have other training texts than the model; name a file of words"
        )
    test, left_out = task.data.test.with_tokenizer(tokenizer, task.max_damaged), task.data.left_out
    if num_unusable := len(task.data.test) - len(test):
        left_out[UNUSABLE] = left_out.get(UNUSABLE, 0) + num_unusable
    task.data = replace(task.data, test=test, tokenizer=tokenizer)
    task.about = about
    return {"sample_rate": about.sample_rate}


def has_texts_of_training(restored: Restored, about: SpeechDescription) -> bool:
    """Whether recordings that are `about` so have the training texts of the model, as far as can be told."""
    before, now = load_config(str(restored.folder / CONFIG)).data, restored.config.data
    kinds = [(data.name, getattr(data, "train", None), getattr(data, "languages", None)) for data in (before, now)]
    return kinds[0] == kinds[1] and about.tokenizer == restored.description.tokenizer


def texts_as_trained(data: Any, restored: Restored) -> Any:
    """Data as the model knows data: in tokens of its own tokenizer, its classes by name.

    Raises:
        ValueError: a class that the model does not know, or texts that are there as tokens of another tokenizer only.
    """
    tokenizer, about, test = restored.tokenizer, restored.description, data.test
    assert tokenizer is not None
    if isinstance(test, LabelledTexts):
        numbers = known_classes(data.classes, about.classes)
        rows = Rows(names_of(test), test.texts, [numbers[label] for label in test.labels])
        return replace(data, test=LabelledTexts(rows, tokenizer, data.max_length, "truncate"), tokenizer=tokenizer)
    if isinstance(test, PairTexts):
        pairs = PairRows(names_of(test), test.sources, test.targets)
        sizes = (data.max_length, data.max_target_length)
        return replace(data, test=PairTexts(pairs, tokenizer, *sizes, "truncate"), tokenizer=tokenizer)
    check_same_tokenizer(data.tokenizer, about)
    if (classes := getattr(data, "classes", None)) and classes != about.classes:
        raise ValueError(f"the data have the classes {', '.join(classes)}, the model knows {', '.join(about.classes)}")
    return data


def names_of(test: LabelledTexts | PairTexts) -> list[str]:
    return [f"test text {index}" for index in range(len(test))]


def take_own(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The overrides of the run's config, and those keys that are ours.

    Raises:
        ValueError: a key that evaluation does not depend on, or ours given twice.
    """
    overrides: list[str] = []
    own: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in own:
            raise ValueError(f"{key}: given twice on the command line")
        if key in OWN_KEYS:
            own[key] = value
        elif key.split(".")[0] in ("data", "encoding", "decoding", "scoring") or key in (*TRAINER_KEYS, *MODEL_KEYS):
            overrides.append(argument)
        else:
            wanted = nearest(key, [*OWN_KEYS, *TRAINER_KEYS, *MODEL_KEYS, "data", "encoding", "decoding", "scoring"])
            raise ValueError(
                f"{argument!r}: evaluation does not depend on it, or it would be another model; "
                + (f"did you mean {wanted}? " if wanted else "")
                + f"Allowed: data, encoding, decoding, scoring and their keys, {', '.join((*TRAINER_KEYS, *MODEL_KEYS, *OWN_KEYS))}"
            )
    return overrides, own


def changed_config(path: Path, overrides: Sequence[str], own: Mapping[str, str]) -> Config:
    """The run's config with overrides, for the same model.

    Raises:
        ValueError: the overrides are wrong, want another model, a size of data that have none, or what the task has no use for.
    """
    trained, config = load_config(str(path)), load_config(str(path), overrides)
    for key, value in own.items():
        if config.task not in FOR_TASKS.get(key, (config.task,)):
            raise ValueError(
                f"{key} = {value}: is for {' and '.join(FOR_TASKS[key])}; {path.parent} is a run of {config.task}"
            )
    if "length" in own and not (own["length"].isdecimal() and int(own["length"])):
        raise ValueError(f"length = {own['length']}: must be a whole number of at least 1")
    if "length" in own and config.task == "text_classification":
        config = load_config(str(path), [*overrides, f"data.max_length={own['length']}"])
    if "image_size" in own:
        height, width = parse_size(own["image_size"])
        size_key = next((key for key in SIZE_KEYS if key in type(config.data).model_fields), None)
        if size_key is None:
            raise ValueError(f"image_size = {own['image_size']}: {config.data.name} come in one size only")
        size = height if size_key == "image_size" and height == width else [height, width]
        config = load_config(str(path), [*overrides, f"data.{size_key}={size}"])
    names, wanted = ([encoding.name for encoding in c.encodings] for c in (trained, config))
    if names != wanted:
        raise ValueError(
            f"encoding = {' + '.join(wanted)}: the model was trained with {' + '.join(names)}, and stays so"
        )
    for before, after in zip(trained.encodings, config.encodings, strict=True):
        check_same_weights(before, after, TASKS[config.task].num_axes)
    return config


def check_same_weights(trained: Encoding, wanted: Encoding, num_axes: int = 2) -> None:
    """Refuses options that make or set weights: those are loaded, so that the options would be ignored.

    Raises:
        ValueError: a newly made encoding has other weights with these options.
    """
    made = []
    for encoding in (trained, wanted):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made.append(encoding.make(num_axes).state_dict())
    before, after = made
    if before.keys() != after.keys() or not all(torch.equal(before[name], after[name]) for name in before):
        options = {key: value for key, value in wanted.given().items() if getattr(trained, key) != value}
        raise ValueError(
            f"encoding {wanted.name} with {options}: belongs to the weights, which are loaded; it cannot be changed any more"
        )


def as_trained(images: Images, description: Description) -> Images:
    """Data as the model knows data: its classes by name, its normalisation.

    Raises:
        ValueError: a class that the model does not know, or another number of channels.
    """
    if images.num_channels != description.num_channels:
        raise ValueError(
            f"the data have {images.num_channels} channels, the model was trained on {description.num_channels}"
        )
    labels = known_classes(images.classes, description.classes)
    return replace(images, test=AsTrained(images, labels, description), classes=description.classes)


def known_classes(names: Sequence[str], known: Sequence[str]) -> list[int]:
    """The numbers that a model has for classes.

    Raises:
        ValueError: a class that it does not know.
    """
    for name in names:
        if name not in known:
            wanted = nearest(name, known)
            raise ValueError(
                f"class {name!r} of the data is not among the classes of training, {', '.join(known)}"
                + (f"; did you mean {wanted}?" if wanted else "")
            )
    return [known.index(name) for name in names]


class AsTrained(Dataset[Example]):
    """The test split with the labels and the normalisation of training."""

    def __init__(self, images: Images, labels: Sequence[int], description: Description):
        self.test, self.labels = images.test, labels
        self.same = (images.mean, images.std) == (description.mean, description.std)
        stats = (images.mean, images.std, description.mean, description.std)
        self.stats = [torch.tensor(values).view(-1, 1, 1) for values in stats]

    def __len__(self) -> int:
        return len(self.test)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Example:
        image, label = self.test[index]
        if not self.same:
            mean, std, wanted_mean, wanted_std = self.stats
            image = (image * std + mean - wanted_mean) / wanted_std
        return image, self.labels[label]


class PermutedPatches(Dataset[Example]):
    """Images cut into the patches of a model and put together in another order, always the same for the same index.

    Raises:
        ValueError: the images cannot be cut so.
    """

    def __init__(self, images: Images, patch_size: tuple[int, int]):
        self.test, self.size, self.patch_size = images.test, (images.height, images.width), patch_size
        if any(side % patch for side, patch in zip(self.size, patch_size, strict=True)):
            raise ValueError(f"permute_tokens: {by(self.size)} pixels cannot be cut into patches of {by(patch_size)}")

    def __len__(self) -> int:
        return len(self.test)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Example:
        image, label = self.test[index]
        patches = F.unfold(image[None], self.patch_size, stride=self.patch_size)  # (1, channels * patch, patches)
        order = torch.from_numpy(np.random.default_rng(index).permutation(patches.shape[-1]))
        return F.fold(patches[..., order], self.size, self.patch_size, stride=self.patch_size)[0], label


def as_text(metrics: dict[str, Any], about: dict[str, Any]) -> str:
    """A line a number, below what it was measured on."""
    if "sample_rate" in about:
        seen = f"{about['sample_rate']} Hz"
    elif "known_classes" in about:
        seen = f"{about['num_classes']} of the {about['known_classes']} classes of the model"
    elif "length" in about:
        seen = f"{about['length']} tokens at once"
    else:
        seen = by(about["image_size"]) + (", patches in random order" if about["permute_tokens"] else "")
    lines = [
        ("checkpoint", f"{about['checkpoint']} ({'moving average' if about['weights'] == 'ema' else 'weights'})"),
        ("data", f"{about['data']}, {seen}"),
        *[(key, f"{value:.4f}" if isinstance(value, float) else str(value)) for key, value in metrics.items()],
        *[("resize", text) for text in about.get("resize", ())],
    ]
    longest = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:<{longest}}  {value}" for key, value in lines)


if __name__ == "__main__":
    run_command(main)
