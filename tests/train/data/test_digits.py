"""Digits and scenes of digits."""

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from train.data import Digits, DigitScenes
from train.data.digits import ANSWERS, QUESTIONS, SceneDataset, answer_of, read_digits, split_digits


def scenes(path: str, **options: object) -> DigitScenes:
    return DigitScenes.model_validate({"name": "digit_scenes", "path": path, **options})


def test_the_real_digits(real_digits: Path) -> None:
    images, labels = read_digits(str(real_digits))
    assert images.shape == (5000, 28, 28)
    assert Counter(labels.tolist()) == dict.fromkeys(range(10), 500)
    data = Digits(name="digits", path=str(real_digits)).load(seed=0)
    assert (len(data.train), len(data.test)) == (4000, 1000)  # type: ignore[arg-type]
    test_labels = Counter(data.test[i][1] for i in range(1000))
    assert test_labels == dict.fromkeys(range(10), 100)
    pixels = torch.stack([data.test[i][0] for i in range(1000)])
    assert abs(pixels.mean().item()) < 0.1
    assert abs(pixels.std().item() - 1) < 0.1


def test_the_split_is_fixed_stratified_and_disjoint(digits_csv: str) -> None:
    images, labels = read_digits(digits_csv)
    numbered = images.clone()
    numbered[:, 0, 0] = torch.arange(len(images))
    (train, train_labels), (test, test_labels) = split_digits(numbered, labels)
    train_ids, test_ids = set(train[:, 0, 0].tolist()), set(test[:, 0, 0].tolist())
    assert not train_ids & test_ids
    assert len(train_ids | test_ids) == len(images)
    assert Counter(test_labels.tolist()) == dict.fromkeys(range(10), 4)
    assert Counter(train_labels.tolist()) == dict.fromkeys(range(10), 16)
    again = split_digits(numbered, labels)
    assert torch.equal(again[1][0], test)


def test_augmentation_moves_but_never_mirrors(digits_csv: str) -> None:
    still = Digits(name="digits", path=digits_csv, rotate=0, shift=0, scale=0, shear=0).load(seed=0)
    moving = Digits(name="digits", path=digits_csv).load(seed=0)
    seven = still.train.labels.index(7)  # type: ignore[attr-defined]
    original = still.train[seven][0]
    assert torch.equal(original, (still.train.images[seven][None].float() / 255 - 0.1307) / 0.3081)  # type: ignore[attr-defined]
    drawn = [moving.train[seven][0] for _ in range(20)]
    assert len({image.sum().item() for image in drawn}) > 10

    def likeness(image: torch.Tensor) -> float:
        return max((image.roll((dy, dx), (1, 2)) * original).sum().item() for dy in range(-6, 7) for dx in range(-6, 7))

    assert all(likeness(image) > likeness(image.flip(-1)) for image in drawn)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n", "3 columns"),
        ("a,b\n", "no readable csv"),
        ("0," * 784 + "10\n", r"labels in 10\.\.10"),
        ("300," * 784 + "1\n", r"pixels lie in 300\.\.300"),
    ],
)
def test_files_that_are_no_digits(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_digits(str(tmp_path / "wrong.csv"))
    with pytest.raises(ValueError, match=r"absent\.csv"):
        read_digits(str(tmp_path / "absent.csv"))


def test_scenes_repeat_and_differ(digits_csv: str) -> None:
    first, again, other = (scenes(digits_csv).load(seed) for seed in (3, 3, 4))
    for i in (0, 1, 77):
        assert torch.equal(first.train[i][0], again.train[i][0])
        assert first.train[i][1] == again.train[i][1]
        assert not torch.equal(first.train[i][0], other.train[i][0])
        assert torch.equal(first.test[i][0], other.test[i][0])  # one test set for all seeds
        assert not torch.equal(first.train[i][0], first.test[i][0])
    assert not torch.equal(first.train[0][0], first.train[1][0])
    torch.manual_seed(1)  # nothing outside matters, nor the order of reading
    assert torch.equal(first.train[0][0], again.train[0][0])
    with pytest.raises(IndexError):
        first.test[len(first.test)]  # type: ignore[arg-type]


def test_glyphs_of_training_and_test_scenes_are_different_ones(digits_csv: str) -> None:
    train, test = (getattr(scenes(digits_csv).load(0), split) for split in ("train", "test"))
    (train_glyphs, _), (test_glyphs, _) = split_digits(*read_digits(digits_csv))
    assert len(train.glyphs) == len(train_glyphs) == 160
    assert len(test.glyphs) == len(test_glyphs) == 40
    for dataset in (train, test):
        known = {glyph.tobytes() for glyph in dataset.glyphs}
        for i in range(20):
            canvas, _, places = dataset.scene(i)
            assert all(np.ascontiguousarray(canvas[y : y + 14, x : x + 14]).tobytes() in known for _, y, x in places)


@pytest.mark.parametrize(
    "options",
    [{}, {"canvas": (45, 98), "num_digits": 5}, {"canvas": (70, 70), "lattice": 14}, {"lattice": 14, "reach": 14}],
)
def test_the_label_is_the_nearest_digit_where_the_question_looks(digits_csv: str, options: dict[str, object]) -> None:
    dataset = scenes(digits_csv, **options).load(0).test
    assert isinstance(dataset, SceneDataset)
    asked = Counter()
    for i in range(200):
        canvas, answer, places = dataset.scene(i)
        assert canvas.shape == dataset.options.canvas
        assert dataset[i][1] == ANSWERS.index(answer)
        (question, y0, x0), others = places[0], places[1:]
        asked[question] += 1
        looks = {
            0: lambda dy, dx: dx > abs(dy),
            1: lambda dy, dx: dy > abs(dx),
            2: lambda dy, dx: -dx > abs(dy),
            3: lambda dy, dx: -dy > abs(dx),
        }[question]
        seen = [(np.hypot(y - y0, x - x0), digit) for digit, y, x in others if looks(y - y0, x - x0)]
        assert min(seen)[1] == answer
        assert len({digit for digit, _, _ in places}) == len(places) == dataset.options.num_digits
        reach = dataset.options.reach or 1000
        assert all(max(abs(y - y0), abs(x - x0)) <= reach for _, y, x in others)
        assert all(y % dataset.options.lattice == x % dataset.options.lattice == 0 for _, y, x in places)
        for (_, ya, xa), (_, yb, xb) in itertools.combinations(places, 2):
            assert max(abs(ya - yb), abs(xa - xb)) >= 14
    assert set(asked) == set(range(len(QUESTIONS)))


def test_the_digits_without_their_places_do_not_tell_the_label(digits_csv: str) -> None:
    dataset = scenes(digits_csv, num_test=2000).load(0).test
    assert isinstance(dataset, SceneDataset)
    by_set = defaultdict(Counter)
    for i in range(2000):
        _, answer, places = dataset.scene(i)
        by_set[frozenset(digit for digit, _, _ in places)][answer] += 1
    best = sum(max(answers.values()) for answers in by_set.values()) / 2000  # knowing each set's own favourite
    assert 1 / 3 <= best < 0.5
    assert all(len(answers) == 3 for answers in by_set.values())


def test_answer_of_by_value() -> None:
    right_of, below, left_of, above = range(4)
    places = [(20, 20), (20, 40), (40, 22), (18, 0), (0, 20)]  # the question; right, below, left, above of it
    assert [answer_of(question, places) for question in (right_of, below, left_of, above)] == [1, 2, 3, 4]
    assert answer_of(right_of, [(20, 20), (20, 0)]) is None  # nobody there
    assert answer_of(right_of, [(20, 20), (40, 41)]) is None  # on the border
    assert answer_of(right_of, [(20, 20), (20, 40), (25, 40)]) is None  # as near as another
    assert answer_of(right_of, [(20, 20), (20, 60), (25, 40)]) == 2
