"""A detector from its data to scores that anyone can count again."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from tests.train.boxes import COLOURS, MASK_MODEL, coco_folder, command
from tests.train.runs import make_run
from train.__main__ import main
from train.config import load_config
from train.evaluate import main as evaluate
from train.restore import restore
from train.run_folder import records_text
from train.tasks.detect import Detect, to_results


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coco_folder(tmp_path_factory.mktemp("coco") / "data")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("detect") / "run"
    assert main(command(data, folder, "model.score_threshold=0.0", "scoring.max_detections=[1,5,20]")) == 0
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def truth_as_results(truth: dict[str, Any]) -> list[dict[str, Any]]:
    keys = ("image_id", "category_id", "bbox")
    return [{**{key: a[key] for key in keys}, "score": 0.9} for a in truth["annotations"]]


def test_a_run_fills_its_folder(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == {
        ".lock", "annotations.json", "checkpoints", "config.yaml", "curves.png", "data.json", "detections.json",
        "detections.png", "history.jsonl", "maps.png", "metrics.json", "tensorboard",
    }  # fmt: skip
    about = read(run, "data.json")
    assert about["classes"] == list(COLOURS)
    assert about["category_ids"] == [3, 17]
    metrics = read(run, "metrics.json")
    assert metrics["num_examples"] == 5
    assert set(metrics["per_class"]) == set(COLOURS)
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in history)
    assert history[0]["loss"] == pytest.approx(history[0]["classification"] + history[0]["bbox_regression"], rel=1e-6)
    for picture in run.glob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) > 100


def by_hand(folder: Path, limits: list[int]) -> list[float]:
    """AP, AP50 and the average recall that pycocotools finds in what lies in a folder."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(folder / "annotations.json"))
        evaluation = COCOeval(truth, truth.loadRes(str(folder / "detections.json")), "bbox")
        evaluation.params.maxDets = limits
        evaluation.evaluate()
        evaluation.accumulate()
    precision, recall = evaluation.eval["precision"][:, :, :, 0, -1], evaluation.eval["recall"][:, :, 0, -1]
    return [precision.mean(), precision[0].mean(), recall.mean()]


def test_scores_are_those_of_pycocotools_by_hand(run: Path) -> None:
    metrics = read(run, "metrics.json")
    assert len(read(run, "detections.json")) > 5 * 20  # more than are counted
    found = [metrics[key] for key in ("AP", "AP50", "AR_20")]
    assert found == pytest.approx(by_hand(run, [1, 5, 20]), abs=1e-12)


def test_scores_of_what_is_partly_right_are_those_of_pycocotools(data: Path, tmp_path: Path) -> None:
    task = Detect(load_config("detect/digits", command(data, Path("unused"))[1:]))
    records = truth_as_results(task.data.truth)
    for number, record in enumerate(records):  # further and further off, every third of the other class
        x, y, w, h = record["bbox"]
        record |= {"bbox": [x + number, y, w, h], "score": 0.3 + 0.07 * (number % 5)}
        record["category_id"] = 20 - record["category_id"] if number % 3 == 2 else record["category_id"]
    (tmp_path / "annotations.json").write_text(task.files["annotations.json"])
    (tmp_path / "detections.json").write_text(records_text("detections.json", records))
    metrics = task.metrics(records, list(task.data.test.image_ids))
    found = [metrics[key] for key in ("AP", "AP50", "AR_100")]
    assert found == pytest.approx(by_hand(tmp_path, [1, 10, 100]), abs=1e-12)
    assert 0 < metrics["AP"] < metrics["AP50"] < 1


def test_perfect_detections_score_one_and_none_zero(data: Path) -> None:
    task = Detect(load_config("detect/digits", command(data, Path("unused"))[1:]))
    ids = list(task.data.test.image_ids)
    perfect = task.metrics(truth_as_results(task.data.truth), ids)
    assert (perfect["AP"], perfect["AP50"], perfect["AR_100"]) == (1.0, 1.0, 1.0)
    nothing = task.metrics([], ids)
    assert (nothing["AP"], nothing["AP50"], nothing["AR_100"]) == (0.0, 0.0, 0.0)


class Oracle(torch.nn.Module):
    """A detector that finds what is there, in the order of the images that it is shown."""

    def __init__(self, task: Detect):
        super().__init__()
        self.test = task.data.test
        self.seen: list[int] = []

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        found = []
        for image in images:
            for index in range(len(self.test)):
                mine, target = self.test[index]
                if mine.shape == image.shape and torch.equal(mine, image):
                    self.seen.append(index)
                    found.append({**target, "scores": torch.ones(len(target["boxes"]))})
        return found


def test_labels_and_boxes_come_back_as_the_file_has_them(data: Path) -> None:
    """From the file through the data set, labels and corners, back to ids and widths: all is found again, exactly."""
    task = Detect(load_config("detect/digits", command(data, Path("unused"))[1:]))
    metrics, records = task.evaluate(Oracle(task), Accelerator(cpu=True))
    assert metrics["AP"] == 1.0
    assert records == [{**record, "score": 1.0} for record in truth_as_results(task.data.truth)]


@pytest.mark.parametrize("num_processes", [2, 3])
def test_several_processes_evaluate_each_image_once(
    data: Path, num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.tasks import detect

    task = Detect(load_config("detect/digits", command(data, Path("unused"))[1:]))
    parts: list[Any] = []
    monkeypatch.setattr(detect, "gather_object", lambda found: parts.append(found) or found)
    for index in range(num_processes):
        accelerator = Accelerator(cpu=True)
        monkeypatch.setattr(Accelerator, "process_index", index)
        monkeypatch.setattr(Accelerator, "num_processes", num_processes)
        task.evaluate(Oracle(task), accelerator)
    assert sorted(index for part in parts for index, _ in part) == list(range(5))
    monkeypatch.setattr(detect, "gather_object", lambda _: [pair for part in parts for pair in part])
    metrics, records = task.evaluate(Oracle(task), accelerator)
    assert metrics["AP"] == 1.0
    assert len(records) == len(task.data.truth["annotations"])


def test_lost_after_two_steps_it_ends_the_same(data: Path, run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step_4")
    (again / "metrics.json").unlink()
    options = ["model.score_threshold=0.0", "scoring.max_detections=[1,5,20]"]
    assert main(command(data, again, *options)) == 0
    assert read(again, "detections.json") == read(run, "detections.json")
    keys = ("AP", "AP50", "AR_20")
    assert [read(again, "metrics.json")[key] for key in keys] == [read(run, "metrics.json")[key] for key in keys]


def test_the_numbers_that_training_ended_with(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    metrics = read(run, "metrics.json")
    assert [found[key] for key in ("AP", "AP50", "per_class")] == [metrics[key] for key in ("AP", "AP50", "per_class")]


def test_other_data_are_read_by_the_names_of_their_classes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same images with ids that sort the other way round: labels must not follow the numbers."""
    other = coco_folder(tmp_path / "other", ids=(20, 5))
    assert evaluate([str(run), f"data.path={other}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    metrics = read(run, "metrics.json")
    assert found["per_class"] == {name: pytest.approx(metrics["per_class"][name]) for name in COLOURS}
    for path in other.glob("annotations/*.json"):
        path.write_text(path.read_text().replace('"leaf"', '"leave"'))
    assert evaluate([str(run), f"data.path={other}"]) == 1
    assert "class 'leave' of the data is not among the classes of training" in capsys.readouterr().err


def test_another_scale_without_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([str(run), "model.min_size=96", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["AP"] != read(run, "metrics.json")["AP"]
    assert evaluate([str(run), "model.out_channels=32"]) == 1
    assert "evaluation does not depend on it, or it would be another model" in capsys.readouterr().err
    assert evaluate([str(run), "image_size=96"]) == 1
    assert "image_size = 96: is for classify" in capsys.readouterr().err


def test_damaged_test_images_are_left_out_and_counted(tmp_path: Path) -> None:
    data = coco_folder(tmp_path / "data")
    task = Detect(load_config("detect/digits", [*command(data, tmp_path)[1:], "data.check_files=false"]))
    oracle = Oracle(task)
    (data / "val2017" / "1.png").write_bytes(b"no image")
    oracle.test = Detect(load_config("detect/digits", command(coco_folder(tmp_path / "whole"), tmp_path)[1:])).data.test
    with pytest.warns(UserWarning, match=r"1.png: no readable image .* left out of the test, 1 of 10 allowed"):
        metrics, records = task.evaluate(oracle, Accelerator(cpu=True))
    assert (metrics["num_examples"], metrics["num_damaged"]) == (4, 1)
    assert metrics["AP"] == 1.0  # what could not be looked at is not missed
    assert 101 not in {record["image_id"] for record in records}


def test_masks(tmp_path: Path) -> None:
    data = coco_folder(tmp_path / "data", num_train=4, num_test=3)
    options = [
        MASK_MODEL,
        "data.masks=true",
        "trainer.max_steps=2",
        "trainer.eval_every=2",
        "model.score_threshold=0.0",
    ]
    arguments = [
        part for part in command(data, tmp_path / "run", *options) if not part.startswith("model={name: retinanet")
    ]
    assert main(arguments) == 0
    metrics = read(tmp_path / "run", "metrics.json")
    assert {"AP", "mask_AP", "mask_AP50"} <= set(metrics)
    found = read(tmp_path / "run", "detections.json")
    assert {tuple(record["segmentation"]["size"]) for record in found} <= {(48, 64), (64, 48), (56, 56)}


def test_masks_of_what_is_there_are_perfect(data: Path) -> None:
    options = [part for part in command(data, Path("unused"), "data.masks=true")[1:] if not part.startswith("model=")]
    task = Detect(load_config("detect/digits", [*options, MASK_MODEL]))
    oracle = Oracle(task)
    inner = oracle.forward

    def forward(images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [{**found, "masks": found["masks"][:, None].float()} for found in inner(images)]

    oracle.forward = forward  # type: ignore[method-assign]
    metrics, _ = task.evaluate(oracle, Accelerator(cpu=True))
    assert metrics["mask_AP"] == metrics["AP"] == 1.0


def test_results_by_hand() -> None:
    output = {
        "boxes": torch.tensor([[1.0, 2, 4, 8], [0, 0, 5, 5]]),
        "labels": torch.tensor([2, 1]),
        "scores": torch.tensor([0.5, 0.25]),
    }
    assert to_results(output, "photo", {2: "cat"}) == [
        {"image_id": "photo", "category_id": "cat", "bbox": [1.0, 2.0, 3.0, 6.0], "score": 0.5}
    ]


def test_a_classifier_of_this_project_as_backbone(data: Path, tmp_path: Path) -> None:
    """The weights of a run's last checkpoint, the average where there is one; restoring does not ask for them again."""
    folders = tmp_path / "images"
    for split in ("train", "val"):
        for name, colour in COLOURS.items():
            (folders / split / name).mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (32, 32), colour).save(folders / split / name / f"{number}.png")
    backbone = (
        "model={name: relpos2d_swin_tiny_patch4_window7_224, window_size: 4, embed_dim: 24, depths: [1, 1], "
        "num_heads: [3, 3], drop_path_rate: 0.0}"
    )
    classifier = tmp_path / "classifier"
    options = [backbone, "encoding=rope_mixed", f"data.path={folders}", "data.image_size=64", "trainer.device=cpu"]
    make_run(classifier, "classify/image_folder", options, average=True)
    config = load_config(
        "detect/digits", [*command(data, tmp_path)[1:], f"model.weights={classifier}", "encoding=rope_mixed"]
    )
    task = Detect(config)
    theirs = restore(classifier, "ema").model
    mine = task.model.backbone.pyramid.body
    assert torch.equal(mine.layers_1.blocks[0].attn.encoding.freqs, theirs.layers[1].blocks[0].attn.encoding.freqs)
    assert torch.equal(mine.patch_embed.proj.weight, theirs.patch_embed.proj.weight)
    run = tmp_path / "detector"
    trained = make_run(
        run, "detect/digits", [*command(data, run)[1:], f"model.weights={classifier}", "encoding=rope_mixed"]
    )
    shutil.rmtree(classifier)
    again = restore(run).model
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(again.backbone(x)["p3"], trained.eval().backbone(x)["p3"])
