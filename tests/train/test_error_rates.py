"""Errors are those of the shortest edit, summed before they are divided; an interval comes from whole utterances drawn again."""

import itertools

import numpy as np
import pytest

from train import error_rates
from train.error_rates import char_errors, interval, rate, word_errors


def edits(reference: list[str], prediction: list[str]) -> int:
    """The fewest insertions, deletions and substitutions, row by row."""
    row = list(range(len(prediction) + 1))
    for number, wanted in enumerate(reference, start=1):
        above, row = row, [number]
        for column, found in enumerate(prediction, start=1):
            row.append(min(above[column] + 1, row[-1] + 1, above[column - 1] + (wanted != found)))
    return row[-1]


TEXTS = ["", "a", "the cat sat", "the cat", "teh cat sat down", "naïve café", "sat the cat", "ααβ", "the  cat"]


def test_counts_are_those_of_the_shortest_edit() -> None:
    pairs = list(itertools.product(TEXTS, TEXTS))
    references, predictions = [a for a, _ in pairs], [b for _, b in pairs]
    assert char_errors(references, predictions) == [(edits(list(a), list(b)), len(a)) for a, b in pairs]
    assert word_errors(references, predictions) == [(edits(a.split(), b.split()), len(a.split())) for a, b in pairs]


def test_an_empty_reference_counts_what_was_said_in_its_place() -> None:
    assert char_errors(["", "", "ab"], ["a b", "", ""]) == [(3, 0), (0, 0), (2, 2)]
    assert word_errors(["", "", "ab"], ["a b", "", ""]) == [(2, 0), (0, 0), (1, 1)]
    assert char_errors([""], ["abc"]) == [(3, 0)]
    assert char_errors([], []) == word_errors([], []) == []


def test_a_rate_is_errors_over_what_there_is() -> None:
    assert rate([(1, 2), (0, 8)]) == 0.1  # not the mean of a half and nothing
    assert rate([(3, 0), (0, 4)]) == 0.75
    assert rate([(0, 0)]) == 0
    assert rate([(3, 0), (1, 0)]) == 4
    assert rate([(6, 3)]) == 2


def test_an_interval_is_that_of_utterances_drawn_again() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 60, size=83)
    errors = rng.binomial(lengths, 0.2)
    pairs = list(zip(errors.tolist(), lengths.tolist(), strict=True))
    low, high = interval(pairs)
    assert low < rate(pairs) < high
    drawn = np.random.default_rng(2)
    rates = []
    for _ in range(4000):
        chosen = drawn.integers(83, size=83)
        rates.append(errors[chosen].sum() / lengths[chosen].sum())
    assert low == pytest.approx(np.quantile(rates, 0.025), abs=0.005)
    assert high == pytest.approx(np.quantile(rates, 0.975), abs=0.005)
    assert interval(pairs) == (low, high)
    assert interval(pairs, seed=1) != (low, high)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], (0, 0)),
        ([(1, 4)], (0.25, 0.25)),
        ([(0, 0), (0, 0)], (0, 0)),
        ([(1, 5)] * 9, (0.2, 0.2)),
        ([(1, 10), (5, 50)], (0.1, 0.1)),
    ],
)
def test_an_interval_of_what_does_not_vary(pairs: list[tuple[int, int]], expected: tuple[float, float]) -> None:
    assert interval(pairs) == expected


def test_an_interval_does_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(number % 3, 5 + number) for number in range(30)]
    expected = interval(pairs)
    monkeypatch.setattr(error_rates, "MAX_DRAWN", 7 * 30)
    assert interval(pairs) == expected


def record(language: str | None, chars: tuple[int, int], words: tuple[int, int]) -> dict[str, object]:
    names = ("char_errors", "num_chars", "word_errors", "num_words")
    return {"language": language, **dict(zip(names, (*chars, *words), strict=True))}


def test_rates_of_all_and_of_each_language() -> None:
    records = [record("de", (1, 10), (1, 2)), record("de", (3, 10), (1, 2)), record("en", (0, 20), (0, 4))]
    found = error_rates.error_rates(records)
    assert found["cer"] == 4 / 40
    assert found["wer"] == 2 / 8
    assert found["cer_low"] <= found["cer"] <= found["cer_high"]
    assert found["wer_low"] <= found["wer"] <= found["wer_high"]
    assert (found["cer_de"], found["cer_en"]) == (4 / 20, 0)
    for language in (None, "en"):
        alone = error_rates.error_rates([record(language, (1, 10), (1, 2)), record(None, (1, 10), (1, 2))])
        assert set(alone) == {"cer", "cer_low", "cer_high", "wer", "wer_low", "wer_high"}
