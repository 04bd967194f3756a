"""Connectionist temporal classification: labels for frames that nobody has aligned (Graves et al., ICML 2006).

Each frame emits a label or a blank. A text is what is left of the frames when equal neighbours are merged and then blanks dropped,
and its probability is the sum over all ways to emit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn import functional as F

BLANK = 0
IMPOSSIBLE = -1e4  # the least log probability: the backward of torch's loss makes NaN of infinite ones


def frames_needed(
    tokens: Integer[Tensor, "batch tokens"], num_tokens: Integer[Tensor, "batch"]
) -> Integer[Tensor, "batch"]:
    """(B,) int64, the fewest frames that can emit each text: one a token, and a blank between equal neighbours.

    Args:
        tokens: (B, L), texts with any padding on the right.
        num_tokens: (B,), how many tokens of each row are the text.
    """
    num_tokens = num_tokens.to(tokens.device).long()
    within = torch.arange(1, max(tokens.shape[1], 1), device=tokens.device) < num_tokens[:, None]
    return num_tokens + ((tokens[:, 1:] == tokens[:, :-1]) & within).sum(dim=1)


def ctc_losses(
    log_probs: Float[Tensor, "batch frames vocabulary"],
    num_frames: Integer[Tensor, "batch"],
    tokens: Integer[Tensor, "batch tokens"],
    num_tokens: Integer[Tensor, "batch"],
) -> Float[Tensor, "batch"]:
    """(B,) float32, the negative log probability of each text in nats; 0 with gradient 0 where the frames are too few for it.

    The loss is the same whatever the integer types and the device of the targets: one implementation serves them all. The
    frames behind `num_frames` count for nothing, whatever stands there.

    Args:
        log_probs: (B, N, V), log probabilities or logits: log_softmax is taken here, in float32 (float64 where that is given).
        num_frames: (B,), how many frames of each row are real.
        tokens: (B, L), texts with any padding on the right.
        num_tokens: (B,), how many tokens of each row are the text.

    Raises:
        ValueError: shapes or dtypes that do not fit one another, more frames or tokens than there are, or a token that is the
            blank or outside the vocabulary.
    """
    check_shapes(log_probs, num_frames, tokens, num_tokens)
    (_, length, vocab_size), device = log_probs.shape, log_probs.device
    tokens, num_tokens, num_frames = (t.to(device).long() for t in (tokens, num_tokens, num_frames))
    real = torch.arange(tokens.shape[1], device=device) < num_tokens[:, None]
    check_targets(tokens[real], vocab_size)
    check_counts("num_tokens", num_tokens, tokens.shape[1])
    check_counts("num_frames", num_frames, length)

    fits = (num_frames >= frames_needed(tokens, num_tokens)) & (num_frames > 0)
    heard = (torch.arange(length, device=device) < num_frames[:, None]) & fits[:, None]
    log_probs = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
    # masked before the softmax, whose backward would pass on a NaN from behind the end
    log_probs = log_probs.masked_fill(~heard[..., None], 0.0).log_softmax(dim=2).clamp(min=IMPOSSIBLE)
    if not fits.any():
        return log_probs.sum(dim=(1, 2)) * 0.0
    losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        tokens.where(real, BLANK),
        num_frames.where(fits, length),
        num_tokens.where(fits, 0),
        blank=BLANK,
        reduction="none",
    )
    return losses.where(fits, 0.0)


def check_shapes(log_probs: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
    if log_probs.ndim != 3 or not log_probs.is_floating_point():
        raise ValueError(
            f"ctc_losses: log_probs are {log_probs.dtype} of shape {tuple(log_probs.shape)}, allowed are floating point numbers "
            "of shape (B, N, V)"
        )
    size = len(log_probs)
    rows = f"({size}, L), each text a row with padding behind it"
    for name, given, fits, allowed in (
        ("num_frames", num_frames, num_frames.shape == (size,), f"({size},)"),
        ("tokens", tokens, tokens.ndim == 2 and len(tokens) == size, rows),
        ("num_tokens", num_tokens, num_tokens.shape == (size,), f"({size},)"),
    ):
        if not fits or given.dtype == torch.bool or given.is_floating_point():
            raise ValueError(
                f"ctc_losses: {name} is {given.dtype} of shape {tuple(given.shape)}, allowed are whole numbers of shape {allowed}"
            )


def check_targets(tokens: Tensor, vocab_size: int) -> None:
    if tokens.numel() and not BLANK < (lowest := int(tokens.min())) <= (highest := int(tokens.max())) < vocab_size:
        wrong = lowest if lowest <= BLANK else highest
        raise ValueError(f"ctc_losses: token {wrong} must be from 1 (0 is the blank) to {vocab_size - 1}")


def check_counts(name: str, counts: Tensor, largest: int) -> None:
    if counts.numel() and not 0 <= (lowest := int(counts.min())) <= (highest := int(counts.max())) <= largest:
        raise ValueError(f"ctc_losses: {name} = {lowest if lowest < 0 else highest} must be from 0 to {largest}")


def collapse(path: Sequence[int] | Integer[Tensor, "frames"]) -> list[int]:
    """The text that a path of one label a frame spells: merges equal neighbours, then drops blanks: `A A _ A A` -> `A A`."""
    labels = path.tolist() if isinstance(path, Tensor) else path
    return [label for label, _ in groupby(labels) if label != BLANK]


def greedy(
    log_probs: Float[Tensor, "batch frames vocabulary"], num_frames: Integer[Tensor, "batch"]
) -> list[list[int]]:
    """The text of the likeliest label of each frame, for each row; only its first `num_frames` frames are read."""
    paths = log_probs.argmax(dim=2).tolist()
    return [collapse(path[:count]) for path, count in zip(paths, num_frames.tolist(), strict=True)]
