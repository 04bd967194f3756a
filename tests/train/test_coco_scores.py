"""Scores are those of pycocotools run by hand; three ways of counting agree; what is wrong is named."""

import contextlib
import importlib.metadata
import io
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tests.refusals import refuses
from train import coco_scores
from train.coco_scores import BrokenPackage, score

TWELVE = (
    *("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large"),
    *("AR_1", "AR_10", "AR_100", "AR_small", "AR_medium", "AR_large"),
)
Truth = dict[str, Any]
Results = list[dict[str, Any]]


def by_hand(folder: Path, truth: Truth, results: Results, kind: str = "bbox") -> list[float]:
    """The twelve numbers that pycocotools makes of two files."""
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "results.json").write_text(json.dumps(results))
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO(str(folder / "truth.json"))
        evaluation = COCOeval(known, known.loadRes(str(folder / "results.json")), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(number) for number in evaluation.stats]


def drawn(seed: int, num_images: int = 6, num_categories: int = 3) -> tuple[Truth, Results]:
    """Objects and detections with many ties: sides at the bounds of the area ranges, few scores, whole pixels; crowds among them.

    The last category has no objects, and the last image neither objects nor detections.
    """
    rng = np.random.default_rng(seed)

    def box() -> list[int]:
        sides = rng.choice([8, 32, 40, 96], 2) + rng.integers(-1, 2, 2) * rng.integers(0, 2)
        return [*rng.integers(0, 40, 2).tolist(), *sides.tolist()]

    annotations: Results = []
    results: Results = []
    for image_id in range(1, num_images):
        for _ in range(rng.integers(0, 6)):
            x, y, w, h = box()
            category_id = int(rng.integers(1, num_categories))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category_id,
                    "bbox": [x, y, w, h],
                    "area": float(rng.choice([w * h, 32**2, 96**2, 500])),
                    "iscrowd": int(rng.random() < 0.2),
                    "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                }
            )
        for _ in range(rng.integers(0, 9)):
            near = annotations[rng.integers(len(annotations))]["bbox"] if annotations and rng.random() < 0.7 else box()
            x, y, w, h = (max(0, side + int(rng.integers(-1, 2))) for side in near)
            mask = np.zeros((160, 160), dtype=np.uint8, order="F")
            mask[y : y + h, x : x + w] = 1
            rle = masks.encode(mask)
            results.append(
                {
                    "image_id": image_id,
                    "category_id": int(rng.integers(1, num_categories + 1)),
                    "bbox": [x, y, w, h],
                    "score": int(rng.integers(0, 4)) / 4,
                    "segmentation": {"size": rle["size"], "counts": rle["counts"].decode()},
                }
            )
    images = [{"id": number, "height": 160, "width": 160} for number in range(1, num_images + 1)]
    categories = [{"id": number, "name": f"thing {number}"} for number in range(1, num_categories + 1)]
    return {"images": images, "annotations": annotations, "categories": categories}, results


def numbers(scores: dict[str, Any]) -> list[float]:
    assert [type(value) for key, value in scores.items() if key != "per_class"] == [float] * (len(scores) - 1)
    return [value for key, value in scores.items() if key != "per_class"] + list(scores["per_class"].values())


def perfect(truth: Truth) -> Results:
    keys = ("image_id", "category_id", "bbox")
    return [{key: thing[key] for key in keys} | {"score": 0.5} for thing in truth["annotations"]]


@pytest.mark.parametrize("backend", ["pycocotools", "faster_coco_eval", "numpy"])
@pytest.mark.parametrize("limits", [(1, 10, 100), (2,), (3, 1)])
def test_all_ways_of_counting_agree(backend: Any, limits: tuple[int, ...], tmp_path: Path) -> None:
    if backend == "faster_coco_eval":
        pytest.importorskip("faster_coco_eval")
    seen = set()
    for seed in range(10):
        truth, results = drawn(seed)
        scores = score(truth, results, max_detections=limits, backend=backend)
        if len(limits) == 3:
            assert tuple(scores) == (*TWELVE, "per_class")
            assert numbers(scores)[:12] == pytest.approx(by_hand(tmp_path, truth, results), abs=1e-9)
        reference = score(truth, results, max_detections=limits)
        assert scores.keys() == reference.keys()
        assert scores["per_class"].keys() == reference["per_class"].keys() == {"thing 1", "thing 2", "thing 3"}
        assert numbers(scores) == pytest.approx(numbers(reference), abs=1e-9)
        assert scores["per_class"]["thing 3"] == -1
        seen.add(round(scores["AP"], 6))
    assert len(seen) > 7


@pytest.mark.parametrize("backend", ["pycocotools", "faster_coco_eval"])
def test_masks(backend: Any, tmp_path: Path) -> None:
    if backend == "faster_coco_eval":
        pytest.importorskip("faster_coco_eval")
    for seed in range(4):
        truth, results = drawn(seed)
        expected = by_hand(tmp_path, truth, results, "segm")
        assert numbers(score(truth, results, "segm", backend=backend))[:12] == pytest.approx(expected, abs=1e-9)
        alone = [{key: value for key, value in found.items() if key != "bbox"} for found in results]
        expected = by_hand(tmp_path, truth, alone, "segm")
        assert numbers(score(truth, alone, "segm", backend=backend))[:12] == pytest.approx(expected, abs=1e-9)
        for thing in truth["annotations"]:  # as runs
            x, y, w, h = thing["bbox"]
            mask = np.zeros((160, 160), dtype=bool)
            mask[y : y + h, x : x + w] = True
            runs = [sum(1 for _ in run) for _, run in itertools.groupby([False, *mask.T.ravel().tolist()])]
            thing["segmentation"] = {"size": [160, 160], "counts": [runs[0] - 1, *runs[1:]]}
        assert numbers(score(truth, alone, "segm", backend=backend))[:12] == pytest.approx(expected, abs=1e-9)


def test_the_area_of_a_mask_stands_in_for_a_missing_one() -> None:
    triangle = {
        "id": 1,
        "image_id": 1,
        "category_id": 1,
        "bbox": [0, 0, 40, 40],
        "segmentation": [[0, 0, 40, 0, 0, 40]],
    }
    truth = {
        "images": [{"id": 1, "height": 50, "width": 60}],
        "annotations": [triangle],
        "categories": [{"id": 1, "name": "sail"}],
    }
    (rle,) = masks.frPyObjects(triangle["segmentation"], 50, 60)
    found = [{"image_id": 1, "category_id": 1, "score": 1, "segmentation": rle, "bbox": [0, 0, 40, 40]}]
    assert 700 < masks.area(rle) < 1024 < 40 * 40
    assert score(truth, found, "segm")["AP_small"] == score(truth, found)["AP_medium"] == 1
    assert score(truth, found, "segm")["AP_medium"] == score(truth, found)["AP_small"] == -1


@pytest.mark.parametrize("backend", ["pycocotools", "faster_coco_eval", "numpy"])
def test_i2_perfect_none_and_nothing_to_find(backend: Any, capfd: pytest.CaptureFixture[str]) -> None:
    if backend == "faster_coco_eval":
        pytest.importorskip("faster_coco_eval")
    truth, results = drawn(2)
    for things in (truth["annotations"], truth["annotations"][:1]):  # pycocotools itself says 0.9999999999999998 of one
        less = truth | {"annotations": [thing | {"iscrowd": 0} for thing in things]}
        scores = score(less, perfect(less), backend=backend)
        assert scores["AP"] == scores["AP50"] == scores["AP75"] == scores["AR_100"] == 1
        nothing = score(less, [], backend=backend)
        assert nothing["AP"] == nothing["AP50"] == nothing["AR_1"] == nothing["AR_100"] == 0
        assert [value == 0 for value in numbers(nothing)] == [value > 0 for value in numbers(scores)]
    for missing in (
        score(truth | {"annotations": []}, results, backend=backend),
        score(truth | {"annotations": []}, [], backend=backend),
        score({"images": [], "annotations": [], "categories": []}, [], backend=backend),
        score(truth | {"annotations": []}, [], backend=backend, image_ids=[]),
        score(truth, results, backend=backend, image_ids=[]),
    ):
        assert set(numbers(missing)) == {-1}
    assert capfd.readouterr() == ("", "")


def test_i3_missing_keys_have_defaults() -> None:
    truth, results = drawn(4)
    whole = [thing | {"iscrowd": 0, "area": math.prod(thing["bbox"][2:])} for thing in truth["annotations"]]
    expected = score(truth | {"annotations": whole, "info": {}, "licenses": []}, results)
    keys = ("image_id", "category_id", "bbox")
    bare = [{key: thing[key] for key in keys} for thing in whole]
    minimal = {"images": [{"id": image["id"]} for image in truth["images"]], "annotations": bare}
    minimal["categories"] = [{"id": category["id"]} for category in truth["categories"]]
    found = [{key: result[key] for key in (*keys, "score")} for result in results]
    for backend in ("pycocotools", "numpy"):
        scores = score(minimal, found, backend=backend)  # type: ignore[arg-type]
        assert numbers(scores) == numbers(expected)
        assert list(scores["per_class"]) == ["1", "2", "3"]
    empty = [thing | {"iscrowd": None, "area": None} for thing in bare]
    assert numbers(score(minimal | {"annotations": empty}, found)) == numbers(expected)


def test_i5_ap_uses_the_largest_limit() -> None:
    boxes = [[20 * (place % 15), 20 * (place // 15), 10, 10] for place in range(150)]
    truth = {
        "images": [{"id": 1}],
        "categories": [{"id": 1, "name": "cell"}],
        "annotations": [{"id": place, "image_id": 1, "category_id": 1, "bbox": box} for place, box in enumerate(boxes)],
    }
    found = perfect(truth)
    for backend in ("pycocotools", "numpy"):
        scores = score(truth, found, max_detections=(1, 10, 300), backend=backend)  # type: ignore[arg-type]
        assert scores["AP"] == scores["AP50"] == scores["AP_small"] == scores["AR_300"] == scores["AR_small"] == 1
        assert (scores["AR_1"], scores["AR_10"]) == pytest.approx((1 / 150, 10 / 150))
        assert "AR_100" not in scores
        few = score(truth, found, backend=backend)  # type: ignore[arg-type]
        assert few["AR_100"] == pytest.approx(100 / 150)
        assert few["AP"] == pytest.approx(67 / 101)  # of the recalls 0, 0.01 ... those up to two thirds


def test_ids_may_be_anything() -> None:
    truth, results = drawn(6)
    expected = numbers(score(truth, results))
    for image_id, category_id in (
        (lambda number: number - 1, lambda number: number - 1),
        (lambda number: 1000 * number, lambda number: 7 * number),
        (lambda number: f"photo {number}", lambda number: f"kind {number}"),
        (lambda number: np.int64(number), lambda number: number if number < 3 else "rare"),
    ):

        def renamed(items: Results, image_id: Any = image_id, category_id: Any = category_id) -> Results:
            return [
                item | {"image_id": image_id(item["image_id"]), "category_id": category_id(item["category_id"])}
                for item in items
            ]

        other = {
            "images": [image | {"id": image_id(image["id"])} for image in reversed(truth["images"])],
            "annotations": [thing | {"id": thing["id"] - 1} for thing in renamed(truth["annotations"])],
            "categories": [kind | {"id": category_id(kind["id"])} for kind in reversed(truth["categories"])],
        }
        for backend in ("pycocotools", "numpy"):
            scores = score(other, renamed(results), backend=backend)  # type: ignore[arg-type]
            assert numbers(scores) == pytest.approx(expected, abs=1e-9)
            assert list(scores["per_class"]) == ["thing 1", "thing 2", "thing 3"]


def test_names_that_are_there_twice_are_told_apart() -> None:
    truth, results = drawn(6)
    truth["categories"] = [{"id": 1, "name": "bat"}, {"id": 2, "name": "bat"}, {"id": 3, "name": "ball"}]
    assert list(score(truth, results)["per_class"]) == ["bat (1)", "bat (2)", "ball"]


def test_a_part_of_the_images() -> None:
    truth, results = drawn(7)
    part = {1, 3, 4}
    alone = truth | {
        "images": [image for image in truth["images"] if image["id"] in part],
        "annotations": [thing for thing in truth["annotations"] if thing["image_id"] in part],
    }
    expected = score(alone, [found for found in results if found["image_id"] in part])
    assert score(truth, results, image_ids=iter([4, 3, 1, 1])) == expected != score(truth, results)


def test_a_second_detection_of_the_same_object_is_wrong() -> None:
    truth, _ = drawn(8)
    truth["annotations"] = [thing | {"iscrowd": 0} for thing in truth["annotations"]]
    twice = [found | {"score": 0.9} for found in perfect(truth)] + perfect(truth)
    assert score(truth, twice)["AP"] == 1  # all right ones come first
    half = score(truth, twice + [found | {"score": 0.95} for found in perfect(truth)[:1]])
    assert half["AP"] < 1
    assert half["AR_100"] == 1


def test_numpy_numbers_are_numbers() -> None:
    truth, results = drawn(9)
    other = [found | {"bbox": np.asarray(found["bbox"]), "score": np.float32(found["score"])} for found in results]
    assert score(truth, other) == score(truth, results)
    assert isinstance(results[0]["bbox"], list)


def test_what_is_given_stays_as_it_is() -> None:
    truth, results = drawn(10)
    before = json.dumps([truth, results])
    for kind, backend in (("bbox", "pycocotools"), ("segm", "pycocotools"), ("bbox", "numpy")):
        score(truth, results, kind, backend=backend)  # type: ignore[arg-type]
        assert json.dumps([truth, results]) == before


ABSENT = object()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("image_id", 9, r"results\[3\]: image 9 is not in the truth, which has the images 1, 2, 3, 4, 5, 6$"),
        ("image_id", "2", r"results\[3\]: image '2' is not in the truth, .*; did you mean 2\?"),
        ("image_id", ABSENT, r"results\[3\]: image None is not in the truth"),
        ("image_id", [1], r"results\[3\]: image \[1\] is not in the truth"),
        ("category_id", 0, r"results\[3\]: category 0 is not in the truth, which has the categories 1, 2, 3$"),
        ("score", math.nan, r"results\[3\]: score = nan: must be a finite number"),
        ("score", math.inf, "score = inf"),
        ("score", ABSENT, r"results\[3\]: score = None"),
        ("bbox", [1, 2, -3, 4], r"results\[3\] \(image 1\): bbox = \[1, 2, -3, 4\]: must be .* sides of at least 0"),
        ("bbox", [1, 2, 3, math.nan], r"results\[3\] \(image 1\): bbox = .* must be four finite numbers"),
        ("bbox", [1, 2, 3], "must be four finite numbers"),
        ("bbox", ["a", 2, 3, 4], "must be four finite numbers"),
        ("bbox", ABSENT, "bbox = None"),
    ],
)
def test_wrong_results_are_named(key: str, value: Any, message: str) -> None:
    truth, results = drawn(0)
    results[3]["image_id"] = 1
    if value is ABSENT:
        del results[3][key]
    else:
        results[3][key] = value
    for backend in ("pycocotools", "numpy"):
        with refuses(message):
            score(truth, results, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": ABSENT}, "the truth has no list of dicts images"),
        ({"categories": None}, "no list of dicts categories"),
        ({"annotations": {"1": {}}}, "no list of dicts annotations"),
        ({"images": ["a.png"]}, "no list of dicts images"),
        ({"images": [{"id": 1}, {"id": 2}, {"id": 1}]}, "has the image id 1 twice"),
        ({"categories": [{"id": "a"}, {"id": "a"}]}, "has the category id 'a' twice"),
        ({"images": [{"file_name": "a.png"}]}, "has the image id None; must be a whole number or a string"),
        ({"categories": [{"id": [1]}]}, r"has the category id \[1\]; must be"),
        (
            {"annotations": [{"id": 5, "image_id": 77, "category_id": 1, "bbox": [0, 0, 1, 1]}]},
            "the truth's annotation 5: image 77 is not in the truth",
        ),
        (
            {"annotations": [{"id": 5, "image_id": 1, "category_id": 9, "bbox": [0, 0, 1, 1]}]},
            "the truth's annotation 5: category 9 is not in the truth",
        ),
        (
            {"annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, -1, 1]}]},
            r"the truth's annotations\[0\] \(image 1\): bbox = \[0, 0, -1, 1\]",
        ),
        (
            {"annotations": [{"id": 5, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1], "area": "big"}]},
            "the truth's annotation 5: area = 'big': must be a finite number",
        ),
    ],
)
def test_a_wrong_truth_is_named(change: dict[str, Any], message: str) -> None:
    truth, _ = drawn(0)
    truth = {key: value for key, value in (truth | change).items() if value is not ABSENT}
    with refuses(message):
        score(truth, [])


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        (None, r"results\[0\] \(image 1\): its segmentation must be RLE"),
        ([], "must be RLE"),
        ([[1, 2, 3, 4]], "must be RLE"),
        ([[1, 2, 3, 4, 5, 6, 7]], "must be RLE"),
        ([1, 2, 3, 4, 5, 6], "must be RLE"),
        ({"size": [80, 160], "counts": "abc"}, r"has a mask of 80x160, its image is 160x160"),
        ({"size": [160, 160], "counts": [5, 6]}, "has runs of 11 pixels, the image has 25600"),
        ({"size": [160, 160], "counts": "56"}, "has runs of 11 pixels, the image has 25600"),
        ({"size": [160, 160], "counts": b"56"}, "has runs of 11 pixels, the image has 25600"),
        ({"size": [160, 160], "counts": [25700, -100]}, "has runs of 25600 pixels"),
        (
            {"size": [160, 160], "counts": "no runs"},
            r"results\[0\] \(image 1\): counts = 'no runs': are no run lengths",
        ),
    ],
)
def test_wrong_masks_are_named(segmentation: Any, message: str) -> None:
    truth, results = drawn(0)
    results = [results[0] | {"image_id": 1, "segmentation": segmentation}]
    with refuses(message):
        score(truth, results, "segm")
    if segmentation is None:
        with refuses("the truth's image 1 has no height and width, which masks need"):
            score(truth | {"images": [{"id": number} for number in range(1, 7)], "annotations": []}, results, "segm")


def test_wrong_options() -> None:
    truth, results = drawn(0)
    for options, message in (
        ({"kind": "box"}, r"score: kind = 'box': unknown kind; did you mean bbox\? Allowed: bbox, segm"),
        ({"backend": "cocotools"}, "unknown backend; did you mean pycocotools"),
        ({"kind": "segm", "backend": "numpy"}, "backend = 'numpy' scores boxes alone"),
        ({"max_detections": ()}, r"max_detections = \(\): must be whole numbers of at least 1"),
        ({"max_detections": (0, 10)}, r"max_detections = \(0, 10\)"),
        ({"max_detections": (1.5,)}, r"max_detections = \(1\.5,\)"),
        ({"image_ids": [1, 99]}, "image_ids: image 99 is not in the truth"),
    ):
        with refuses(message):
            score(truth, results, **options)  # type: ignore[arg-type]
    with refuses("results must be a list of dicts"):
        score(truth, {"annotations": results})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reason",
    [
        ValueError("numpy.dtype size changed, may indicate binary incompatibility"),
        AttributeError("module 'numpy' has no attribute 'float'"),
        ImportError("numpy.core.multiarray failed to import"),
    ],
)
def test_i6_a_wheel_that_does_not_fit_says_so_and_numpy_goes_on(
    reason: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, results = drawn(0)
    expected = score(truth, results)
    (tmp_path / "pycocotools").mkdir()
    (tmp_path / "pycocotools" / "__init__.py").write_text(f"raise {reason!r}\n")
    for module in [name for name in sys.modules if name.partition(".")[0] == "pycocotools"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    installed = importlib.metadata.version("pycocotools")
    for kind in ("bbox", "segm"):
        with pytest.raises(BrokenPackage) as caught:
            score(truth, results, kind)  # type: ignore[arg-type]
        told = str(caught.value)
        assert f"pycocotools {installed} does not work with numpy {np.__version__} ({type(reason).__name__}: " in told
        assert str(reason) in told
        assert "or use backend = 'numpy'" in told
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ImportError)
    assert numbers(score(truth, results, backend="numpy")) == pytest.approx(numbers(expected), abs=1e-9)


def test_a_wheel_that_fails_in_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, results = drawn(0)

    def old(self: COCOeval) -> None:
        np.linspace(0.5, 0.95, np.round(10.0))  # type: ignore[call-overload]

    monkeypatch.setattr(COCOeval, "evaluate", old)
    with refuses(r"pycocotools \S+ does not work with numpy \S+ \(TypeError: .*or use backend = 'numpy'"):
        score(truth, results)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    truth, results = drawn(0)
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core.coco", None)
    monkeypatch.setattr(coco_scores, "version", missing)
    with refuses("needs the package faster-coco-eval: pip install faster-coco-eval; or use backend = 'numpy'"):
        score(truth, results, backend="faster_coco_eval")
