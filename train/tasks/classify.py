"""Image classification: one label an image, cross entropy, top-1 accuracy."""

import math
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import nn
from torch.nn import functional as F

import relpos2d
from train import report
from train.config import Config, Encoding
from train.data import Images
from train.data.stream import evaluation_batches
from train.tasks import Records


class Classify:
    """A timm backbone with one of our encodings, trained on labelled images."""

    score = "accuracy"
    records_name = "predictions.jsonl"

    def __init__(self, config: Config):
        self.images: Images = config.data.load(config.seed)
        self.train_data, self.classes = self.images.train, self.images.classes
        self.batch_size, self.num_workers = config.trainer.batch_size, config.trainer.num_workers
        self.model = create_backbone(config, self.images)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        images, labels = batch
        logits = model(images)
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return F.cross_entropy(logits.float(), labels), {"train_accuracy": accuracy}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        model.eval()
        records: Records = []
        share = (accelerator.process_index, accelerator.num_processes)
        for indices, batch in evaluation_batches(self.images.test, self.batch_size, self.num_workers, *share):
            images, labels = send_to_device(batch, accelerator.device)
            log_probabilities = F.log_softmax(model(images).float(), dim=1)
            best, predictions = log_probabilities.max(dim=1)
            losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
            columns = (indices, labels.tolist(), predictions.tolist(), best.exp().tolist(), losses.tolist())
            records += [
                {
                    "index": index,
                    "label": self.classes[label],
                    "prediction": self.classes[prediction],
                    "probability": probability,
                    "loss": loss,
                }
                for index, label, prediction, probability, loss in zip(*columns, strict=True)
            ]
        model.train()
        records = sorted(gather_object(records), key=lambda record: record["index"])
        count = len(records)
        accuracy = sum(record["label"] == record["prediction"] for record in records) / count
        metrics = {
            "accuracy": accuracy,
            "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / count),
            "loss": sum(record["loss"] for record in records) / count,
            "num_examples": count,
        }
        return metrics, records

    def pictures(self, folder: Path, records: Records) -> list[Path]:
        mistakes = [record for record in records if record["label"] != record["prediction"]]
        shown = [*spread(mistakes, 8), *spread(records, 16)]
        images = [report.to_pixels(self.images.test[r["index"]][0], self.images.mean, self.images.std) for r in shown]
        titles = [(f"{r['prediction']} ({r['probability']:.0%})", r["label"]) for r in shown]
        return [
            report.draw_predictions(folder / "predictions.png", images, titles),
            *report.draw_maps(folder / "maps.png", self.model),
        ]


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
    try:
        if name.startswith("relpos2d_"):
            return timm.create_model(name, encoding=encoding, absolute=absolute, **options)
        return relpos2d.swap(timm.create_model(name, **options), encoding, absolute=absolute)
    except (AssertionError, TypeError, RuntimeError) as error:  # timm's ways of saying that sizes do not fit
        raise ValueError(f"model {name} with {options}: {error}") from error


def encoding_argument(config: Config) -> Any:
    """What `timm.create_model(encoding=...)` takes: a dict, or a list of dicts for a sum."""

    def plain(encoding: Encoding) -> dict[str, Any]:
        return {"name": encoding.name, **encoding.given()}

    return plain(config.encoding) if isinstance(config.encoding, Encoding) else [plain(e) for e in config.encoding]
