"""Object detection: boxes (and masks) around what is in an image, scored as COCO does it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn

from train import report
from train.coco_scores import score
from train.config import OWN_MODELS, Config, encoding_argument
from train.data.boxes import Boxed, Id
from train.data.description import BoxDescription, describe
from train.data.stream import evaluation_batches
from train.restore import find_checkpoint
from train.tasks import Records

ANNOTATIONS, DETECTIONS = "annotations.json", "detections.json"
NUM_SHOWN = 6


class Detect:
    """A detector of torchvision on a timm backbone with one of our encodings, trained on images with boxes."""

    score = "AP"
    records_name = DETECTIONS

    def __init__(self, config: Config):
        data: Boxed = config.data.load(config.seed)  # type: ignore[union-attr]
        self.has_masks = config.model.name == "mask_rcnn"
        if self.has_masks and not data.has_masks:
            raise ValueError("model.name = 'mask_rcnn': needs masks; data.masks=true reads the segmentations")
        self.data, self.train_data, self.max_damaged = data, data.train, data.max_damaged
        self.categories: dict[int, Id] = dict(enumerate(data.category_ids, start=1))  # by label, as in the test split
        self.batch_size = config.trainer.batch_size // config.trainer.accumulate
        self.num_workers = config.trainer.num_workers
        self.scoring = {} if config.scoring is None else config.scoring.given()
        self.files = {ANNOTATIONS: json.dumps(data.truth) + "\n"}
        self.model = create_detection_model(config, self.about)
        fresh = not (config.model.given().get("weights") or is_pretrained(config))
        self.notes: tuple[str, ...] = () if fresh else tuple(self.model.report)

    @property
    def about(self) -> BoxDescription:
        return describe("detect", self.data)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        images, targets = batch
        losses: dict[str, Tensor] = model(images, targets)
        return torch.stack([value.float() for value in losses.values()]).sum(), {
            name.removeprefix("loss_"): value.detach() for name, value in losses.items()
        }

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        was_training = model.training
        model.eval()
        test = self.data.test
        share = (accelerator.process_index, accelerator.num_processes)
        size = max(1, self.batch_size // accelerator.num_processes)
        found: list[tuple[int, Records]] = []
        for indices, batch in evaluation_batches(test, size, self.num_workers, *share, self.max_damaged):
            images, _ = send_to_device(batch, accelerator.device)
            with accelerator.autocast():
                outputs = model(images)
            for index, output in zip(indices, outputs, strict=False):  # no index: not ours
                found.append((index, to_results(output, test.image_ids[index], self.categories)))
        model.train(was_training)
        found = sorted(gather_object(found), key=lambda pair: pair[0])
        records = [record for _, results in found for record in results]
        return self.metrics(records, [test.image_ids[index] for index, _ in found]), records

    def metrics(self, records: Records, image_ids: list[Id]) -> dict[str, Any]:
        """What is said of detections in these images of the test split."""
        truth = self.data.truth
        metrics = score(truth, records, image_ids=image_ids, **self.scoring)
        if self.has_masks:
            masks = score(truth, records, kind="segm", image_ids=image_ids, **self.scoring)
            metrics |= {f"mask_{key}": value for key, value in masks.items()}
        scenes: dict[str, list[Id]] = {}
        seen = set(image_ids)
        for image in truth["images"]:
            if "scene" in image and image["id"] in seen:
                scenes.setdefault(image["scene"], []).append(image["id"])
        if len(scenes) > 1:
            kept = {id: scene for scene, ids in scenes.items() for id in ids}
            by_scene: dict[str, Records] = {scene: [] for scene in scenes}
            for record in records:
                by_scene[kept[record["image_id"]]].append(record)
            each = {
                scene: score(truth, by_scene[scene], image_ids=ids, **self.scoring) for scene, ids in scenes.items()
            }
            metrics["per_scene"] = {scene: {key: of[key] for key in ("AP", "AP50")} for scene, of in each.items()}
        return {
            **metrics,
            "num_examples": len(image_ids),
            "num_damaged": len(self.data.test) - len(image_ids),
            "left_out": self.data.left_out,
        }

    def as_trained(self, about: BoxDescription) -> dict[str, Any]:
        """Lets the task see its test split with the classes of a trained model; returns what is to be told of it.

        Raises:
            ValueError: a class that the model does not know.
        """
        from train.evaluate import known_classes

        labels = known_classes(self.data.classes, about.classes)
        self.categories = {label + 1: id for label, id in zip(labels, self.data.category_ids, strict=True)}
        self.data = replace(self.data, classes=about.classes)
        return {"num_classes": len(labels), "known_classes": len(about.classes)}

    def description(self) -> str:
        return self.about.model_dump_json(indent=2) + "\n"

    def pictures(self, folder: Path, records: Records, model: nn.Module) -> list[Path]:
        """True and found boxes in some test images, and the learned positions."""
        from train.draw_boxes import draw_detections  # for the main process alone

        test = self.data.test
        step = max(1, len(test) // NUM_SHOWN)
        shown = list(range(0, len(test), step))[:NUM_SHOWN]
        by_image: dict[Id, Records] = {test.image_ids[index]: [] for index in shown}
        for record in records:
            if record["image_id"] in by_image:
                by_image[record["image_id"]].append(record)
        path = draw_detections(
            folder / "detections.png",
            [test[index][0] for index in shown],
            [by_image[test.image_ids[index]] for index in shown],
            self.data.truth,
            [test.image_ids[index] for index in shown],
        )
        return [path, *report.draw_maps(folder / "maps.png", model)]


def to_results(output: Mapping[str, Tensor], image_id: Id, categories: Mapping[int, Id]) -> Records:
    """What a detector found in an image, as COCO results; classes that `categories` lacks are passed over."""
    boxes = output["boxes"].float().cpu().numpy().astype(np.float64)
    xywh = np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), axis=1).round(3).tolist()
    columns = (output["labels"].tolist(), xywh, output["scores"].float().tolist())
    results: Records = []
    for number, (label, box, found_score) in enumerate(zip(*columns, strict=True)):
        if label not in categories:
            continue
        result = {"image_id": image_id, "category_id": categories[label], "bbox": box, "score": found_score}
        if "masks" in output:
            result["segmentation"] = to_rle(output["masks"][number, 0] >= 0.5)
        results.append(result)
    return results


def to_rle(mask: Tensor) -> dict[str, Any]:
    """(H, W) bool -> COCO's run lengths, as JSON can hold them."""
    from pycocotools import mask as coco_mask

    packed = coco_mask.encode(np.asfortranarray(mask.cpu().numpy().astype(np.uint8)))
    return {"size": list(packed["size"]), "counts": packed["counts"].decode()}


def create_detection_model(config: Config, about: BoxDescription) -> Any:
    """The configured detector with the configured encoding, for the classes of the data.

    Raises:
        ValueError: the model cannot be built like this, with what it said.
    """
    options = config.model.given()
    if options.get("weights") and options.get("load_pretrained", True):
        options["weights"] = str(weights_file(Path(options["weights"])))
    sizes = {"num_classes": len(about.classes) + 1, "mean": about.mean, "std": about.std}
    return OWN_MODELS[config.model.name](encoding=encoding_argument(config), **sizes, **options)


def is_pretrained(config: Config) -> bool:
    """Whether timm fetches weights for the backbone."""
    backbone = config.model.given()["backbone"]
    return isinstance(backbone, Mapping) and bool(backbone.get("pretrained"))


def weights_file(path: Path) -> Path:
    """The file of weights that is meant; of a run's folder that of its last checkpoint, the average where there is one."""
    if not path.is_dir():
        return path
    _, checkpoint = find_checkpoint(path)
    average = checkpoint / "ema.safetensors"
    return average if average.is_file() else checkpoint / "model.safetensors"
