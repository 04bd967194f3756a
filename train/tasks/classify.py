"""Image classification: one label an image, cross entropy, top-1 accuracy."""

import math
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import nn
from torch.nn import functional as F

import relpos2d
from relpos2d.encodings import encoding_class
from train import report
from train.config import Config, Loss, encoding_argument
from train.data import Images
from train.data.description import describe
from train.data.stream import evaluation_batches
from train.tasks import Records


class Classify:
    """A timm backbone with one of our encodings, trained on labelled images."""

    score = "accuracy"
    records_name = "predictions.jsonl"
    notes: tuple[str, ...] = ()

    def __init__(self, config: Config):
        self.files: dict[str, str] = {}
        self.images: Images = config.data.load(config.seed)
        self.train_data, self.classes = self.images.train, self.images.classes
        self.max_damaged = self.images.max_damaged
        self.batch_size = config.trainer.batch_size // config.trainer.accumulate
        self.num_workers = config.trainer.num_workers
        self.model = create_backbone(config, self.images)
        self.mixup, self.criterion = create_criterion(config.loss, len(self.classes))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        images, labels = batch
        if self.mixup is not None:
            images, targets = self.mixup(images, labels)
            return self.criterion(model(images).float(), targets), {}
        logits = model(images)
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return self.criterion(logits.float(), labels), {"train_accuracy": accuracy}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        was_training = model.training
        model.eval()
        records: Records = []
        share = (accelerator.process_index, accelerator.num_processes)
        size = max(1, self.batch_size // accelerator.num_processes)
        for indices, batch in evaluation_batches(self.images.test, size, self.num_workers, *share, self.max_damaged):
            images, labels = send_to_device(batch, accelerator.device)
            with accelerator.autocast():
                log_probabilities = F.log_softmax(model(images).float(), dim=1)
            best, predictions = log_probabilities.max(dim=1)
            losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
            columns = (labels.tolist(), predictions.tolist(), best.exp().tolist(), losses.tolist())
            records += [
                {
                    "index": index,
                    "label": self.classes[label],
                    "prediction": self.classes[prediction],
                    "probability": probability,
                    "loss": loss,
                }
                for index, label, prediction, probability, loss in zip(
                    indices, *columns, strict=False
                )  # no index: not ours
            ]
        model.train(was_training)
        records = sorted(gather_object(records), key=lambda record: record["index"])
        count = len(records)
        accuracy = sum(record["label"] == record["prediction"] for record in records) / count
        metrics = {
            "accuracy": accuracy,
            "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / count),
            "loss": sum(record["loss"] for record in records) / count,
            "num_examples": count,
            "num_damaged": len(self.images.test) - count,  # type: ignore[arg-type]
        }
        return metrics, records

    def description(self) -> str:
        return describe("classify", self.images).model_dump_json(indent=2) + "\n"

    def pictures(self, folder: Path, records: Records, model: nn.Module) -> list[Path]:
        mistakes = [record for record in records if record["label"] != record["prediction"]]
        shown = [*spread(mistakes, 8), *spread(records, 16)]
        images = [report.to_pixels(self.images.test[r["index"]][0], self.images.mean, self.images.std) for r in shown]
        titles = [(f"{r['prediction']} ({r['probability']:.0%})", r["label"]) for r in shown]
        return [
            report.draw_predictions(folder / "predictions.png", images, titles),
            *report.draw_maps(folder / "maps.png", model),
        ]


def create_criterion(loss: Loss, num_classes: int) -> tuple[Mixup | None, nn.Module]:
    """timm's Mixup where there is any, and the loss that goes with its targets."""
    if loss.name == "binary_cross_entropy":  # mixed targets are smoothed already, which timm's loss sees by their shape
        criterion: nn.Module = BinaryCrossEntropy(smoothing=loss.smoothing, target_threshold=loss.target_threshold)
    elif loss.mixes:
        criterion = SoftTargetCrossEntropy()
    else:
        criterion = nn.CrossEntropyLoss(label_smoothing=loss.smoothing)
    if not loss.mixes:
        return None, criterion
    mixup = Mixup(
        mixup_alpha=loss.mixup,
        cutmix_alpha=loss.cutmix,
        prob=loss.mix_prob,
        switch_prob=loss.switch_prob,
        mode=loss.mix_mode,
        label_smoothing=loss.smoothing,  # of the mixed targets
        num_classes=num_classes,
    )
    return mixup, criterion


def spread(records: Records, count: int) -> Records:
    """At most `count` of them, evenly from first to last."""
    return records[:: max(1, -(-len(records) // count))]


def create_backbone(config: Config, images: Images) -> nn.Module:
    """The configured model in the size of the data, with the configured encoding in every attention.

    Raises:
        ValueError: the model cannot be built like this, with what it said.
    """
    name, encoding = config.model.name, encoding_argument(config)
    options = config.model.given()
    options |= {
        "in_chans": images.num_channels,
        "num_classes": len(images.classes),
        "img_size": (images.height, images.width),
    }
    absolute = options.pop("absolute", None)
    if absolute is None and config.handover and has_embedding_to_fade(config, options):
        absolute = "fade"
    try:
        if name.startswith("relpos2d_"):
            return timm.create_model(name, encoding=encoding, absolute=absolute, **options)
        return relpos2d.swap(timm.create_model(name, **options), encoding, absolute=absolute)
    except (AssertionError, TypeError, RuntimeError) as error:  # timm's ways of saying that sizes do not fit
        raise ValueError(f"model {name} with {options}: {error}") from error


def has_embedding_to_fade(config: Config, options: dict[str, Any]) -> bool:
    """Whether the backbone has a position embedding of its own and the config no absolute encoding in its place."""
    if any(encoding_class(encoding.name).family == "absolute" for encoding in config.encodings):
        return False
    with torch.device("meta"):
        source = timm.create_model(config.model.name.removeprefix("relpos2d_"), **{**options, "pretrained": False})
    return getattr(source, "pos_embed", None) is not None
