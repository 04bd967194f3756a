"""The encoder-decoder: attention to the source has no positions, and decoding with a cache equals the whole."""

import itertools
from typing import Any

import pytest
import torch

from relpos2d import create_encoding
from relpos2d.models import Cache, EncoderDecoder
from relpos2d.positions import Grid
from tests.models.builders import DECODING, SPECS, batch, build, texts
from tests.refusals import refuses
from tests.tolerances import assert_close


@pytest.mark.parametrize("encoding", SPECS, ids=str)
def test_f3_attention_to_the_source_has_no_positions(encoding: Any) -> None:
    """Case F3: the states of the source may come in any order, and nothing is learned about their places."""
    model = build(EncoderDecoder, encoding)
    source, mask = batch(texts(7, 5), "right")
    target = torch.cat(texts(4, 4))
    states, order = model.encode(source, mask), torch.randperm(7)
    expected = model.decode(states, target, mask)
    assert_close(model.decode(states[:, order], target, mask[:, order]), expected)
    assert not torch.allclose(model.decode(states.flip(0), target, mask.flip(0)), expected)
    for block in model.decoder.blocks:
        names = {name for name, _ in block.source_attention.named_parameters()}
        assert names == {f"{name}_proj.weight" for name in ("q", "k", "v", "out")}


@pytest.mark.parametrize("encoding", DECODING, ids=str)
def test_f4_step_by_step_equals_the_whole(encoding: Any) -> None:
    """Case F4, behind a source of another length, with one encoding for all blocks."""
    model = build(EncoderDecoder, encoding, shared_encoding=True)
    source, mask = batch(texts(7, 5), "left")
    target = torch.cat(texts(9, 9))
    with torch.no_grad():
        expected = model(source, target, mask)
        states, cache, parts = model.encode(source, mask), Cache(), []
        for start, stop in itertools.pairwise((0, 1, 2, 6, 9)):
            parts.append(model.forward_head(model.decode(states, target[:, start:stop], mask, cache=cache)))
    assert_close(torch.cat(parts, dim=1), expected)


def test_the_source_is_projected_once() -> None:
    model, calls = build(EncoderDecoder, "alibi"), []
    model.decoder.blocks[1].source_attention.v_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        states, cache = model.encode(texts(5)[0]), Cache()
        for token in texts(1, 1, 1):
            model.decode(states, token, cache=cache)
    assert len(calls) == 1


def test_decoder_has_an_encoding_and_a_depth_of_its_own() -> None:
    model = build(EncoderDecoder, ["learned", "table"], decoder_encoding="alibi", decoder_depth=3)
    kinds = [
        [type(block.attention.encoding).name for block in stack.blocks] for stack in (model.encoder, model.decoder)
    ]
    assert kinds == [["table"] * 2, ["alibi"] * 3]
    assert type(model.absolute) is type(create_encoding("learned", 3, 8, Grid(12)))


def test_refusals() -> None:
    with refuses("EncoderDecoder: decoder_encoding='learned' must have no absolute members"):
        EncoderDecoder(19, decoder_encoding="learned")
    with refuses("EncoderDecoder: decoder_depth=0 must be a whole number of at least 1"):
        EncoderDecoder(19, decoder_depth=0)
    model = build(EncoderDecoder)
    source, target = torch.cat(texts(3, 3)), texts(4)[0]
    with refuses("EncoderDecoder: 2 sources and 1 targets"):
        model(source, target)
    with refuses("EncoderDecoder: source_mask has shape"):
        model(source, source, torch.ones(2, 4, dtype=torch.bool))
    with refuses("EncoderDecoder: the mask of target is torch.int64, allowed is bool"):
        model(source, source, None, torch.ones_like(source))
    with refuses("EncoderDecoder.source: row 1 of mask has no real token"):
        model(source, source, torch.tensor([[True] * 3, [False] * 3]))
    with refuses("EncoderDecoder.target: row 0 of mask has padding between real tokens"):
        model(source, source, None, torch.tensor([[True, False, True], [True] * 3]))
