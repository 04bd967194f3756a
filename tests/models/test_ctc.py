"""The loss is minus the log of a sum over all ways to emit a text, whatever the type of the targets; decoding merges first."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from relpos2d.models.ctc import collapse, ctc_losses, frames_needed, greedy
from tests.refusals import refuses
from tests.tolerances import assert_close

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def numbered(*texts: str) -> tuple[Tensor, Tensor]:
    """Texts as rows of padded tokens (a is 1), and their lengths."""
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor([LETTERS.index(letter) + 1 for letter in text])
    return tokens, torch.tensor([len(text) for text in texts])


def spelt(path: Sequence[int]) -> list[int]:
    """Merged, then without blanks; written down a second time, to share no code with the library."""
    text = []
    for frame, label in enumerate(path):
        if label != 0 and (frame == 0 or path[frame - 1] != label):
            text.append(label)
    return text


def brute_force(logits: Tensor, text: list[int]) -> Tensor:
    """Of one clip (N, V): minus the log of the summed probabilities of all paths that spell the text."""
    probabilities = logits.double().softmax(dim=1)
    num_frames, vocab_size = probabilities.shape
    total = probabilities.new_zeros(())
    for path in itertools.product(range(vocab_size), repeat=num_frames):
        if spelt(path) == text:
            total = total + torch.stack([probabilities[frame, label] for frame, label in enumerate(path)]).prod()
    return -total.log()


def test_l1_frames_that_a_text_needs() -> None:
    assert frames_needed(*numbered("abcd", "hello", "aaaa", "", "a", "aabb")).tolist() == [4, 6, 7, 0, 1, 6]
    assert frames_needed(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]


def test_l1_padding_is_no_neighbour() -> None:
    padded = torch.tensor([[1, 1, 1, 1], [2, 0, 0, 0]], dtype=torch.int32)
    assert frames_needed(padded, torch.tensor([2, 1])).tolist() == [3, 1]


@pytest.mark.parametrize(("text", "needed"), [("abcd", 4), ("hello", 6), ("aaaa", 7)])
def test_l1_too_few_frames_cost_nothing_and_teach_nothing(text: str, needed: int) -> None:
    tokens, num_tokens = numbered(text, text, "ab", text)
    logits = torch.randn(4, 8, 27, requires_grad=True)
    losses = ctc_losses(logits, torch.tensor([needed - 1, needed, 8, 0]), tokens, num_tokens)
    gradient = torch.autograd.grad(losses.sum(), logits)[0]
    assert losses[[0, 3]].tolist() == [0, 0]
    assert (losses[[1, 2]] > 0).all()
    assert losses.isfinite().all()
    assert (gradient[[0, 3]] == 0).all()
    assert gradient.isfinite().all()
    assert (gradient[1, :needed] != 0).any()
    assert (gradient[1, needed:] == 0).all()


@pytest.mark.parametrize("num_frames", [[2, 0], [0, 0]])
def test_l1_a_batch_of_too_short_clips_alone(num_frames: list[int]) -> None:
    logits = torch.randn(2, 3, 27, requires_grad=True)
    losses = ctc_losses(logits, torch.tensor(num_frames), *numbered("abc", "a"))
    assert losses.tolist() == [0, 0]
    assert (torch.autograd.grad(losses.sum(), logits)[0] == 0).all()


def test_no_frames_at_all() -> None:
    logits = torch.randn(2, 0, 27, requires_grad=True)
    losses = ctc_losses(logits, torch.tensor([0, 0]), *numbered("abc", ""))
    assert losses.tolist() == [0, 0]
    losses.sum().backward()


@pytest.mark.parametrize(("frames", "text"), [(4, [1, 2]), (5, [1, 1]), (4, [2, 1, 2]), (4, []), (3, [1, 1])])
def test_the_sum_over_all_alignments_and_its_gradient(frames: int, text: list[int]) -> None:
    logits = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[*text, 0, 0]])
    losses = ctc_losses(logits, torch.tensor([frames]), tokens, torch.tensor([len(text)]))
    expected = brute_force(logits[0, :frames], text)
    assert_close(losses[0], expected)
    assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (losses[0], expected)))


@pytest.mark.parametrize("columns", [0, 2])
def test_the_empty_text_is_blanks_alone(columns: int) -> None:
    logits = torch.randn(2, 5, 4)
    tokens = torch.zeros(2, columns, dtype=torch.int64)
    losses = ctc_losses(logits, torch.tensor([5, 3]), tokens, torch.tensor([0, 0]))
    log_blank = logits.log_softmax(dim=2)[..., 0]
    assert_close(losses, -torch.stack([log_blank[0].sum(), log_blank[1, :3].sum()]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_l3_every_type_of_targets_gives_the_same_loss(dtype: torch.dtype) -> None:
    logits, num_frames = torch.randn(2, 9, 27), torch.tensor([9, 7])
    tokens, num_tokens = numbered("hello", "abc")
    expected = ctc_losses(logits, num_frames, tokens, num_tokens)
    found = ctc_losses(logits, num_frames.to(dtype), tokens.to(dtype), num_tokens.to(dtype))
    assert found.tolist() == expected.tolist()


def test_l3_padding_of_targets_does_not_count() -> None:
    logits, num_frames = torch.randn(2, 9, 27), torch.tensor([9, 7])
    tokens, num_tokens = numbered("hello", "abc")
    expected = ctc_losses(logits, num_frames, tokens, num_tokens)
    for padding in (-1, 3, 99):
        wider = torch.nn.functional.pad(tokens, (0, 4), value=padding)
        wider[1, 3:] = padding
        assert ctc_losses(logits, num_frames, wider, num_tokens).tolist() == expected.tolist()
    alone = ctc_losses(logits[1:, :7], num_frames[1:], tokens[1:, :3], num_tokens[1:])
    assert_close(alone, expected[1:])


@pytest.mark.parametrize("scale", [1.0, 3.5])
@pytest.mark.parametrize("normalised", [True, False])
def test_l4_the_gradient_is_that_of_float64(scale: float, normalised: bool) -> None:
    logits = torch.randn(3, 20, 27)
    if normalised:
        logits = logits.log_softmax(dim=2)
    num_frames, targets = torch.tensor([20, 13, 8]), numbered("hello", "abcd", "")
    results = []
    for dtype in (torch.float32, torch.float64):
        own = logits.to(dtype).requires_grad_()
        losses = ctc_losses(own, num_frames, *targets)
        results.append((losses, torch.autograd.grad(scale * losses.sum(), own)[0]))
    for single, double in zip(*results, strict=True):
        assert_close(single, double, dtype=torch.float32)


def test_l4_the_softmax_of_a_softmax_is_no_other() -> None:
    logits, num_frames, targets = torch.randn(2, 9, 27), torch.tensor([9, 7]), numbered("hello", "abc")
    assert_close(ctc_losses(logits.log_softmax(dim=2), num_frames, *targets), ctc_losses(logits, num_frames, *targets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_l4_half_precision_is_widened_first(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(1, 400, 27)).to(dtype)
    targets = numbered("abcd" * 20)
    losses = ctc_losses(logits, torch.tensor([400]), *targets)
    assert losses.dtype == torch.float32
    assert_close(losses, ctc_losses(logits.double(), torch.tensor([400]), *targets), dtype=torch.float32)


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 1e9])
def test_g3_nothing_leaks_from_behind_the_end(rubbish: float) -> None:
    clean = torch.randn(2, 9, 27)
    dirty = clean.clone()
    dirty[1, 5:] = rubbish
    results = []
    for logits in (clean, dirty):
        own = logits.requires_grad_()
        losses = ctc_losses(own, torch.tensor([9, 5]), *numbered("hello", "abc"))
        results.append((losses.detach(), torch.autograd.grad(losses.sum(), own)[0]))
    for of_clean, of_dirty in zip(*results, strict=True):
        assert torch.equal(of_clean, of_dirty)


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -float("inf")])
def test_l1_clips_too_short_teach_nothing_whatever_stands_in_their_frames(rubbish: float) -> None:
    logits = torch.randn(2, 9, 27)
    logits[1, :2] = rubbish
    own = logits.requires_grad_()
    losses = ctc_losses(own, torch.tensor([9, 2]), *numbered("hello", "abc"))
    gradient = torch.autograd.grad(losses.sum(), own)[0]
    assert losses[1].tolist() == 0
    assert not gradient[1].any()
    assert gradient[0].isfinite().all()


def test_labels_that_cannot_be_leave_the_others_as_they_are() -> None:
    logits = torch.randn(2, 4, 5, dtype=torch.float64)
    logits[..., 3:] = -torch.inf
    own = logits.requires_grad_()
    losses = ctc_losses(own, torch.tensor([4, 4]), torch.tensor([[1, 2], [3, 1]]), torch.tensor([2, 2]))
    gradient = torch.autograd.grad(losses.sum(), own)[0]
    assert_close(losses[0], brute_force(logits[0, :, :3], [1, 2]))
    assert losses[1] > 9e3  # as good as impossible, and yet a number
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


def test_a_loss_that_is_no_number_is_not_hidden() -> None:
    logits = torch.randn(1, 4, 5)
    logits[0, 2] = torch.nan
    assert ctc_losses(logits, torch.tensor([4]), torch.tensor([[1]]), torch.tensor([1])).isnan().all()


def test_targets_that_cannot_be_are_refused() -> None:
    logits, one = torch.randn(1, 4, 5), torch.tensor([1])
    for token in (0, -1, 5):
        with refuses(rf"token {token} must be from 1 \(0 is the blank\) to 4"):
            ctc_losses(logits, torch.tensor([4]), torch.tensor([[token]]), one)
    with refuses("num_frames = 5 must be from 0 to 4"):
        ctc_losses(logits, torch.tensor([5]), torch.tensor([[1]]), one)
    with refuses("num_tokens = 2 must be from 0 to 1"):
        ctc_losses(logits, torch.tensor([4]), torch.tensor([[1]]), torch.tensor([2]))
    with refuses("num_tokens = -1 must be from 0 to 1"):
        ctc_losses(logits, torch.tensor([4]), torch.tensor([[1]]), torch.tensor([-1]))


def test_what_is_no_batch_of_texts_is_refused() -> None:
    logits, two, rows = torch.randn(2, 6, 5), torch.tensor([2, 2]), torch.tensor([[1, 2], [1, 2]])
    for given, text in (
        (
            (logits[0], two, rows, two),
            r"log_probs are torch.float32 of shape \(6, 5\), allowed are .* of shape \(B, N, V\)",
        ),
        ((logits.long(), two, rows, two), "log_probs are torch.int64 of shape"),
        (
            (logits, two, rows.flatten(), two),
            r"tokens is torch.int64 of shape \(4,\), allowed are .* \(2, L\), each text a row",
        ),
        ((logits, two, rows[:1], two), r"tokens is torch.int64 of shape \(1, 2\)"),
        ((logits, two, rows + 0.5, two), "tokens is torch.float32"),
        ((logits, two, rows > 1, two), "tokens is torch.bool"),
        (
            (logits, two, rows, two[:1]),
            r"num_tokens is torch.int64 of shape \(1,\), allowed are whole numbers of shape \(2,\)",
        ),
        ((logits, two + 0.5, rows, two), "num_frames is torch.float32"),
    ):
        with refuses(f"ctc_losses: {text}"):
            ctc_losses(*given)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ([0, 0, 1, 2, 0], [1, 2]),
        ([1, 1, 0, 1, 1], [1, 1]),
        ([1, 1, 1], [1]),
        ([0, 0], []),
        ([], []),
        ([2, 1, 2, 0, 0, 2], [2, 1, 2, 2]),
    ],
)
def test_l7_merge_first_then_drop_blanks(path: list[int], text: list[int]) -> None:
    assert collapse(path) == text
    assert collapse(torch.tensor(path, dtype=torch.int64)) == text
    frames = torch.nn.functional.one_hot(torch.tensor([path], dtype=torch.int64), 3).float()
    assert greedy(frames, torch.tensor([len(path)])) == [text]


def test_l6_frames_behind_the_end_are_not_read() -> None:
    frames = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0, 2, 2], [2, 0, 1, 1, 1]]), 3).float()
    assert greedy(frames, torch.tensor([5, 2])) == [[1, 2], [2]]
    assert greedy(frames, torch.tensor([0, 4])) == [[], [2, 1]]
    for row, count in ((0, 3), (1, 2)):
        (alone,) = greedy(frames[row : row + 1, :count], torch.tensor([count]))
        assert alone == greedy(frames, torch.tensor([count, count]))[row]
