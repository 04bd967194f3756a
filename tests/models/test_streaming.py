"""A stream, however its samples are cut, says what the model says of the whole recording, and remembers a bounded past."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relpos2d.models import ConformerCTC
from relpos2d.tools.memory import peak_bytes
from tests.models.hearing import SPECS, VOCAB_SIZE, build, noise
from tests.refusals import refuses
from tests.tolerances import assert_close

CONTEXTS: list[dict[str, Any]] = [
    {"chunk_size": 3, "left_context": 4}, {"chunk_size": 4}, {"chunk_size": 1, "left_context": 0},
    {"chunk_size": 5, "left_context": 2, "kernel_size": 4, "conv_norm": "batch"},
    {"chunk_size": 2, "left_context": 9, "intermediate_layers": (1,), "self_conditioning": True, "kernel_size": 1},
]  # fmt: skip


def streamed(model: ConformerCTC, samples: Tensor, sizes: list[int]) -> list[Tensor]:
    """What comes out when pieces of these sizes, again and again, and the rest go in, the last of it at the end."""
    stream, parts, number = model.stream(), [], 0
    while samples.shape[1]:
        size = sizes[number % len(sizes)]
        parts.append(stream.push(samples[:, :size]))
        samples, number = samples[:, size:], number + 1
    return [*parts, stream.finish()]


def assert_equals_the_whole(model: ConformerCTC, samples: Tensor, sizes: list[int]) -> None:
    whole = model(samples, torch.full((len(samples),), samples.shape[1])).log_probs
    assert_close(torch.cat(streamed(model, samples, sizes), dim=1), whole)


@pytest.mark.parametrize("encoding", SPECS, ids=str)
def test_every_encoding(encoding: Any) -> None:
    """Also those that know the place of the query, beyond max_length, and one encoding for all blocks."""
    samples = torch.stack(noise(840, 840))
    assert_equals_the_whole(build(encoding, chunk_size=3, left_context=4), samples, [500, 7])
    assert_equals_the_whole(build(encoding, chunk_size=4, shared_encoding=True), samples, [500, 7])


@pytest.mark.parametrize("options", CONTEXTS, ids=str)
def test_every_context_at_every_length(options: dict[str, Any]) -> None:
    """From one sample on, and with every number of samples, features and frames left over at the end."""
    model = build("transformer_xl", **options)
    for length in (1, 15, 16, 17, 32, 33, 48, 63, 64, 65, 97, 128, 150, 192, 321):
        assert_equals_the_whole(model, noise(length)[0][None], [50])


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5), length=st.integers(1, 900))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_any_pieces(sizes: list[int], length: int) -> None:
    assert_equals_the_whole(build("rope", chunk_size=3, left_context=4), noise(length)[0][None], sizes)


def test_sample_by_sample() -> None:
    assert_equals_the_whole(build("alibi", chunk_size=2, left_context=3), noise(150)[0][None], [1])


def test_a_frame_comes_out_once_its_chunk_is_complete() -> None:
    model = build(chunk_size=2, left_context=3)
    parts = streamed(model, noise(500)[0][None], [1])
    counts = [part.shape[1] for part in parts]
    assert parts[0].shape == (1, 0, VOCAB_SIZE)
    # 8 features, and 24 samples behind them, as many as the spectrum of the last one reaches
    assert [i + 1 for i, count in enumerate(counts[:-1]) if count] == [152, 280, 408]
    assert set(counts[:-1]) == {0, 2}
    assert counts[-1] == 2


def test_memory_is_bounded() -> None:
    model = build("transformer_xl", chunk_size=4, left_context=8).float()

    def hear(num_pieces: int) -> None:
        stream = model.stream()
        for _ in range(num_pieces):
            stream.push(torch.zeros(1, 300))
        stream.finish()

    hear(5)  # what is made once
    assert peak_bytes(lambda: hear(60)) <= 1.01 * peak_bytes(lambda: hear(15))


def test_streams_of_one_model_do_not_hear_each_other() -> None:
    model, (one, other) = build("t5", chunk_size=2), noise(300, 300)
    first, second = model.stream(), model.stream()
    parts: list[list[Tensor]] = [[], []]
    for start in (0, 150):
        for stream, clip, found in zip((first, second), (one, other), parts, strict=True):
            found.append(stream.push(clip[None, start : start + 150]))
    for stream, clip, found in zip((first, second), (one, other), parts, strict=True):
        whole = model(clip[None], torch.tensor([300])).log_probs
        assert_close(torch.cat([*found, stream.finish()], dim=1), whole)


def test_no_gradients() -> None:
    stream = build(chunk_size=2).stream()
    assert not stream.push(noise(300)[0][None]).requires_grad
    assert not stream.finish().requires_grad


def test_refusals() -> None:
    with refuses("ConformerCTC: has no chunk_size, so a frame may see the future; a stream needs one"):
        build().stream()
    model, (clip,) = build(chunk_size=2), noise(200)
    with refuses("ConformerCTC: a stream hears in evaluation; call"):
        model.train().stream()
    stream = model.eval().stream()
    with refuses("Stream: heard nothing; push samples first"):
        stream.finish()
    for samples, text in (
        (clip, r"samples are torch.float64 of shape \(200,\)"),
        (clip[0], r"samples are torch.float64 of shape \(\)"),
        (clip[None, :0], r"samples have shape \(1, 0\); an empty recording"),
        (clip[None] / 0, "row 0 has a sample that is not finite"),
    ):
        with refuses(f"Stream: {text}"):
            stream.push(samples)
    stream.push(clip[None])
    model.train()  # as an epoch that begins in between does
    for heard in (lambda: stream.push(clip[None]), stream.finish):
        with refuses("ConformerCTC: a stream hears in evaluation; call"):
            heard()
    model.eval()
    with refuses("Stream: samples have 2 rows, those before had 1"):
        stream.push(clip.expand(2, -1))
    stream.finish()
    for again in (lambda: stream.push(clip[None]), stream.finish):
        with refuses(r"Stream: is finished; model.stream\(\) begins another one"):
            again()
