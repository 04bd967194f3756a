"""Character and word error rates: wrong, missing and superfluous ones over those there are, with intervals by resampling."""

from collections.abc import Callable, Sequence
from typing import Any

import jiwer
import numpy as np

NUM_RESAMPLES, LEVEL = 1000, 0.95
MAX_DRAWN = 2**22  # utterances that are drawn at once

Counts = list[tuple[int, int]]


def char_errors(references: Sequence[str], predictions: Sequence[str]) -> Counts:
    """For each utterance how many characters are wrong, and how many there are to be said. Blanks at both ends do not count."""
    return counts(jiwer.process_characters, references, predictions)


def word_errors(references: Sequence[str], predictions: Sequence[str]) -> Counts:
    """For each utterance how many words are wrong, and how many there are to be said."""
    return counts(jiwer.process_words, references, predictions)


def counts(process: Callable[..., Any], references: Sequence[str], predictions: Sequence[str]) -> Counts:
    if not references:  # jiwer makes one of none
        return []
    output = process(list(references), list(predictions))
    found = []
    for reference, alignment in zip(output.references, output.alignments, strict=True):
        errors = sum(
            max(part.ref_end_idx - part.ref_start_idx, part.hyp_end_idx - part.hyp_start_idx)
            for part in alignment
            if part.type != "equal"
        )
        found.append((errors, len(reference)))
    return found


def error_rates(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """cer and wer of all utterances, each as the share of what there is to be said, with the bounds of its interval; and the cer
    of each language, where there are several.

    Args:
        records: with char_errors, num_chars, word_errors, num_words, language.
    """
    rates: dict[str, float] = {}
    for name, unit in (("cer", "char"), ("wer", "word")):
        pairs = [(record[f"{unit}_errors"], record[f"num_{unit}s"]) for record in records]
        low, high = interval(pairs)
        rates |= {name: rate(pairs), f"{name}_low": low, f"{name}_high": high}
    languages = sorted({record["language"] for record in records if record["language"] is not None})
    for language in languages if len(languages) > 1 else ():
        own = [(r["char_errors"], r["num_chars"]) for r in records if r["language"] == language]
        rates[f"cer_{language}"] = rate(own)
    return rates


def rate(pairs: Counts) -> float:
    """Errors of all utterances over what there is to be said in all of them; the errors, where that is nothing."""
    return sum(errors for errors, _ in pairs) / max(1, sum(length for _, length in pairs))


def interval(pairs: Counts, seed: int = 0) -> tuple[float, float]:
    """The bounds between which the rate falls in 95 % of the sets that are drawn from these utterances, each as large as they.

    An utterance is drawn whole, as often as it comes: its errors have a speaker and a noise in common.
    """
    if len(pairs) < 2:
        return rate(pairs), rate(pairs)
    errors, lengths = np.asarray(pairs, dtype=np.int64).T
    rng = np.random.default_rng(seed)
    at_once = max(1, MAX_DRAWN // len(pairs))
    rates = []
    for start in range(0, NUM_RESAMPLES, at_once):
        drawn = rng.integers(len(pairs), size=(min(at_once, NUM_RESAMPLES - start), len(pairs)))
        rates.append(errors[drawn].sum(axis=1) / np.maximum(1, lengths[drawn].sum(axis=1)))
    low, high = np.quantile(np.concatenate(rates), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high
