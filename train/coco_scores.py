"""COCO's scores of found objects: pycocotools counts them, faster-coco-eval counts the same sooner, numpy alone does for boxes."""

import contextlib
import importlib
import io
import itertools
import math
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

import numpy as np

from train.data.masks import unpacked
from train.schema import nearest, unknown_name

Backend = Literal["pycocotools", "faster_coco_eval", "numpy"]
Kind = Literal["bbox", "segm"]

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of intersection over union
RECALLS = np.linspace(0, 1, 101)
AREAS = {"all": (0, 1e5**2), "small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e5**2)}  # square pixels

PARTS = {
    "pycocotools": {
        "data": "pycocotools.coco:COCO",
        "evaluator": "pycocotools.cocoeval:COCOeval",
        "mask": "pycocotools.mask",
    },
    "faster_coco_eval": {
        "data": "faster_coco_eval.core.coco:COCO",
        "evaluator": "faster_coco_eval.core.faster_eval_api:COCOeval_faster",
        "mask": "faster_coco_eval.core.mask",
    },
}
WITHOUT = "or use backend = 'numpy', which scores boxes without it"

Tables = tuple[np.ndarray, np.ndarray]  # precision (T, R, K, A, M), recall (T, K, A, M); -1 without objects


class BrokenPackage(ImportError, ValueError):
    """A package that counts is missing or does not work with what is installed beside it."""


def score(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    kind: Kind = "bbox",
    max_detections: Sequence[int] = (1, 10, 100),
    backend: Backend = "pycocotools",
    image_ids: Iterable[int | str] | None = None,
) -> dict[str, Any]:
    """The twelve numbers of COCO, and the AP of each class; -1 where there are no such objects.

    They are what pycocotools counts, but that ids may be strings, 0 or have gaps, and that AP uses the largest limit of detections
    whatever it is. Of truth may be missing: `info`, `iscrowd` (0), `area` (that of the box; of the mask for `segm`). The area of a
    detection is that of its `bbox`, and of its mask where it has none, as pycocotools reads results.

    Args:
        truth: COCO's json: images, annotations, categories.
        results: COCO's json: image_id, category_id, score, bbox [x, y, width, height] in pixels; segmentation (RLE) for `segm`.
        kind: what overlaps, boxes or masks.
        max_detections: how many detections count, of an image and a class, those of the highest scores.
        backend: what counts. faster_coco_eval is a package of its own, numpy needs none and knows boxes alone.
        image_ids: the images that count, all unless given.

    Returns:
        AP, AP50, AP75, AP_small, AP_medium, AP_large, AR_n of each limit n, AR_small, AR_medium, AR_large; per_class: AP by name.

    Raises:
        ValueError: the truth or the results are not as they must be; of what is wrong it names the first.
        BrokenPackage: also a ValueError; the backend is missing or does not work.
    """
    if kind not in get_args(Kind):
        raise ValueError(unknown_name("kind", kind, get_args(Kind), "score: kind"))
    if backend not in get_args(Backend):
        raise ValueError(unknown_name("backend", backend, get_args(Backend), "score: backend"))
    if kind == "segm" and backend == "numpy":
        raise ValueError(
            "score: backend = 'numpy' scores boxes alone; kind = 'segm' needs pycocotools or faster_coco_eval"
        )
    limits = sorted(set(max_detections))
    if not limits or not all(isinstance(limit, int | np.integer) and limit > 0 for limit in limits):
        raise ValueError(f"score: max_detections = {tuple(max_detections)!r}: must be whole numbers of at least 1")
    masks = None
    if kind == "segm":
        masks = import_part(backend, "mask")
    case = read_case(truth, results, masks, image_ids)
    if not case.images or not case.names:
        shape = len(THRESHOLDS), len(RECALLS), len(case.names), len(AREAS), len(limits)
        precision, recall = np.full(shape, -1.0), np.full((shape[0], *shape[2:]), -1.0)
    elif backend == "numpy":
        precision, recall = count(case, limits)
    else:
        precision, recall = count_by_package(backend, kind, case, limits)

    small, medium, large = range(1, len(AREAS))
    return {
        "AP": mean(precision[..., 0, -1]),
        "AP50": mean(precision[0, ..., 0, -1]),
        "AP75": mean(precision[5, ..., 0, -1]),
        "AP_small": mean(precision[..., small, -1]),
        "AP_medium": mean(precision[..., medium, -1]),
        "AP_large": mean(precision[..., large, -1]),
        **{f"AR_{limit}": mean(recall[..., 0, place]) for place, limit in enumerate(limits)},
        "AR_small": mean(recall[..., small, -1]),
        "AR_medium": mean(recall[..., medium, -1]),
        "AR_large": mean(recall[..., large, -1]),
        "per_class": {name: mean(precision[:, :, place, 0, -1]) for place, name in enumerate(case.names)},
    }


def mean(values: np.ndarray) -> float:
    """Of those that are there; -1 if none is. The packages add a hair to what they divide by: what lacks no more of 1 is 1."""
    there = values[values > -1]
    if not there.size:
        return -1.0
    found = float(there.mean())
    return 1.0 if abs(found - 1) < 1e-12 else found


@dataclass(frozen=True)
class Case:
    """Truth and results as all backends take them: checked, complete, with whole numbers from 1 as ids.

    Attributes:
        images: id and, for masks, height and width; sorted by the ids in the file, as this is the order among equal scores.
        names: of the categories, sorted by their ids in the file; with the id where a name is there twice.
        objects: id, image_id, category_id, bbox, area, iscrowd and, for masks, segmentation (compressed RLE).
        detections: the same, with score.
    """

    images: list[dict[str, Any]]
    names: list[str]
    objects: list[dict[str, Any]]
    detections: list[dict[str, Any]]


def read_case(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    masks: Any | None,
    image_ids: Iterable[int | str] | None,
) -> Case:
    """Checks and completes what is to be scored. `masks`: the module that reads masks, where these are scored.

    Raises:
        ValueError: with what is wrong and where.
    """
    for key in ("images", "annotations", "categories"):
        if not isinstance(truth.get(key), list | tuple) or not all(isinstance(item, Mapping) for item in truth[key]):
            raise ValueError(f"score: the truth has no list of dicts {key}; it must be COCO's json of annotations")
    if isinstance(results, Mapping | str) or not all(isinstance(result, Mapping) for result in results):
        raise ValueError("score: results must be a list of dicts: image_id, category_id, bbox, score")
    image_number = numbered([image.get("id") for image in truth["images"]], "image")
    category_number = numbered([category.get("id") for category in truth["categories"]], "category")
    image_of = {image["id"]: image for image in truth["images"]}
    category_of = {category["id"]: category for category in truth["categories"]}
    wanted = set(image_number)
    if image_ids is not None:
        wanted = set(image_ids)
        for image_id in wanted:
            look_up(image_id, image_number, "image", "image_ids")

    def read(item: Mapping[str, Any], where: str) -> tuple[dict[str, Any], float | None, float | None]:
        """What annotations and results have in common, and the areas of box and mask where there is one."""
        thing: dict[str, Any] = {
            "image_id": look_up(item.get("image_id"), image_number, "image", where),
            "category_id": look_up(item.get("category_id"), category_number, "category", where),
            "iscrowd": 0,
        }
        where = f"{where} (image {item['image_id']!r})"
        box_area = mask_area = None
        if masks is None or item.get("bbox") is not None:
            thing["bbox"] = read_box(item.get("bbox"), where)
            box_area = thing["bbox"][2] * thing["bbox"][3]
        if masks is not None:
            thing["segmentation"] = rle_of(masks, item.get("segmentation"), image_of[item["image_id"]], where)
            mask_area = float(masks.area(thing["segmentation"]))
        return {"bbox": [0.0, 0.0, 0.0, 0.0]} | thing, box_area, mask_area

    objects: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for place, annotation in enumerate(truth["annotations"]):
        where = f"annotation {annotation['id']!r}" if "id" in annotation else f"annotations[{place}]"
        where = f"score: the truth's {where}"
        thing, box_area, mask_area = read(annotation, where)
        thing["area"] = box_area if mask_area is None else mask_area
        if annotation.get("area") is not None:
            thing["area"] = read_number(annotation["area"], where, "area")
        thing["iscrowd"] = int(bool(annotation.get("iscrowd")))
        if annotation["image_id"] in wanted:
            objects.append(thing | {"id": len(objects) + 1})  # an id of 0 would mean no match
    for place, result in enumerate(results):
        where = f"score: results[{place}]"
        thing, box_area, mask_area = read(result, where)
        thing["area"] = mask_area if box_area is None else box_area
        thing["score"] = read_number(result.get("score"), where, "score")
        if result["image_id"] in wanted:
            detections.append(thing | {"id": len(detections) + 1})

    images = [
        {"id": number} | {side: image_of[image_id].get(side) for side in ("height", "width")}
        for image_id, number in image_number.items()
        if image_id in wanted
    ]
    names = [str(category_of[category_id].get("name", category_id)) for category_id in category_number]
    unique = [
        name if names.count(name) == 1 else f"{name} ({category_id})"
        for name, category_id in zip(names, category_number, strict=True)
    ]
    return Case(images, unique, objects, detections)


def numbered(ids: Sequence[Any], what: str) -> dict[Any, int]:
    """Numbers from 1 for ids: whole numbers in their order, then strings in theirs.

    Raises:
        ValueError: an id is neither, or there twice.
    """
    for found in ids:
        if not isinstance(found, int | np.integer | str):
            raise ValueError(f"score: the truth has the {what} id {found!r}; must be a whole number or a string")
    in_order = sorted(ids, key=lambda found: (isinstance(found, str), found))
    for first, second in itertools.pairwise(in_order):
        if first == second:
            raise ValueError(f"score: the truth has the {what} id {first!r} twice")
    return {found: number for number, found in enumerate(in_order, start=1)}


def look_up(wanted: Any, numbers: Mapping[Any, int], what: str, where: str) -> int:
    """The number of an id.

    Raises:
        ValueError: the truth does not know it.
    """
    if isinstance(wanted, int | np.integer | str) and wanted in numbers:
        return numbers[wanted]
    told = ", ".join(map(repr, list(numbers)[:10])) + (f", ... ({len(numbers)})" if len(numbers) > 10 else "")
    near = next((known for known in numbers if str(known) == str(wanted)), None)
    if near is None and isinstance(wanted, str):
        near = nearest(wanted, [known for known in numbers if isinstance(known, str)])
    hint = "" if near is None else f"; did you mean {near!r}?"
    plural = {"image": "images", "category": "categories"}[what]
    raise ValueError(f"{where}: {what} {wanted!r} is not in the truth, which has the {plural} {told or 'none'}{hint}")


def read_number(value: Any, where: str, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {what} = {value!r}: must be a finite number")
    return number


def read_box(box: Any, where: str) -> list[float]:
    try:
        numbers = [float(number) for number in box]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{where}: bbox = {box!r}: must be four finite numbers [x, y, width, height]")
    if min(numbers[2:]) < 0:
        raise ValueError(f"{where}: bbox = {box!r}: must be [x, y, width, height] with sides of at least 0")
    return numbers


def rle_of(masks: Any, segmentation: Any, image: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Polygons, or RLE of either kind, as compressed RLE of the image's size.

    Raises:
        ValueError: it is none of these, or of another size.
    """
    height, width = image.get("height"), image.get("width")
    if not height or not width:
        raise ValueError(f"score: the truth's image {image['id']!r} has no height and width, which masks need")
    if isinstance(segmentation, Mapping) and {"size", "counts"} <= set(segmentation):
        size, counts = [int(side) for side in segmentation["size"]], segmentation["counts"]
        if size != [height, width]:
            raise ValueError(
                f"{where}: has a mask of {size[0]}x{size[1]}, its image is {height}x{width} (height x width)"
            )
        packed = counts.decode("latin1") if isinstance(counts, bytes) else counts
        runs = unpacked(packed) if isinstance(packed, str) else [int(count) for count in counts]
        if runs is None:
            raise ValueError(f"{where}: counts = {reprlib.repr(counts)}: are no run lengths")
        if min(runs, default=0) < 0 or sum(runs) != height * width:  # the packages would read other memory
            raise ValueError(f"{where}: its mask has runs of {sum(runs)} pixels, the image has {height * width}")
        if isinstance(packed, str):
            return {"size": size, "counts": packed.encode()}
        return dict(masks.frPyObjects({"size": size, "counts": runs}, height, width))
    try:
        polygons = [[float(number) for number in polygon] for polygon in segmentation]
    except (TypeError, ValueError):
        polygons = []
    if not polygons or any(len(polygon) < 6 or len(polygon) % 2 for polygon in polygons):
        raise ValueError(
            f"{where}: its segmentation must be RLE (size, counts) or polygons [[x, y, x, y, x, y, ...], ...]"
        )
    return dict(masks.merge(masks.frPyObjects(polygons, height, width)))


def count_by_package(backend: str, kind: Kind, case: Case, limits: list[int]) -> Tables:
    """The tables as pycocotools, or faster-coco-eval in its place, makes them.

    Raises:
        BrokenPackage: it does not get there.
    """
    data_class, evaluator_class = import_part(backend, "data"), import_part(backend, "evaluator")
    categories = [{"id": number, "name": name} for number, name in enumerate(case.names, start=1)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            sides = []
            for annotations in (case.objects, case.detections):
                side = data_class()
                side.dataset = {"info": {}, "images": case.images, "categories": categories, "annotations": annotations}
                side.createIndex()
                sides.append(side)
            evaluator = evaluator_class(*sides, iouType=kind)
            evaluator.params.maxDets = limits
            evaluator.evaluate()
            evaluator.accumulate()
            return np.asarray(evaluator.eval["precision"]), np.asarray(evaluator.eval["recall"])
    except Exception as error:  # what it is given has been checked, so the fault is its own
        raise BrokenPackage(broken(backend, error)) from error


def import_part(backend: str, part: str) -> Any:
    """The class that holds annotations, the one that counts, or the module of masks.

    Raises:
        BrokenPackage: the package is missing, or was built for something else than what is installed.
    """
    module, _, name = PARTS[backend][part].partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except Exception as error:  # a wheel that was built for another numpy raises whatever comes
        raise BrokenPackage(broken(backend, error)) from error


def broken(backend: str, error: Exception) -> str:
    """What to do about a package that does not work."""
    package = backend.replace("_", "-")
    try:
        found = version(package)
    except PackageNotFoundError:
        if isinstance(error, ModuleNotFoundError):
            return f"score: backend = {backend!r} needs the package {package}: pip install {package}; {WITHOUT}"
        found = "(of unknown version)"
    reason = f"{type(error).__name__}: {error}"
    return (
        f"score: {package} {found} does not work with numpy {np.__version__} ({reason}); install one that was built for it: "
        f"pip install --force-reinstall --no-cache-dir {package}; {WITHOUT}"
    )


def count(case: Case, limits: list[int]) -> Tables:
    """The tables of boxes by numpy alone."""
    grouped: dict[tuple[int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for which, things in enumerate((case.objects, case.detections)):
        for thing in things:
            grouped[thing["category_id"], thing["image_id"]][which].append(thing)
    shape = len(THRESHOLDS), len(RECALLS), len(case.names), len(AREAS), len(limits)
    precision, recall = np.full(shape, -1.0), np.full((shape[0], *shape[2:]), -1.0)
    for category in range(len(case.names)):
        pairs = [grouped[key] for image in case.images if (key := (category + 1, image["id"])) in grouped]
        matches = [match(objects, detections, limits[-1]) for objects, detections in pairs]
        if not matches:
            continue
        scores = np.concatenate([matched.scores for matched in matches])
        ranks = np.concatenate([np.arange(len(matched.scores)) for matched in matches])
        hits, ignored = (np.concatenate([getattr(m, name) for m in matches], axis=2) for name in ("hits", "ignored"))
        num_objects = np.sum([matched.num_objects for matched in matches], axis=0)
        for place, limit in enumerate(limits):
            used = np.flatnonzero(ranks < limit)
            order = used[np.argsort(-scores[used], kind="stable")]
            for area in np.flatnonzero(num_objects):
                right = hits[area][:, order] & ~ignored[area][:, order]
                wrong = ~hits[area][:, order] & ~ignored[area][:, order]
                precision[:, :, category, area, place], recall[:, category, area, place] = curve(
                    right.cumsum(axis=1), wrong.cumsum(axis=1), num_objects[area]
                )
    return precision, recall


def curve(num_right: np.ndarray, num_wrong: np.ndarray, num_objects: int) -> Tables:
    """Precision (T, R) at each of RECALLS, the best at that recall or a higher one, and the recall (T,) that is reached.

    Args:
        num_right: (T, D), among the detections of the highest scores.
        num_wrong: (T, D).
    """
    recalls = num_right / num_objects
    precisions = num_right / (num_right + num_wrong + np.spacing(1))
    best = np.maximum.accumulate(precisions[:, ::-1], axis=1)[:, ::-1]
    best = np.concatenate((best, np.zeros((len(best), 1))), axis=1)  # at recalls that are not reached
    at = [np.searchsorted(row, RECALLS, side="left") for row in recalls]
    reached = recalls[:, -1] if recalls.shape[1] else np.zeros(len(recalls))
    return np.take_along_axis(best, np.stack(at), axis=1), reached


@dataclass(frozen=True)
class Matches:
    """What became of the detections of one image and class, the highest score first.

    Attributes:
        scores: (D,).
        hits: (A, T, D), whether an object was found; one that is ignored may be.
        ignored: (A, T, D), counts neither as right nor as wrong.
        num_objects: (A,), those that are to be found.
    """

    scores: np.ndarray
    hits: np.ndarray
    ignored: np.ndarray
    num_objects: np.ndarray


def match(objects: list[dict[str, Any]], detections: list[dict[str, Any]], limit: int) -> Matches:
    """Gives each detection, the highest score first, the object that overlaps it most and is not taken yet.

    An object is ignored that is a crowd or whose area lies out of range. A detection gets such a one only if it gets no other, and
    is ignored with it; of crowds several may get the same. One that gets none is ignored if its own area lies out of range.
    """
    low, high = np.array(list(AREAS.values())).T[:, :, None]
    scores = np.array([found["score"] for found in detections], dtype=np.float64)
    order = np.argsort(-scores, kind="stable")[:limit]
    crowd = np.array([thing["iscrowd"] for thing in objects], dtype=bool)
    areas = np.array([thing["area"] for thing in objects], dtype=np.float64)
    found_areas = np.array([found["area"] for found in detections], dtype=np.float64)[order]
    ignorable = crowd | (areas < low) | (areas > high)  # (A, G)
    outside = (found_areas < low) | (found_areas > high)  # (A, D)
    overlaps = overlap(boxes_of(detections)[order], boxes_of(objects), crowd)
    enough = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]  # (T, 1)
    free = np.ones((len(AREAS), len(THRESHOLDS), len(objects)), dtype=bool)
    hits = np.zeros((len(AREAS), len(THRESHOLDS), len(order)), dtype=bool)
    ignored = np.zeros_like(hits)
    for place, row in enumerate(overlaps if len(objects) else ()):
        near = free & (row >= enough)
        counted = near & ~ignorable[:, None]
        choice = np.where(counted.any(axis=2, keepdims=True), counted, near)
        last_best = len(row) - 1 - np.where(choice, row, -1.0)[..., ::-1].argmax(axis=2)  # among equals the last
        area, threshold = np.nonzero(choice.any(axis=2))
        taken = last_best[area, threshold]
        hits[area, threshold, place] = True
        ignored[area, threshold, place] = ignorable[area, taken]
        free[area, threshold, taken] = crowd[taken]
    ignored |= ~hits & outside[:, None]
    return Matches(scores[order], hits, ignored, (~ignorable).sum(axis=1))


def boxes_of(things: list[dict[str, Any]]) -> np.ndarray:
    return np.array([thing["bbox"] for thing in things], dtype=np.float64).reshape(-1, 4)


def overlap(found: np.ndarray, objects: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """(D, G): the intersection of boxes (x, y, width, height) over the union, or over the detection where the object is a crowd."""
    start, size, other_start, other_size = (
        found[:, None, :2],
        found[:, None, 2:],
        objects[None, :, :2],
        objects[None, :, 2:],
    )
    sides = np.minimum(start + size, other_start + other_size) - np.maximum(start, other_start)
    common = np.where((sides > 0).all(axis=2), sides[..., 0] * sides[..., 1], 0.0)
    own = size[..., 0] * size[..., 1]
    whole = np.where(crowd, own, own + other_size[..., 0] * other_size[..., 1] - common)
    return np.divide(common, whole, out=np.zeros_like(common), where=common > 0)
