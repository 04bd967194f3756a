"""The language model: step by step equals the whole, packed documents stand alone, and what it refuses."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relpos2d import Grid, attend, create_encoding
from relpos2d.models import Cache, LanguageModel
from tests.models.builders import DECODING, NAMES, VOCAB_SIZE, batch, build, texts
from tests.refusals import refuses
from tests.tolerances import assert_close


def in_pieces(model: LanguageModel, token_ids: torch.Tensor, mask: torch.Tensor | None, *stops: int) -> torch.Tensor:
    """Logits of all tokens, read piece by piece with a cache."""
    cache, parts = Cache(), []
    with torch.no_grad():
        for start, stop in itertools.pairwise((0, *stops)):
            part = None if mask is None else mask[:, start:stop]
            parts.append(model(token_ids[:, start:stop], part, cache=cache))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("encoding", DECODING, ids=str)
def test_step_by_step_equals_the_whole(encoding: Any) -> None:
    """Case F4: a new query stands behind the past, and not at 0. Goes on beyond max_length."""
    model = build(LanguageModel, encoding)
    (token_ids,) = texts(14)
    expected = model(token_ids)
    assert_close(in_pieces(model, token_ids, None, 4, 5, 9, 14), expected)
    assert_close(in_pieces(model, token_ids, None, *range(1, 15)), expected)


@pytest.mark.parametrize("encoding", DECODING, ids=str)
def test_step_by_step_equals_the_whole_of_padded_prompts(encoding: Any) -> None:
    model = build(LanguageModel, encoding)
    rows = texts(6, 9, 7)
    token_ids, mask = batch(rows, "left")
    found = in_pieces(model, token_ids, mask, 5, 6, 9)
    for number, row in enumerate(rows):
        assert_close(found[number : number + 1, -row.shape[1] :], model(row))


@pytest.mark.parametrize("encoding", DECODING, ids=str)
def test_packed_documents_stand_alone(encoding: Any) -> None:
    model = build(LanguageModel, encoding)
    first, second, third, other = texts(3, 5, 4, 10)
    token_ids = torch.cat((torch.cat((first, second, third), 1), torch.cat((other, other[:, :2]), 1)))
    segments = torch.tensor([[5] * 3 + [0] * 5 + [1] * 4, [2] * 10 + [3] * 2])
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[1, 10:] = False
    found = model(token_ids, mask, segments=segments)
    assert_close(found[:1], torch.cat([model(document) for document in (first, second, third)], 1))
    assert_close(found[1:, :10], model(other))


def test_each_token_is_read_once() -> None:
    model, read = build(LanguageModel, "alibi"), []
    model.decoder.blocks[0].register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    in_pieces(model, texts(9)[0], None, 6, 7, 9)
    assert read == [6, 1, 2]


def test_untied_logits_have_weights_of_their_own() -> None:
    tied, untied = build(LanguageModel), build(LanguageModel, tied=False)
    count = {model: sum(p.numel() for p in model.parameters()) for model in (tied, untied)}
    assert count[untied] - count[tied] == VOCAB_SIZE * 24
    token_ids = texts(4)[0]
    assert_close(tied(token_ids), tied.forward_features(token_ids) @ tied.embedding.weight.T)
    assert_close(untied(token_ids), untied.forward_features(token_ids) @ untied.head.weight.T)


def test_a_refused_pass_leaves_the_cache_as_it_was() -> None:
    model, cache = build(LanguageModel, "alibi"), Cache()
    token_ids = texts(8)[0]
    with torch.no_grad():
        model(token_ids[:, :5], cache=cache)
        with refuses("memory_limit=1 bytes is less than each way needs"):
            model(token_ids[:, 5:], cache=cache, memory_limit=1)
        assert_close(model(token_ids[:, 5:], cache=cache), model(token_ids)[:, 5:])


def test_refusals() -> None:
    model, cache = build(LanguageModel), Cache()
    token_ids = torch.cat(texts(5, 5))
    with torch.no_grad():
        model(token_ids, cache=cache)
        with refuses("LanguageModel: the cache holds 2 rows, token ids have 1"):
            model(token_ids[:1], cache=cache)
        with refuses("LanguageModel: segments are for training; a cache allows one text a row"):
            model(token_ids, segments=torch.zeros_like(token_ids), cache=Cache())
        gap, cache = torch.tensor([[True] * 5, [True] * 4 + [False]]), Cache()
        model(token_ids, gap, cache=cache)
        with refuses("LanguageModel: row 1 of mask has padding between real tokens"):
            model(token_ids, cache=cache)
    with refuses("LanguageModel: segments has shape"):
        model(token_ids, segments=torch.zeros(2, 4, dtype=torch.long))
    with refuses("Cache: is for decoding"):
        model(token_ids, cache=Cache())


QUICK_EXPORTS = [("t5", True), ("table", False)]


class Attended(nn.Module):
    """One attention, as short as it can be exported."""

    def __init__(self, encoding: Any, is_causal: bool) -> None:
        super().__init__()
        self.encoding = create_encoding(encoding, 3, 8, Grid(8))
        self.qkv, self.is_causal = nn.Linear(24, 72), is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, self.encoding, Grid(x.shape[1]), is_causal=self.is_causal)


@pytest.mark.parametrize(
    ("encoding", "is_causal"),
    [
        pytest.param(name, causal, marks=[] if (name, causal) in QUICK_EXPORTS else [pytest.mark.long])
        for name in NAMES
        for causal in (False, True)
    ],
)
def test_f10_exported_for_any_length(encoding: Any, is_causal: bool) -> None:
    model = Attended(encoding, is_causal).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (torch.randn(2, 9, 24),), dynamic_shapes=({1: length},)).module()
    for num_tokens in (5, 8, 33, 300):
        x = torch.randn(2, num_tokens, 24)
        assert_close(program(x), model(x))
