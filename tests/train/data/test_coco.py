"""COCO json: right files are read exactly, and everything that can be wrong in one is told, counted or refused."""

import io
import json
import pickle
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask
from pycocotools.coco import COCO

from tests.train.data.coco_folder import PLAIN, box, categories, coco, content, image, load, write_split
from train.data.masks import unpacked
from train.data.stream import DamagedExample, TooManyDamaged
from train.schema import validate


def test_a_plain_file(tmp_path: Path) -> None:
    data = load(tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.category_ids == (1, 2)
    assert (len(data.train), len(data.test), data.has_masks, data.left_out, data.max_damaged) == (2, 2, False, {}, 10)
    assert data.train.image_ids == (7, 3)  # in the order of the file
    assert data.train.aspect_ratios.tolist() == [40 / 60, 30 / 50]
    pixels, target = data.train[0]
    assert (pixels.shape, pixels.dtype) == ((3, 40, 60), torch.float32)
    assert torch.equal(pixels, torch.full((3, 40, 60), 90.0) / 255)
    assert target["boxes"].dtype == torch.float32
    assert target["boxes"].tolist() == [[5, 6, 25, 16]]
    assert (target["labels"].tolist(), target["labels"].dtype) == ([1], torch.int64)
    assert (target["image_id"].item(), target["image_id"].dtype, target["image_id"].shape) == (0, torch.int64, ())
    assert set(target) == {"boxes", "labels", "image_id"}
    assert data.test[1][1]["boxes"].tolist() == [[0, 0, 50, 30]]
    assert data.test[1][1]["labels"].tolist() == [2]


def test_the_truth_is_coco_json_of_the_test_split_with_its_defaults(tmp_path: Path) -> None:
    val = content(
        [image(7, scene="a"), image(3)],
        [
            box(11, 3, [1, 2, 3, 4], 2),
            box(12, 7, [0, 0, 9, 9], area=50.5, iscrowd=1),
            box(13, 7, [5, 5, 0, 9]),
        ],
    )
    data = load(tmp_path, val=val)
    assert data.truth["info"] == {}
    assert data.truth["categories"] == categories("cat", "dog")
    assert data.truth["images"] == val["images"]
    assert data.truth["annotations"] == [
        {"id": 11, "image_id": 3, "category_id": 2, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0},
        {"id": 12, "image_id": 7, "category_id": 1, "bbox": [0, 0, 9, 9], "area": 50.5, "iscrowd": 1},
    ]
    assert data.left_out == {"test: boxes of no area": 1, "test: crowds, which are no targets": 1}
    (tmp_path / "truth.json").write_text(json.dumps(data.truth))
    with redirect_stdout(io.StringIO()):
        assert len(COCO(str(tmp_path / "truth.json")).getAnnIds()) == 2
    assert data.test[0][1]["boxes"].shape == (0, 4)  # of image 7 there is only the crowd


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 1, 2], (0, 1, 2)),
        ([90, 1, 13], (1, 13, 90)),
        (["b", "10", "9"], ("10", "9", "b")),
        ([2.0, -1, 10], (-1, 2, 10)),
    ],
)
def test_h3_ids_become_labels_from_1_in_their_order(tmp_path: Path, ids: list[Any], expected: tuple[Any, ...]) -> None:
    names = [{"id": id, "name": f"name {id}"} for id in ids]
    given = content([image(id) for id in ids], [box(id, id, [0, 0, 5, 5], id) for id in ids], names)
    data = load(tmp_path, given, given)
    assert data.category_ids == expected
    assert [type(id) for id in data.category_ids] == [type(id) for id in expected]
    assert data.classes == tuple(f"name {next(own for own in ids if own == id)}" for id in expected)
    for index, id in enumerate(ids):
        assert data.train.image_ids[index] == id
        assert data.train[index][1]["labels"].tolist() == [expected.index(id) + 1]
    assert sorted(a["category_id"] for a in data.truth["annotations"]) == list(expected)
    found = [a["id"] for a in data.truth["annotations"]]
    usable = all(isinstance(id, int) and id > 0 for id in ids)  # pycocotools takes an id of 0 for no match
    assert found == (ids if usable else [1, 2, 3])


def test_h4_80_categories_with_ids_up_to_90_have_80_labels(tmp_path: Path) -> None:
    ids = [id for id in range(1, 91) if id not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]  # COCO's own
    names = [{"id": id, "name": f"name {id}"} for id in reversed(ids)]
    given = content([image(1)], [box(id, 1, [0, 0, 5, 5], id) for id in ids], names)
    data = load(tmp_path, given, given)
    assert data.category_ids == tuple(ids)
    assert data.train[0][1]["labels"].tolist() == list(range(1, 81))
    assert data.classes[79] == "name 90"
    assert [a["category_id"] for a in data.truth["annotations"]] == ids


def test_annotations_without_ids_are_numbered(tmp_path: Path) -> None:
    bare = [
        {"image_id": 7, "category_id": 1, "bbox": [1, 1, 5, 5]},
        {"image_id": 3, "category_id": 2, "bbox": [1, 1, 5, 5]},
    ]
    data = load(tmp_path, val=content(PLAIN["images"], bare))
    assert [a["id"] for a in data.truth["annotations"]] == [1, 2]


def broken(**changes: Any) -> dict[str, Any]:
    """The plain file with other lists; an annotation, image or category changed by `annotation=`, `entry=` or `kind=`."""
    given = json.loads(json.dumps(PLAIN))
    for key, where in (("annotation", "annotations"), ("entry", "images"), ("kind", "categories")):
        given[where][0].update(changes.pop(key, {}))
    return {key: value for key, value in (given | changes).items() if value is not ...}


FAULTS = [
    (broken(images=...), r"must have a list 'images'; there is annotations, categories"),
    (broken(annotations=...), r"must have a list 'annotations'"),
    (broken(categories=...), r"must have a list 'categories'"),
    (broken(categories=[]), r"'categories' is empty"),
    (broken(images=[]), r"image_id = 7 is none of the 0 in the file"),
    (broken(images={}), r"must have a list 'images'; it is \{\}"),
    (broken(annotations=[3]), r"annotations\[0\] = 3: must be an object"),
    ({}, r"must have a list 'categories'; there is no key"),
    ([], r"no COCO json: it must be an object with images, annotations and categories, and is a list"),
    ("{", r"no COCO json \("),
    (broken(kind={"id": True}), r"categories\[0\]: id = True must be a whole number or a text"),
    (broken(kind={"id": 1.5}), r"categories\[0\]: id = 1.5 must be"),
    (broken(kind={"id": None}), r"categories\[0\]: id = None must be"),
    (broken(kind={"id": [1]}), r"categories\[0\]: id = \[1\] must be"),
    (broken(categories=[{"name": "cat"}]), r"categories\[0\]: id = missing must be"),
    (broken(kind={"id": 2}), r"categories: id 2 is there 2 times"),
    (broken(kind={"id": "1"}), r"categories: ids must be all numbers or all texts, and there are 2 and '1'"),
    (broken(kind={"name": "dog"}), r"categories 1, 2 have the same name 'dog'"),
    (broken(kind={"name": 4}), r"category 1: name = 4 must be a text"),
    (broken(kind={"name": ""}), r"category 1: name = '' must be a text"),
    (broken(entry={"id": 3}), r"images: id 3 is there 2 times"),
    (broken(entry={"id": "7"}), r"images: ids must be all numbers or all texts"),
    (broken(entry={"file_name": None}), r"image 7: file_name = None must be a text"),
    (broken(entry={"file_name": ""}), r"image 7: file_name = '' must be a text"),
    (broken(entry={"file_name": "\ud800.png"}), r"image 7: file_name = .* must be a text"),
    (broken(entry={"width": 0}), r"image 7: width = 0 must be a whole number from 1"),
    (broken(entry={"width": "60"}), r"image 7: width = '60' must be a whole number from 1"),
    (broken(entry={"height": 40.5}), r"image 7: height = 40.5 must be a whole number from 1"),
    (broken(entry={"height": float("nan")}), r"image 7: height = nan must be a whole number from 1"),
    (
        broken(entry={"height": None, "file_name": "no.png"}),
        r"image 7: it has no height and width, and its file is not",
    ),
    (broken(annotation={"id": 2}), r"annotations: id 2 is there 2 times"),
    (broken(annotation={"id": False}), r"annotations\[0\]: id = False must be"),
    (broken(annotation={"image_id": 8}), r"annotation 1 of image 8: image_id = 8 is none of the 2 in the file$"),
    (broken(annotation={"image_id": "7"}), r"annotation 1 of image '7': image_id = '7' is none .*, only the number 7$"),
    (
        broken(annotation={"image_id": "7" * 5000}),
        r"annotation 1 of image '777.*7': image_id = '777.*7' is none .* file$",
    ),
    (broken(annotation={"image_id": None}), r"annotation 1 of image None: image_id = None is none"),
    (broken(annotation={"image_id": True}), r"annotation 1 of image True: image_id = True is none"),
    (broken(annotation={"category_id": 0}), r"annotation 1 of image 7: category_id = 0 is none of the 2 in the file$"),
    (
        broken(annotation={"category_id": "2"}),
        r"annotation 1 of image 7: category_id = '2' is none .* only the number 2",
    ),
    (broken(annotations=[{"id": 1, "bbox": [0, 0, 1, 1]}]), r"annotation 1 of image None: image_id = missing is none"),
    (
        broken(annotation={"bbox": [1, 2, 3]}),
        r"annotation 1 of image 7: bbox = \[1, 2, 3\] must be four finite numbers",
    ),
    (broken(annotation={"bbox": [1, 2, 3, 4, 5]}), r"annotation 1 of image 7: bbox = .* must be four finite numbers"),
    (broken(annotation={"bbox": [1, 2, 3, "4"]}), r"annotation 1 of image 7: bbox = .* must be four finite numbers"),
    (broken(annotation={"bbox": [1, 2, 3, True]}), r"annotation 1 of image 7: bbox = .* must be four finite numbers"),
    (broken(annotation={"bbox": [1, 2, 3, None]}), r"annotation 1 of image 7: bbox = .* must be four finite numbers"),
    (broken(annotation={"bbox": [1, 2, 3, float("nan")]}), r"annotation 1 of image 7: bbox = .* must be four finite"),
    (broken(annotation={"bbox": [1, 2, float("inf"), 4]}), r"annotation 1 of image 7: bbox = .* must be four finite"),
    (broken(annotation={"bbox": [1, 2, 10**400, 4]}), r"annotation 1 of image 7: bbox = .* must be four finite"),
    (broken(annotation={"bbox": {"x": 1}}), r"annotation 1 of image 7: bbox = .* must be four finite numbers"),
    (
        broken(annotation={"bbox": None}),
        r"annotation 1 of image 7: it has neither bbox nor segmentation, only bbox, cat",
    ),
    (
        broken(annotation={"bbox": None, "segmentation": []}),
        r"annotation 1 of image 7: segmentation: \[\] must be a list",
    ),
    (broken(annotation={"iscrowd": 2}), r"annotation 1 of image 7: iscrowd = 2 must be 0 or 1"),
    (broken(annotation={"iscrowd": "yes"}), r"annotation 1 of image 7: iscrowd = 'yes' must be 0 or 1"),
    (broken(annotation={"area": -1}), r"annotation 1 of image 7: area = -1 must be a finite number, not negative"),
    (broken(annotation={"area": float("nan")}), r"annotation 1 of image 7: area = nan must be a finite number"),
    (
        broken(annotation={"bbox": [55, 0, 20, 20]}),
        r"annotation 1 of image 7: bbox = \[55.0, .* lies mostly outside .*60",
    ),
]


@pytest.mark.parametrize(("given", "message"), FAULTS)
def test_a_fault_is_told_with_its_ids(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, given)
    assert str(caught.value).startswith(str(tmp_path / "annotations" / "instances_train2017.json: "))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, PLAIN, given)


def test_faults_are_told_together(tmp_path: Path) -> None:
    annotations = [box(id, 7, [0, 0, "1", 1]) for id in range(1, 14)]
    with pytest.raises(ValueError, match="13 problems\n  - annotation 1 of image 7") as caught:
        load(tmp_path, content([image(7)], annotations))
    assert str(caught.value).endswith("and 3 more")
    assert str(caught.value).count("\n") == 11


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train2017: no such folder; the images of .*instances_train2017.json"):
        coco(tmp_path).load(seed=0)
    (tmp_path / "train2017").mkdir()
    with pytest.raises(ValueError, match=r"instances_train2017.json: no readable file of annotations \(No such file"):
        coco(tmp_path).load(seed=0)
    with pytest.raises(ValueError, match=r"there is no training image$"):
        load(tmp_path, content([], []))
    with pytest.raises(ValueError, match=r"there is no test image$"):
        load(tmp_path, PLAIN, content([], []))


def test_null_is_missing_where_something_may_be_missing(tmp_path: Path) -> None:
    bare = {"iscrowd": None, "area": None, "segmentation": None}
    data = load(tmp_path, val=broken(annotation=bare, info=None))
    assert data.truth["annotations"][0] | {"area": 200.0, "iscrowd": 0} == data.truth["annotations"][0]
    assert data.truth["info"] == {}


def test_height_and_width_may_be_read_from_the_file(tmp_path: Path) -> None:
    given = json.loads(json.dumps(PLAIN))
    write_split(tmp_path, "train", given)
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (40, 60)).save(tmp_path / "train2017" / "7.jpg", exif=turned)
    given["images"][0] = {"id": 7, "file_name": "7.jpg"}
    given["images"][1] |= {"width": None}
    data = load(tmp_path, given)
    assert data.train.objects.sizes.tolist() == [[40, 60], [30, 50]]
    assert data.train[0][0].shape == (3, 40, 60)
    assert data.left_out == {}


def test_j1_boxes_of_no_area_or_outside_are_counted_and_boxes_that_reach_out_are_cut(tmp_path: Path) -> None:
    boxes = {
        1: [5, 5, 0, 9],
        2: [5, 5, 9, -3],
        3: [5, 5, 1e-9, 9],  # float32 has no such width
        4: [60, 5, 5, 5],  # begins where the image ends
        5: [-9, 5, 9, 5],
        6: [100, 100, 5, 5],
        7: [0, 0, 60.15, 40.1],  # 1.0025 of the side
        8: [0, 0, 60, 41],  # counted from 1
        9: [-3, -3, 20, 20],
        10: [30, 20, 45, 25],  # by half and a little
        11: [59.5, 39.5, 1, 1],  # mostly outside, but by less than a pixel
        12: [0.1, 0.2, 59.9, 39.8],
        13: [59, 39, 1, 1],
    }
    given = content([image(1)], [box(id, 1, bbox) for id, bbox in boxes.items()])
    data = load(tmp_path, given, given)
    expected = [
        [0, 0, 60, 40],
        [0, 0, 60, 40],
        [0, 0, 17, 17],
        [30, 20, 60, 40],
        [59.5, 39.5, 60, 40],
        np.float32([0.1, 0.2, 60, 40]).tolist(),
        [59, 39, 60, 40],
    ]
    assert data.test[0][1]["boxes"].tolist() == expected
    counts = {"boxes of no area": 3, "boxes outside their image": 3, "boxes cut at the edge of their image": 5}
    assert data.left_out == {f"{split}: {why}": n for split in ("training", "test") for why, n in counts.items()}
    assert [a["id"] for a in data.truth["annotations"]] == [7, 8, 9, 10, 11, 12, 13]
    assert [a["bbox"] for a in data.truth["annotations"]][:2] == [[0, 0, 60, 40]] * 2
    assert [a["area"] for a in data.truth["annotations"]][:3] == [2400, 2400, 17 * 17]
    assert data.truth["annotations"][5]["bbox"] == pytest.approx(boxes[12], abs=1e-9)


def test_boxes_mostly_outside_may_be_left_out(tmp_path: Path) -> None:
    given = content([image(1)], [box(4, 1, [50, 0, 21, 10]), box(5, 1, [50, 0, 20, 10])])
    with pytest.raises(
        ValueError, match=r"annotation 4 of image 1: bbox .*data.mostly_outside = drop leaves such boxes"
    ):
        load(tmp_path, given)
    data = load(tmp_path, given, mostly_outside="drop")
    assert data.left_out["training: boxes mostly outside their image"] == 1
    assert data.train[0][1]["boxes"].tolist() == [[50, 0, 60, 10]]


def test_corners_in_place_of_width_and_height(tmp_path: Path) -> None:
    corners = [[10, 20, 30, 35], [30, 10, 60, 40], [0, 0, 5, 5]]
    given = content([image(1)], [box(id, 1, bbox) for id, bbox in enumerate(corners, 1)])
    with pytest.raises(
        ValueError, match=r"2 of 3 boxes reach far out .* 3 fit as x1, y1, x2, y2: .*annotation 1 of image 1"
    ):
        load(tmp_path, given)
    wrong = box(31, 1, [60, 10, 30, 40])  # neither
    nearly = content([image(1)], [wrong, *(box(id, 1, [30, 10, 60, 40]) for id in range(1, 30))])
    with pytest.raises(ValueError, match=r"30 of 30 boxes reach far out .* 29 fit as x1, y1, x2, y2"):
        load(tmp_path, nearly)
    given["annotations"].append(box(4, 1, [30, 20, 10, 10]))  # which cannot be two corners
    with pytest.raises(ValueError, match=r"annotation 2 of image 1: .* lies mostly outside"):
        load(tmp_path, given)
    fits_both_ways = content([image(1)], [box(1, 1, [0, 0, 62, 41]), box(2, 1, [1, 1, 20, 20])])
    assert load(tmp_path, fits_both_ways).left_out == {"training: boxes cut at the edge of their image": 1}


def test_shares_in_place_of_pixels(tmp_path: Path) -> None:
    given = content([image(1)], [box(9, 1, [0.5, 0.5, 0.25, 1.0]), box(10, 1, [0, 0, 1, 1])])
    with pytest.raises(
        ValueError, match=r"2 of 2 boxes have no number beyond 0..1, as if .* shares.*annotation 9 of image 1"
    ):
        load(tmp_path, given)
    rounded = content([image(1)], [box(id, 1, [0.1, 0.2, 0.5, 0.25]) for id in range(30)])
    rounded["annotations"][3]["bbox"] = [0, 0.5, 1.0025, 0.5]
    rounded["annotations"][7]["bbox"] = [0, 5, 20, 10]
    with pytest.raises(ValueError, match=r"29 of 30 boxes have no number beyond 0..1.*annotation 0 of image 1"):
        load(tmp_path, rounded)
    pixels = content([image(1)], [box(10, 1, [0, 0, 1, 1])])
    assert load(tmp_path, pixels).train[0][1]["boxes"].tolist() == [[0, 0, 1, 1]]


def test_h1_images_without_objects(tmp_path: Path) -> None:
    given = content([image(1), image(2), image(3)], [box(1, 2, [1, 1, 5, 5]), box(2, 3, [1, 1, 5, 5], iscrowd=1)])
    data = load(tmp_path, given, given)
    assert len(data.train) == 3
    empty = data.train[0][1]
    assert (empty["boxes"].shape, empty["boxes"].dtype) == ((0, 4), torch.float32)
    assert (empty["labels"].shape, empty["labels"].dtype) == ((0,), torch.int64)
    data = load(tmp_path, given, given, empty_images=False)
    assert data.train.image_ids == (2,)
    assert (data.train[0][1]["boxes"].tolist(), data.train[0][1]["image_id"].item()) == ([[1, 1, 6, 6]], 0)
    assert data.test.image_ids == (1, 2, 3)  # all that there is is tested
    assert data.left_out == {
        "training: crowds, which are no targets": 1,
        "training: images without objects": 2,
        "test: crowds, which are no targets": 1,
    }
    with pytest.raises(ValueError, match="there is no training image with an object"):
        load(tmp_path, content([image(1)], []), empty_images=False)


def test_h5_nothing_but_crowds_is_told(tmp_path: Path) -> None:
    crowds = content([image(1)], [box(1, 1, [1, 1, 5, 5], iscrowd=1)])
    with pytest.warns(UserWarning, match="instances_train2017.json: there is no training object, only crowds"):
        data = load(tmp_path, crowds)
    assert data.train[0][1]["boxes"].shape == (0, 4)
    with pytest.warns(UserWarning, match="instances_val2017.json: there is no test object$"):
        load(tmp_path, PLAIN, content([image(1)], []))


@pytest.mark.parametrize(
    ("val", "message"),
    [
        ([{"id": 1, "name": "dog"}], r"category 'dog' of id 1 is none to train on: 1 is 'cat' in .*train2017.json"),
        ([{"id": 5, "name": "dog"}], r"category 'dog' of id 5 is none to train on: 'dog' has the id 2 in .*train2017"),
        ([{"id": 3, "name": "cow"}], r"category 'cow' of id 3 is none .*: the training categories of .* are cat, dog"),
        ([{"id": "1", "name": "cat"}], r"category 'cat' of id '1' is none to train on: 'cat' has the id 1 in"),
    ],
)
def test_a_test_category_that_is_not_trained_on(tmp_path: Path, val: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, PLAIN, content([image(1)], [], val))


def test_test_categories_may_be_fewer_and_in_another_order(tmp_path: Path) -> None:
    names = [{"id": 9, "name": "ant"}, {"id": 4, "name": "bee"}, {"id": 6, "name": "cow"}]
    train = content([image(1)], [box(1, 1, [1, 1, 5, 5], 9)], names)
    val = content([image(1)], [box(1, 1, [1, 1, 5, 5], 9), box(2, 1, [1, 1, 5, 5], 6)], [names[0], names[2]])
    data = load(tmp_path, train, val)
    assert data.classes == ("bee", "cow", "ant")
    assert data.train[0][1]["labels"].tolist() == [3]
    assert data.test[0][1]["labels"].tolist() == [3, 2]
    assert [kind["id"] for kind in data.truth["categories"]] == [4, 6, 9]


def test_damaged_files_are_told_when_they_are_read_up_to_a_limit(tmp_path: Path) -> None:
    write_split(tmp_path, "train", content([image(id) for id in range(4)], [box(1, 3, [1, 1, 5, 5])]))
    write_split(tmp_path, "val", PLAIN)
    (tmp_path / "train2017" / "0.png").unlink()
    (tmp_path / "train2017" / "1.png").write_text("no image")
    Image.new("RGB", (59, 40)).save(tmp_path / "train2017" / "2.png")
    data = coco(tmp_path, max_damaged=3).load(seed=0)
    assert data.left_out == {"training: images that are not there, damaged, or of another size than annotated": 3}
    for index, reason in enumerate(
        ("No such file", "cannot identify", "59 pixels wide and 40 high, its annotations say 60")
    ):
        with pytest.raises(DamagedExample, match=rf"train2017/{index}.png: no readable image \(.*{reason}"):
            data.train[index]
    assert data.train[3][0].shape == (3, 40, 60)
    with pytest.raises(
        TooManyDamaged, match=r"3 damaged examples, data.max_damaged = 2 are allowed: .*0.png.*59 pixels"
    ):
        coco(tmp_path, max_damaged=2).load(seed=0)
    assert len(coco(tmp_path, max_damaged=2, check_files=False).load(seed=0).train) == 4
    (tmp_path / "train2017" / "3.png").unlink()
    with pytest.raises(ValueError, match=r"train2017.json: none of its 4 images can be read .*3.png: .*No such file"):
        coco(tmp_path).load(seed=0)


POLYGON = [10.0, 5.0, 30.0, 5.0, 30.0, 25.0, 10.0, 25.0]


def masks_of(tmp_path: Path, *segmentations: Any, **more: Any) -> Any:
    annotations = [box(id, 1, [10, 5, 20, 20], segmentation=s, **more) for id, s in enumerate(segmentations, 1)]
    given = content([image(1)], annotations)
    return load(tmp_path, given, given, masks=True)


def test_masks_of_polygons_and_run_lengths(tmp_path: Path) -> None:
    block = np.zeros((40, 60), dtype=np.uint8)
    block[5:25, 10:30] = 1
    text = {"size": [40, 60], "counts": mask.encode(np.asfortranarray(block))["counts"].decode()}
    counts = {"size": [40, 60], "counts": unpacked(text["counts"])}
    halves = [[10, 5, 30, 5, 30, 15, 10, 15], [10, 15, 30, 15, 30, 25, 10, 25]]
    data = masks_of(tmp_path, [POLYGON], halves, counts, text)
    target = data.train[0][1]
    assert (target["masks"].shape, target["masks"].dtype) == ((4, 40, 60), torch.uint8)
    assert all(torch.equal(found, torch.from_numpy(block)) for found in target["masks"])
    assert data.has_masks
    for annotation in data.truth["annotations"]:
        assert (annotation["segmentation"], annotation["area"]) == (text, 400)
    json.dumps(data.truth)
    assert masks_of(tmp_path, [POLYGON], area=7).truth["annotations"][0]["area"] == 7


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        (None, "it has no segmentation; data.masks = false trains on boxes alone"),
        ([], r"segmentation: \[\] must be a list of polygons, or run lengths"),
        (POLYGON, r"segmentation: 10.0 is no polygon"),
        ([[1, 2, 3, 4, 5, 6, 7]], r"is no polygon, a list x1, y1"),
        ([[1, 2, 3, 4, 5, "6"]], r"is no polygon, a list x1, y1"),
        ([[1, 2, 3, 4, 5, float("nan")]], r"is no polygon, a list x1, y1"),
        ([[1, 2, 3, 4, 5, 1e9]], r"1000000000.0 lies far out of the image, which is 60 wide and 40 high"),
        ({"size": [60, 40], "counts": [2400]}, r"size = \[60, 40\] must be height and width, \[40, 60\]"),
        ({"counts": [2400]}, r"size = None must be"),
        ({"size": [40, 60], "counts": [2399]}, r"counts sum up to 2399 pixels, and the image has 40 x 60"),
        ({"size": [40, 60], "counts": [2500, -100]}, r"are no run lengths"),
        ({"size": [40, 60], "counts": [1.5, 2398.5]}, r"are no run lengths"),
        ({"size": [40, 60]}, r"counts = None are no run lengths"),
        ({"size": [40, 60], "counts": ""}, r"counts sum up to 0 pixels"),
        ({"size": [40, 60], "counts": "\x00"}, r"are no run lengths"),
        ({"size": [40, 60], "counts": "P"}, r"are no run lengths"),
        ("all of it", r"'all of it' must be a list of polygons"),
    ],
)
def test_segmentations_that_are_none(tmp_path: Path, segmentation: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"annotation 1 of image 1: .*{message}"):
        masks_of(tmp_path, segmentation)


def test_polygons_of_two_points_or_on_a_line_or_outside_are_none(tmp_path: Path) -> None:
    two_points = [[10, 5, 30, 25]]  # pycocotools takes four numbers for a box
    line, outside = [[10, 5, 30, 5, 20, 5]], [[70, 50, 80, 50, 80, 60]]
    blank = {"size": [40, 60], "counts": [2000, 0, 400]}
    data = masks_of(tmp_path, [POLYGON, [1, 1, 9, 9]], two_points, [[]], line, outside, blank)
    assert data.left_out["training: segmentations without a pixel"] == 5
    assert data.train[0][1]["masks"].sum() == 400
    assert [a["id"] for a in data.truth["annotations"]] == [1]


def test_a_missing_box_is_that_of_the_segmentation(tmp_path: Path) -> None:
    run = mask.frPyObjects([POLYGON], 40, 60)[0]
    segmentations = [[POLYGON], {"size": [40, 60], "counts": run["counts"].decode()}, [[1, 2, 3, 4, 5, 9]]]
    annotations = [
        {"id": id, "image_id": 1, "category_id": 1, "segmentation": s} for id, s in enumerate(segmentations, 1)
    ]
    data = load(tmp_path, content([image(1)], annotations))
    assert data.train[0][1]["boxes"].tolist() == [[10, 5, 30, 25], [10, 5, 30, 25], [1, 2, 5, 9]]
    assert not data.has_masks


def test_a_crowd_with_a_mask_is_kept_for_scoring(tmp_path: Path) -> None:
    crowd = box(2, 1, [0, 0, 60, 40], iscrowd=1, segmentation={"size": [40, 60], "counts": [0, 2400]})
    given = content([image(1)], [crowd, box(1, 1, [10, 5, 20, 20], segmentation=[POLYGON])])
    data = load(tmp_path, given, given, masks=True)
    assert data.train[0][1]["masks"].sum() == 400
    assert [(a["id"], a["iscrowd"], a["area"]) for a in data.truth["annotations"]] == [(2, 1, 2400), (1, 0, 400)]


def test_many_objects_and_images_keep_their_places(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [image(id) for id in rng.permutation(20).tolist()]
    annotations = []
    for id in range(1, 1500):
        x, y = rng.integers(0, (50, 30)).tolist()
        owner = 5 if id <= 1000 else int(rng.integers(20))
        annotations.append(box(id, owner, [x, y, *rng.integers(1, 10, 2).tolist()], int(rng.integers(1, 3))))
    data = load(tmp_path, content(images, annotations), check_files=False)
    assert len(data.train.objects.labels) == 1499
    for index, image_id in enumerate(data.train.image_ids):
        own = [a for a in annotations if a["image_id"] == image_id]
        target = data.train[index][1]
        x, y, width, height = np.array([a["bbox"] for a in own]).reshape(-1, 4).T
        assert np.array_equal(target["boxes"].numpy(), np.stack([x, y, x + width, y + height], axis=1))
        assert target["labels"].tolist() == [a["category_id"] for a in own]
    again = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(again[0][1]["boxes"], data.train[0][1]["boxes"])


def test_other_places_and_wrong_options(tmp_path: Path) -> None:
    load(tmp_path)
    (tmp_path / "annotations" / "instances_train2017.json").rename(tmp_path / "my.json")
    (tmp_path / "train2017").rename(tmp_path / "photos")
    assert len(coco(tmp_path, train="photos", train_annotations="my.json").load(seed=3).train) == 2
    from train.data import DATA

    for options, message in (
        ({"path": "x", "trian": "y"}, "data.trian.*|trian.*did you mean train"),
        ({"path": ""}, "path = ''"),
        ({"path": "x", "scale": [2.0, 1.0]}, "must not be greater than the second"),
        ({"path": "x", "min_visibility": 1.5}, "min_visibility = 1.5"),
        ({"path": "x", "crop_size": 0}, "crop_size = 0"),
        ({"path": "x", "background": [0, 0, 300]}, "must lie in 0..255"),
        ({"path": "x", "mostly_outside": "clip"}, "must be 'refuse' or 'drop'"),
    ):
        node, problems = validate(DATA["coco"], {"name": "coco", **options})
        assert node is None
        assert re.search(message, problems[0]), problems
