"""Your own images with boxes as COCO json: every entry is checked, and what is wrong is told with its ids."""

import json
import os
import reprlib
import warnings
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import Field

from train.data.boxes import (
    BACK,
    Boxed,
    BoxedImages,
    DetectionData,
    Id,
    Objects,
    is_as_stored,
    open_as_annotated,
    size_in_header,
)
from train.data.images import listed
from train.data.masks import Size, area_of, box_of, is_number, packed
from train.data.stream import DamagedExample, too_many

HAIR = 1.0  # how many pixels a box may reach out of its image by rounding, or by counting pixels from 1
FAR = 0.05  # of a side: a box that reaches further out may be of another format
MOST = 0.95  # of the boxes of a file: who mixes up formats may have a few wrong boxes besides
NOISE = 1e-3  # pixels: x + width is rarely exact
CROWDS = "crowds, which are no targets"
EMPTY = "images without objects"
DAMAGED = "images that are not there, damaged, or of another size than annotated"
AS_STORED = "images whose EXIF orientation is not applied, as their boxes belong to the pixels as stored"


class Coco(DetectionData):
    """Your own images with boxes, in the layout of COCO: image folders and json files below `path`.

    The categories are those of the training file, sorted by id (numbers by value, texts as texts); the validation file must not
    have others. Ids are whole numbers or texts. `bbox` is x, y, width, height in pixels. What may be missing: `iscrowd` (0),
    `area` (that of the mask, or of the box), `info`, the ids of all annotations, `bbox` where there is a segmentation, height
    and width of an image (read from its file). Crowds are not trained on, and are kept for scoring.

    Boxes of no area, boxes outside their image and, with `masks`, segmentations without a pixel are left out, boxes that reach
    out of their image are cut; all are counted. Refused, with the ids of image and annotation: what is no number, or not
    finite; ids that are there twice, or nowhere; boxes mostly outside (see `mostly_outside`); a file whose boxes fit their
    images only as two corners, or are shares of the image; segmentations that do not fit the image. Images that are not there,
    are none, or are of another size than annotated are damaged examples; a file must have others. A photograph is turned
    upright by its EXIF orientation, unless height and width in the json are those of the pixels as stored.
    """

    name: Literal["coco"]
    path: str = Field(min_length=1)
    train: str = "train2017"
    val: str = "val2017"
    train_annotations: str = "annotations/instances_train2017.json"
    val_annotations: str = "annotations/instances_val2017.json"

    def load(self, seed: int) -> Boxed:
        root = Path(self.path)
        return load_boxed(
            self, (root / self.train, root / self.train_annotations), (root / self.val, root / self.val_annotations)
        )


Place = tuple[Path, Path]  # the folder of the images, the file of the annotations


class Category(NamedTuple):
    id: Id
    name: str


def load_boxed(data: DetectionData, train: Place, test: Place) -> Boxed:
    """What is in two files of annotations, as training and test split.

    Raises:
        ValueError: something in them is wrong; a file or folder is not there.
    """
    train_file, test_file = CocoFile(*train, data), CocoFile(*test, data)
    categories = train_file.categories
    check_categories(train_file, test_file)
    from train.data.box_augment import train_augment  # here: importing albumentations takes two seconds

    train_images = BoxedImages(train_file.objects(categories, data.empty_images), data.background, train_augment(data))
    test_images = BoxedImages(test_file.objects(categories, True), data.background)
    left_out: dict[str, int] = {}
    for split, file, images in (("training", train_file, train_images), ("test", test_file, test_images)):
        num_crowds, num_empty = int(file.crowd[file.kept].sum()), len(file.images) - len(images)
        if not len(images):
            raise ValueError(f"{file.file}: there is no {split} image" + (" with an object" if num_empty else ""))
        if not len(images.objects.labels):
            crowds = ", only crowds" if num_crowds else ""
            warnings.warn(f"{file.file}: there is no {split} object{crowds}", stacklevel=2)
        counts = file.left_out | {CROWDS: num_crowds, EMPTY: num_empty}
        left_out |= {f"{split}: {reason}": count for reason, count in counts.items() if count}
    return Boxed(
        train=train_images,
        test=test_images,
        classes=tuple(category.name for category in categories),
        category_ids=tuple(category.id for category in categories),
        truth=test_file.truth(categories),
        has_masks=data.masks,
        mean=data.mean,
        std=data.std,
        max_damaged=data.max_damaged,
        left_out=left_out,
    )


class CocoFile:
    """One file of annotations, read and checked.

    Args:
        folder: of the images.
        file: the json.
        data: how to read it.

    Raises:
        ValueError: something in it is wrong; up to ten problems, with the ids of image and annotation. Or no image can be read.
        TooManyDamaged: of the images, more than allowed are not there, no images, or of another size than annotated.
    """

    def __init__(self, folder: Path, file: Path, data: DetectionData):
        self.folder, self.file, self.data = folder, file, data
        self.left_out: dict[str, int] = {}  # how many boxes and images were left out or mended, by reason
        self.problems: list[str] = []
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; the images of {file} are looked for in it")
        content = read_json(file)
        self.info = content.get("info") or {}
        self.categories = self.read_categories(self.entries(content, "categories"))
        self.images = self.read_images(self.entries(content, "images"))
        self.sizes = np.array([(image["height"], image["width"]) for image in self.images], dtype=np.int64).reshape(
            -1, 2
        )
        if data.check_files:
            self.check_files()
        self.read_annotations(self.entries(content, "annotations"))
        self.check_formats()
        self.check_boxes()

    def refuse_problems(self) -> None:
        count = len(self.problems)
        if count == 1:
            raise ValueError(f"{self.file}: {self.problems[0]}")
        if count:
            lines = self.problems[:10] + ([f"and {count - 10} more"] if count > 10 else [])
            raise ValueError("\n".join([f"{self.file}: {count} problems", *(f"  - {line}" for line in lines)]))

    def entries(self, content: dict[str, Any], key: str) -> list[dict[str, Any]]:
        found = content.get(key)
        if not isinstance(found, list):
            given = (
                f"it is {reprlib.repr(found)}" if key in content else f"there is {listed(sorted(content)) or 'no key'}"
            )
            raise ValueError(f"{self.file}: COCO json must have a list {key!r}; {given}")
        for number, entry in enumerate(found):
            if not isinstance(entry, dict):
                raise ValueError(f"{self.file}: {key}[{number}] = {reprlib.repr(entry)}: must be an object")
        return found

    def read_categories(self, entries: list[dict[str, Any]]) -> list[Category]:
        """Sorted by id, numbers by value and texts as texts."""
        ids = self.ids_of(entries, "categories")
        names = [entry.get("name") for entry in entries]
        for id, name in zip(ids, names, strict=True):
            if not isinstance(name, str) or not name:
                self.problems.append(f"category {id!r}: name = {reprlib.repr(name)} must be a text")
        for name, count in Counter(name for name in names if isinstance(name, str)).items():
            if count > 1:
                same = [repr(id) for id, other in zip(ids, names, strict=True) if other == name]
                self.problems.append(f"categories {listed(same)} have the same name {name!r}")
        if not entries:
            self.problems.append("'categories' is empty; a detector needs at least one")
        self.refuse_problems()
        return sorted(Category(id, str(name)) for id, name in zip(ids, names, strict=True))

    def read_images(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With height and width, from the image files where the json does not give them."""
        images = []
        for id, entry in zip(self.ids_of(entries, "images"), entries, strict=True):
            name = entry.get("file_name")
            if not is_file_name(name):
                self.problems.append(f"image {id!r}: file_name = {reprlib.repr(name)} must be a text")
                continue
            given = {key: entry[key] for key in ("height", "width") if entry.get(key) is not None}
            if len(given) < 2:
                try:
                    given = dict(zip(("height", "width"), self.size_in_file(str(name)), strict=True)) | given
                except (OSError, ValueError) as error:
                    self.problems.append(
                        f"image {id!r}: it has no height and width, and its file is not readable ({error})"
                    )
                    continue
            for key, side in given.items():
                if not is_number(side) or side != int(side) or side < 1:
                    self.problems.append(f"image {id!r}: {key} = {reprlib.repr(side)} must be a whole number from 1")
                    break
            else:
                images.append({**entry, "id": id, **{key: int(side) for key, side in given.items()}})
        self.refuse_problems()
        return images

    def ids_of(self, entries: list[dict[str, Any]], what: str) -> list[Id]:
        """The ids of categories, images or annotations, each there once."""
        ids: list[Id] = []
        for number, entry in enumerate(entries):
            id = whole_id(entry.get("id"))
            if id is None:
                given = reprlib.repr(entry["id"]) if "id" in entry else "missing"
                self.problems.append(f"{what}[{number}]: id = {given} must be a whole number or a text")
            else:
                ids.append(id)
        if len({type(id) for id in ids}) > 1:
            unlike = [next(id for id in ids if isinstance(id, kind)) for kind in (int, str)]
            self.problems.append(
                f"{what}: ids must be all numbers or all texts, and there are {unlike[0]!r} and {unlike[1]!r}"
            )
        for id, count in Counter(ids).items():
            if count > 1:
                self.problems.append(f"{what}: id {id!r} is there {count} times")
        self.refuse_problems()
        return ids

    def size_in_file(self, name: str) -> tuple[int, int]:
        """Height and width of an image once upright."""
        with Image.open(self.folder / name) as image:
            (height, width), _, turn = size_in_header(image)
        return (width, height) if turn in BACK else (height, width)

    def check_files(self) -> None:
        """Opens every image, without decoding it unless its size is not that of its annotations."""
        damaged = []
        num_as_stored = 0
        for image in self.images:
            path, size = str(self.folder / image["file_name"]), (image["height"], image["width"])
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with Image.open(path) as opened:
                        header = size_in_header(opened)
                    try:
                        num_as_stored += is_as_stored(*header, size)
                    except ValueError:  # the orientation of a PNG may stand behind its pixels
                        open_as_annotated(path, size, self.data.background)
            except Exception as error:  # there is hardly a type that no decoder raises for damaged data
                damaged.append(DamagedExample(path, error))
        if len(damaged) > self.data.max_damaged:
            raise too_many(damaged, self.data.max_damaged)
        if damaged and len(damaged) == len(self.images):
            raise ValueError(f"{self.file}: none of its {len(damaged)} images can be read (the last: {damaged[-1]})")
        self.left_out |= {AS_STORED: num_as_stored, DAMAGED: len(damaged)}

    def read_annotations(self, entries: list[dict[str, Any]]) -> None:
        image_of = {image["id"]: index for index, image in enumerate(self.images)}
        category_of = {category.id: index for index, category in enumerate(self.categories)}
        if any("id" in entry for entry in entries):
            self.ids = self.ids_of(entries, "annotations")
        else:
            self.ids = list(range(1, len(entries) + 1))
        self.image_index, self.category_index = (np.zeros(len(entries), dtype=np.int64) for _ in range(2))
        self.crowd = np.zeros(len(entries), dtype=bool)
        self.xywh, self.areas = np.zeros((len(entries), 4)), np.full(len(entries), np.nan)
        self.masks: list[bytes | None] = [None] * len(entries)
        for number, entry in enumerate(entries):
            image, category = (
                self.index_in(known, number, entry, f"{what}_id")
                for known, what in ((image_of, "image"), (category_of, "category"))
            )
            if image is not None and category is not None:
                self.image_index[number], self.category_index[number] = image, category
                self.read_shape(number, entry, (self.images[image]["height"], self.images[image]["width"]))
        self.refuse_problems()

    def index_in(self, known: dict[Id, int], number: int, entry: dict[str, Any], key: str) -> int | None:
        """Where in the file the image or the category of an annotation is."""
        id = whole_id(entry.get(key))
        index = None if id is None else known.get(id)
        if index is None:
            given = reprlib.repr(entry[key]) if key in entry else "missing"
            self.problem(
                number, entry, f"{key} = {given} is none of the {len(known)} in the file{other_kind(id, known)}"
            )
        return index

    def problem(self, number: int, entry: dict[str, Any], text: str) -> None:
        self.problems.append(f"annotation {self.ids[number]!r} of image {reprlib.repr(entry.get('image_id'))}: {text}")

    def read_shape(self, number: int, entry: dict[str, Any], size: Size) -> None:
        """Box, area, crowd and mask of an annotation."""
        bbox, area, crowd = entry.get("bbox"), entry.get("area"), entry.get("iscrowd")
        if crowd not in (None, 0, 1):
            self.problem(number, entry, f"iscrowd = {reprlib.repr(crowd)} must be 0 or 1")
        if area is not None and not (is_number(area) and area >= 0):
            self.problem(number, entry, f"area = {reprlib.repr(area)} must be a finite number, not negative")
            area = None
        self.crowd[number] = crowd == 1
        if area is not None:
            self.areas[number] = area
        segmentation, mask = entry.get("segmentation"), None
        if segmentation is not None and (self.data.masks or bbox is None):
            try:
                mask = self.masks[number] = packed(segmentation, size)
            except ValueError as error:
                self.problem(number, entry, f"segmentation: {error}")
        elif self.data.masks:
            self.problem(number, entry, "it has no segmentation; data.masks = false trains on boxes alone")
        if bbox is None:
            if segmentation is None:
                self.problem(number, entry, f"it has neither bbox nor segmentation, only {listed(sorted(entry))}")
            elif mask is not None:
                self.xywh[number] = box_of(segmentation, mask, size)
        elif isinstance(bbox, list) and len(bbox) == 4 and all(map(is_number, bbox)):
            self.xywh[number] = bbox
        else:
            self.problem(number, entry, f"bbox = {reprlib.repr(bbox)} must be four finite numbers: x, y, width, height")

    def check_formats(self) -> None:
        """Refuses boxes that are given in another way than as x, y, width, height.

        Single boxes do not tell, a file of them does: read as x, y, width, height some reach far out of their images, read as
        two corners nearly all fit.
        """
        if not len(self.ids):
            return
        x, y, width, height = self.xywh.T
        image_height, image_width = self.sizes[self.image_index].T
        beyond = (
            np.maximum(x + width - image_width, 0) / image_width,
            np.maximum(y + height - image_height, 0) / image_height,
        )
        far = np.maximum(*beyond) > FAR
        fit = (width >= x) & (height >= y) & (width <= image_width + HAIR) & (height <= image_height + HAIR)
        fit &= np.minimum(x, y) >= -HAIR
        if far.any() and fit.mean() >= MOST:
            self.refuse_format(
                int(far.argmax()),
                f"{far.sum()} of {len(far)} boxes reach far out of their images as x, y, width, height, and {fit.sum()} fit as x1, "
                f"y1, x2, y2: COCO's bbox is x, y, width, height",
            )
        small = ((self.xywh >= -FAR) & (self.xywh <= 1 + FAR)).all(axis=1)  # shares that are rounded reach out too
        if small.mean() >= MOST and (self.xywh[small] % 1 > 0).any():
            self.refuse_format(
                int(small.argmax()),
                f"{small.sum()} of {len(self.ids)} boxes have no number beyond 0..1, as if these were shares of the image: COCO's "
                f"bbox is in pixels",
            )

    def refuse_format(self, number: int, text: str) -> None:
        image, bbox = self.images[self.image_index[number]], self.xywh[number].tolist()
        size = f"{image['width']} pixels wide and {image['height']} high"
        raise ValueError(
            f"{self.file}: {text} (annotation {self.ids[number]!r} of image {image['id']!r}: bbox = {bbox}, {size})"
        )

    def check_boxes(self) -> None:
        """Cuts boxes at the edges of their images, and leaves out those of which nothing, or not enough, is left."""
        sizes = self.sizes[self.image_index][:, [1, 0, 1, 0]]  # width, height, width, height
        whole = np.concatenate([self.xywh[:, :2], self.xywh[:, :2] + self.xywh[:, 2:]], axis=1)
        cut = np.clip(whole, 0, sizes)
        self.corners = cut.astype(np.float32)
        reach = np.maximum(-whole, whole - sizes).max(axis=1, initial=0)
        area_left = (cut[:, 2:] - cut[:, :2]).prod(axis=1)
        no_mask = np.array([self.data.masks and not (mask and area_of(mask)) for mask in self.masks], dtype=bool)
        flat = (self.xywh[:, 2:] <= 0).any(axis=1)
        outside = ~flat & (cut[:, 2:] <= cut[:, :2]).any(axis=1)
        # in float32 a box of a billionth of a pixel has no area
        flat |= ~outside & (self.corners[:, 2:] <= self.corners[:, :2]).any(axis=1)
        mostly_outside = (
            ~flat & ~outside & ~no_mask & (reach > HAIR) & (area_left < 0.5 * self.xywh[:, 2:].prod(axis=1))
        )
        if self.data.mostly_outside == "refuse":
            self.refuse_boxes(np.flatnonzero(mostly_outside).tolist())
        kept = ~(no_mask | flat | outside | mostly_outside)
        for reason, numbers in {
            "segmentations without a pixel": no_mask,
            "boxes of no area": flat & ~no_mask,
            "boxes outside their image": outside & ~no_mask,
            "boxes mostly outside their image": mostly_outside,
            "boxes cut at the edge of their image": kept & (reach > NOISE),
        }.items():
            if numbers.any():
                self.left_out[reason] = int(numbers.sum())
        moved = kept & (reach > 0)
        self.xywh[moved] = np.concatenate([cut[moved, :2], cut[moved, 2:] - cut[moved, :2]], axis=1)
        self.kept = np.flatnonzero(kept)

    def refuse_boxes(self, numbers: list[int]) -> None:
        for number in numbers:
            image, bbox = self.images[self.image_index[number]], self.xywh[number].tolist()
            self.problems.append(
                f"annotation {self.ids[number]!r} of image {image['id']!r}: bbox = {bbox} lies mostly outside the image, which is "
                f"{image['width']} pixels wide and {image['height']} high; data.mostly_outside = drop leaves such boxes out"
            )
        self.refuse_problems()

    def objects(self, categories: Sequence[Category], with_empty: bool) -> Objects:
        """What a detector is trained on: no crowds, and perhaps no images without objects.

        Args:
            categories: in the order of their labels, 1 being that of the first.
        """
        label_of = np.array([categories.index(category) + 1 for category in self.categories])
        numbers = self.kept[~self.crowd[self.kept]]
        numbers = numbers[np.argsort(self.image_index[numbers], kind="stable")]
        counts = np.bincount(self.image_index[numbers], minlength=len(self.images))
        images = np.arange(len(self.images)) if with_empty else np.flatnonzero(counts)
        masks = [self.masks[number] or b"" for number in numbers] if self.data.masks else []
        return Objects(
            image_ids=tuple(self.images[image]["id"] for image in images),
            files=np.array([os.fsencode(self.folder / self.images[image]["file_name"]) for image in images]),
            sizes=self.sizes[images],
            starts=np.concatenate([[0], np.cumsum(counts[images])]),
            boxes=self.corners[numbers],
            labels=label_of[self.category_index[numbers]],
            masks=np.frombuffer(b"".join(masks), dtype=np.uint8) if self.data.masks else None,
            mask_starts=np.cumsum([0, *map(len, masks)]) if self.data.masks else None,
        )

    def truth(self, categories: Sequence[Category]) -> dict[str, Any]:
        """COCO json to score by, crowds too. Scorers want annotations numbered from 1: if one is not, all are numbered anew."""
        numbered = all(isinstance(id, int) and id > 0 for id in self.ids)
        annotations = []
        for number in self.kept.tolist():
            image, bbox = self.images[self.image_index[number]], self.xywh[number].tolist()
            annotation = {
                "id": self.ids[number] if numbered else number + 1,
                "image_id": image["id"],
                "category_id": self.categories[self.category_index[number]].id,
                "bbox": bbox,
                "area": self.areas[number].item(),
                "iscrowd": int(self.crowd[number]),
            }
            mask = self.masks[number] if self.data.masks else None
            if mask is not None:
                annotation["segmentation"] = {"size": [image["height"], image["width"]], "counts": mask.decode("ascii")}
            if np.isnan(self.areas[number]):
                annotation["area"] = bbox[2] * bbox[3] if mask is None else area_of(mask)
            annotations.append(annotation)
        return {
            "info": self.info,
            "images": self.images,
            "annotations": annotations,
            "categories": [category._asdict() for category in categories],
        }


def check_categories(train: CocoFile, test: CocoFile) -> None:
    """Holds the categories of the test split against those of the training split, which may have more.

    Raises:
        ValueError: there are others.
    """
    name_of, id_of = dict(train.categories), {name: id for id, name in train.categories}
    for id, name in test.categories:
        if name_of.get(id) == name:
            continue
        if id in name_of:
            reason = f"{id!r} is {name_of[id]!r} in {train.file}"
        elif name in id_of:
            reason = f"{name!r} has the id {id_of[name]!r} in {train.file}"
        else:
            reason = f"the training categories of {train.file} are {listed([category.name for category in train.categories])}"
        raise ValueError(f"{test.file}: category {name!r} of id {id!r} is none to train on: {reason}")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        ValueError: there is no such file, or it is no json of an object.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file}: no readable file of annotations ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: no COCO json ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file}: no COCO json: it must be an object with images, annotations and categories, and is a {type(content).__name__}"
        )
    return content


def whole_id(value: object) -> Id | None:
    """An id as results have it, a whole number or a text: 3.0 is 3, and true is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def other_kind(id: Id | None, ids: Container[Id]) -> str:
    """A hint where a number is written as a text, or the other way round."""
    if isinstance(id, str) and len(id) < 20 and id.removeprefix("-").isdecimal() and int(id) in ids:
        return f", only the number {int(id)}"
    return f", only the text {str(id)!r}" if isinstance(id, int) and str(id) in ids else ""


def is_file_name(value: object) -> bool:
    """A text that a file can be called."""
    try:
        return isinstance(value, str) and len(os.fsencode(value)) > 0
    except UnicodeEncodeError:  # half a character, which json can write
        return False
