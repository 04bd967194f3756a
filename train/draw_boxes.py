"""Pictures of found and true boxes on images, and of masks as tinted regions."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path
from PIL import Image
from torch import Tensor

from train.coco_scores import match
from train.data.masks import pixels_of
from train.report import ACCENT, INK, WRONG, printable, save

Records = Sequence[Mapping[str, Any]]

DPI = 130  # of report.save
PANEL_WIDTH, PANEL_HEIGHT = 4.2, 5.6  # inches at most, in a grid
ALONE = (4.0, 12.0)  # inches of the longer side of a single image, as its pixels have it
GAP, TITLE, LEGEND = 0.12, 0.28, 0.32  # inches
CROWDED = 30  # found boxes from which on lines and labels are finer
TINT = 0.45  # of a mask's colour over the image


def draw_detections(
    path: Path,
    images: Sequence[Tensor | np.ndarray],
    detections: Sequence[Records],
    truth: Mapping[str, Any],
    image_ids: Sequence[int | str],
    threshold: float = 0.3,
    columns: int = 3,
) -> Path:
    """Images with what was found in each: blue if right, red if wrong, dashed what is there; without a truth all are blue.

    A found box is right if it overlaps a true one of its class by half, as AP50 counts it. Each has its class and score written at
    it as far as there is room, the surest first. Masks are tinted regions.

    Args:
        images: (3, height, width) in 0..1, or (height, width, 3) uint8.
        detections: COCO results of each image.
        truth: COCO's json: the names of the categories, and the true boxes where it has annotations.
        image_ids: as in the truth.
        threshold: only what has this score or more is drawn.
        columns: of the grid, at most.
    """
    pixels = [as_pixels(image) for image in images]
    names = {category["id"]: str(category.get("name", category["id"])) for category in truth["categories"]}
    objects: dict[int | str, list[Mapping[str, Any]]] = {image_id: [] for image_id in image_ids}
    for annotation in truth.get("annotations", ()):
        objects.get(annotation["image_id"], []).append(annotation)
    sure = [sorted((f for f in found if f["score"] >= threshold), key=lambda f: -f["score"]) for found in detections]

    has_truth = bool(truth.get("annotations"))
    scales = panel_scales(pixels)  # inches a pixel
    columns = min(columns, len(pixels))
    rows = [range(start, min(start + columns, len(pixels))) for start in range(0, len(pixels), columns)]
    widths = [pixels[place].shape[1] * scales[place] for place in range(len(pixels))]
    heights = [max(pixels[place].shape[0] * scales[place] for place in row) for row in rows]
    column_width = max(widths)
    width = max(columns * (column_width + GAP) + GAP, 3.6)
    height = sum(heights) + len(rows) * (TITLE + GAP) + (LEGEND if has_truth else 0) + GAP
    figure = Figure(figsize=(width, height))
    top = height
    for row, row_height in zip(rows, heights, strict=True):
        top -= TITLE + row_height
        for column, place in enumerate(row):
            shown = pixels[place].shape[0] * scales[place]
            left = GAP + column * (column_width + GAP) + (column_width - widths[place]) / 2
            box = left / width, (top + row_height - shown) / height, widths[place] / width, shown / height
            panel = figure.add_axes(box)
            draw_image(panel, pixels[place], sure[place], scales[place])
            draw_boxes(panel, sure[place], objects[image_ids[place]], names, scales[place], has_truth)
        top -= GAP
    if has_truth:
        handles = [
            Line2D([], [], color=ACCENT, label="found, right"),
            Line2D([], [], color=WRONG, label="found, wrong"),
            Line2D([], [], color=INK, linestyle=(0, (3, 2)), label="is there"),
        ]
        figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    with unknown_letters_as_boxes():
        return save(figure, path)


@contextmanager
def unknown_letters_as_boxes() -> Iterator[None]:
    """Lets matplotlib draw an empty box for a letter that its font lacks without a word about each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def as_pixels(image: Tensor | np.ndarray) -> np.ndarray:
    """(height, width, 3) uint8."""
    if isinstance(image, Tensor):
        return (image.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return image


def panel_scales(pixels: Sequence[np.ndarray]) -> list[float]:
    """Inches that a pixel of each image takes: large for a single image, such that all fit their panel in a grid."""
    if len(pixels) == 1:
        longest = max(pixels[0].shape[:2])
        return [min(max(longest / DPI, ALONE[0]), ALONE[1]) / longest]
    return [min(PANEL_WIDTH / image.shape[1], PANEL_HEIGHT / image.shape[0]) for image in pixels]


def draw_image(panel: Axes, pixels: np.ndarray, found: Records, scale: float) -> None:
    """The image with its masks, in as many pixels as the picture has."""
    height, width = pixels.shape[:2]
    masks = [result["segmentation"] for result in found if "segmentation" in result]
    if masks:
        pixels = tinted(pixels, masks)
    image = Image.fromarray(pixels)
    if scale * DPI < 1:
        image = image.resize(
            (max(1, round(width * scale * DPI)), max(1, round(height * scale * DPI))), Image.Resampling.LANCZOS
        )
    panel.imshow(np.asarray(image), extent=(0, width, height, 0), aspect="auto", interpolation="nearest")
    panel.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def tinted(pixels: np.ndarray, masks: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The image under one tint where any mask (RLE) is, with a dark seam where two of them meet."""
    owner = np.zeros(pixels.shape[:2], dtype=np.int32)
    for number, mask in reversed(list(enumerate(masks, start=1))):  # the surest on top
        owner[pixels_of(mask["counts"].encode(), pixels.shape[:2]) > 0] = number
    seam = np.zeros(owner.shape, dtype=bool)
    seam[1:] |= owner[1:] != owner[:-1]
    seam[:, 1:] |= owner[:, 1:] != owner[:, :-1]
    mixed = pixels.astype(np.float32)
    colour = np.array([int(ACCENT[place : place + 2], 16) for place in (1, 3, 5)], dtype=np.float32)
    mixed[owner > 0] += TINT * (colour - mixed[owner > 0])
    mixed[seam] *= 0.5
    return mixed.round().astype(np.uint8)


def draw_boxes(
    panel: Axes, found: Records, objects: Records, names: Mapping[Any, str], scale: float, has_truth: bool
) -> None:
    """The true boxes of an image, the found ones (the surest first) with their labels, and how many there are as a title."""
    right, wrong = judged(found, objects)
    crowded = len(found) >= CROWDED
    line, size = (1.1, 5.5) if crowded else (1.6, 7.0)
    for crowd, dashes in ((False, (3, 2)), (True, (1, 2))):
        boxes = [thing["bbox"] for thing in objects if bool(thing.get("iscrowd")) == crowd]
        outline(panel, boxes, [INK] * len(boxes), line, 0.9, (0, dashes))
    colours = [WRONG if has_truth and place in wrong else ACCENT for place in range(len(found))]
    outline(panel, [result["bbox"] for result in reversed(found)], colours[::-1], line, 0.5)

    counts = Counter(printable(names.get(result["category_id"], str(result["category_id"]))) for result in found)
    labels: list[Label] = []
    for result, colour in zip(found, colours, strict=True):
        name = printable(names.get(result["category_id"], str(result["category_id"])))
        texts = [f"{name} {result['score']:.2f}", f"{result['score']:.2f}"]
        label = place_label(panel, result["bbox"], texts[crowded and len(names) == 1 :], size, scale, crowded, labels)
        if label is not None:
            labels.append(label)
            x, y = (label.left + label.right) / 2, (label.top + label.bottom) / 2
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "parse_math": False, "zorder": 5}
            panel.text(x, y, label.text, fontsize=size, color="white", **style)
            chip = (label.left, label.top), label.right - label.left, label.bottom - label.top
            panel.add_artist(Rectangle(*chip, facecolor=colour, linewidth=0, zorder=4))

    num_objects = sum(not thing.get("iscrowd") for thing in objects)
    title = f"{len(right)} of {num_objects} found, {len(wrong)} wrong"
    if not has_truth:
        title = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing found"
        if text_width(title, 8.0) > 72 * scale * abs(panel.get_xlim()[1]):
            title = f"{len(found)} found"
    panel.set_title(title, fontsize=8, color=INK, pad=4, parse_math=False)


def outline(
    panel: Axes,
    boxes: Sequence[Sequence[float]],
    colours: Sequence[str],
    line: float,
    shade: float,
    style: Any = "solid",
) -> None:
    """Boxes (x, y, width, height) without a filling on a seam of white, `shade` of it, that makes them stand out on any image."""
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    seam: dict[str, Any] = {"edgecolors": "white", "alpha": shade, "linewidths": line + 1.2}
    for look in (seam, {"edgecolors": list(colours), "linewidths": line, "linestyles": [style]}):
        panel.add_collection(PolyCollection(corners, facecolors="none", **look), autolim=False)


def judged(found: Records, objects: Records) -> tuple[set[int], set[int]]:
    """Which detections are right and which are wrong, as AP50 counts them; those that hit crowds are neither."""
    right: set[int] = set()
    wrong: set[int] = set()
    for category_id in {result["category_id"] for result in found}:
        places = [place for place, result in enumerate(found) if result["category_id"] == category_id]
        own = [
            {"bbox": thing["bbox"], "area": 0, "iscrowd": thing.get("iscrowd", 0)}
            for thing in objects
            if thing["category_id"] == category_id
        ]
        matches = match(own, [{**found[place], "area": 0} for place in places], len(places))
        for place, hit, ignored in zip(places, matches.hits[0, 0], matches.ignored[0, 0], strict=True):
            if not ignored:
                (right if hit else wrong).add(place)
    return right, wrong


@dataclass(frozen=True)
class Label:
    """A text and the area that it takes, in pixels of the image."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def touches(self, other: "Label") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def place_label(
    panel: Axes,
    box: Sequence[float],
    texts: Sequence[str],
    size: float,
    scale: float,
    crowded: bool,
    taken: Sequence[Label],
) -> Label | None:
    """The first of `texts` that fits at the upper left corner of a box, above it or inside; none if all would touch other labels.

    Args:
        size: of the letters, in points.
        scale: inches a pixel of the image.
        crowded: a longer text than the last one must not be wider than its box.
    """
    x, y, box_width, _ = box
    right, bottom = panel.get_xlim()[1], panel.get_ylim()[0]
    points = 1 / (72 * scale)  # pixels of the image a point
    height = 1.35 * size * points
    for text in texts:
        width = (text_width(text, size) + 0.6 * size) * points
        if crowded and text != texts[-1] and width > box_width:
            continue
        left = min(max(x, 0), max(0, right - width))
        for top in (y - height, y):
            label = Label(text, left, top, left + width, top + height)
            if top >= 0 and label.bottom <= bottom and not any(label.touches(other) for other in taken):
                return label
    return None


def text_width(text: str, size: float) -> float:
    """In points."""
    with unknown_letters_as_boxes():
        return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0])
