"""Detection on two processes: the losses, the weights and the detections of one (the small tests hold each part of it)."""

import json
from pathlib import Path

import pytest

from tests.train.boxes import coco_folder, command
from tests.train.test_processes import history, launch

pytestmark = pytest.mark.long


def test_two_processes_are_one(tmp_path: Path) -> None:
    data = coco_folder(tmp_path / "data", num_train=9, num_test=7)
    # images of one size (parts of a batch are padded each for themselves), nothing drawn at random in the model
    for split in ("train2017", "val2017"):
        path = data / "annotations" / f"instances_{split}.json"
        content = json.loads(path.read_text())
        kept = {image["id"] for image in content["images"] if (image["height"], image["width"]) == (48, 64)}
        content["images"] = [image for image in content["images"] if image["id"] in kept]
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in kept]
        path.write_text(json.dumps(content))
    options = ["trainer.batch_size=2", "model.score_threshold=0.0", "model.detections_per_image=9"]
    one, *others = (tmp_path / name for name in ("one", "ddp", "fsdp2"))
    said = launch(
        (1, command(data, one, *options)),
        *((2, command(data, run, *options, f"trainer.parallel={run.name}")) for run in others),
    )
    assert said.count("2 processes") == 2
    for run in others:
        assert_same(run, one)


def assert_same(two: Path, one: Path) -> None:
    """Equal up to the order in which numbers are added."""
    for key in ("loss", "grad_norm", "classification", "test_AP"):
        assert history(two, key) == pytest.approx(history(one, key), rel=1e-4, abs=1e-6), key
    found = [json.loads((run / "detections.json").read_text()) for run in (one, two)]
    assert [(r["image_id"], r["category_id"]) for r in found[0]] == [
        (r["image_id"], r["category_id"]) for r in found[1]
    ]
    assert len({record["image_id"] for record in found[1]}) == len(
        json.loads((two / "annotations.json").read_text())["images"]
    )
    assert [record["score"] for record in found[0]] == pytest.approx([r["score"] for r in found[1]], rel=1e-3)
