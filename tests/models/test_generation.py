"""generate(): the likeliest token, chance and beams, against loops that read everything again."""

import itertools
from typing import Any

import pytest
import torch

from relpos2d.models import EncoderDecoder, LanguageModel, generate
from tests.models.builders import DECODING, SUMS, batch, build, texts
from tests.refusals import refuses

EOS = 2


def next_logits(model: Any, prompt: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What a model says behind each of the new tokens (B, n) and behind the prompt or bos: (B, n + 1, V)."""
    if isinstance(model, EncoderDecoder):
        return model(prompt.expand(len(new), -1), torch.nn.functional.pad(new, (1, 0), value=1))
    together = torch.cat((prompt.expand(len(new), -1), new), dim=1)
    return model(together)[:, prompt.shape[1] - 1 :]


def bos(model: Any) -> dict[str, Any]:
    return {"bos_id": 1} if isinstance(model, EncoderDecoder) else {}


def likeliest(model: Any, prompt: torch.Tensor, num_tokens: int, eos_id: int | None) -> list[int]:
    new = prompt[:, :0]
    while new.shape[1] < num_tokens and (eos_id is None or eos_id not in new):
        new = torch.cat((new, next_logits(model, prompt, new)[:, -1:].argmax(-1)), dim=1)
    return new[0].tolist()


@pytest.mark.parametrize(
    ("cls", "encoding"), [*((LanguageModel, spec) for spec in DECODING), (EncoderDecoder, SUMS[0])], ids=str
)
def test_the_likeliest_token_for_prompts_of_unequal_length(cls: Any, encoding: Any) -> None:
    model = build(cls, encoding)
    rows = texts(3, 6)
    token_ids, mask = batch(rows, "left")
    expected = [likeliest(model, row, 3, None) for row in rows]
    assert generate(model, token_ids, mask, max_new_tokens=3, **bos(model)).tolist() == expected


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cls", [LanguageModel, EncoderDecoder])
def test_rows_end_with_eos_and_give_padding(cls: Any, num_beams: int) -> None:
    model = build(cls, "alibi", vocab_size=5, seed=13, tied=False)
    rows = [row % 5 for row in texts(3, 6, 4, 5)]
    token_ids, mask = batch(rows, "left")
    options = {"max_new_tokens": 5, "eos_id": EOS, "padding_id": 4, "num_beams": num_beams, **bos(model)}
    found = generate(model, token_ids % 5, mask, **options)
    lengths = set()
    for row, new in zip(rows, found.tolist(), strict=True):
        alone = generate(model, row, **options)[0].tolist()
        assert new == alone + [4] * (len(new) - len(alone))
        assert EOS not in alone[:-1]
        if num_beams == 1:
            assert alone == likeliest(model, row, 5, EOS)
        lengths.add(len(alone))
    assert min(lengths) < max(lengths) == found.shape[1]  # the seed is chosen so


def test_stops_as_soon_as_all_rows_have_ended() -> None:
    model, calls = build(LanguageModel, vocab_size=4), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.decoder.register_forward_hook(lambda *_: calls.append(1))
    (prompt,) = texts(3)
    first = likeliest(model, prompt % 4, 1, None)[0]
    calls.clear()
    assert generate(model, prompt % 4, max_new_tokens=50, eos_id=first).tolist() == [[first]]
    assert len(calls) == 1


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("cls", [LanguageModel, EncoderDecoder])
def test_beam_search_equals_all_texts_tried(cls: Any, length_penalty: float) -> None:
    """With beams enough to drop nothing; some rows differ from taking the likeliest token each time."""
    model = build(cls, "alibi", vocab_size=4, seed=2, tied=False)
    prompts = torch.cat(texts(*[5] * 4)) % 4
    everything = torch.tensor(list(itertools.product(range(4), repeat=3)))
    best = []
    for prompt in prompts:
        steps = next_logits(model, prompt[None], everything)[:, :-1].log_softmax(-1)
        steps = steps.gather(-1, everything[..., None])[..., 0]
        ranked = {}
        for text, probabilities in zip(everything.tolist(), steps.tolist(), strict=True):
            length = text.index(EOS) + 1 if EOS in text else 3
            ranked[tuple(text[:length])] = sum(probabilities[:length]) / length**length_penalty
        winner = list(max(ranked, key=ranked.__getitem__))
        best.append(winner + [0] * (3 - len(winner)))
    options = {"max_new_tokens": 3, "eos_id": EOS, **bos(model)}
    found = generate(model, prompts, num_beams=64, length_penalty=length_penalty, **options)
    assert torch.nn.functional.pad(found, (0, 3 - found.shape[1])).tolist() == best
    assert found.tolist() != generate(model, prompts, **options).tolist()  # the seed is chosen so


@pytest.mark.parametrize("cls", [LanguageModel, EncoderDecoder])
def test_with_and_without_cache_agree(cls: Any) -> None:
    model = build(cls, ["learned", "alibi"])
    token_ids, mask = batch(texts(5, 8, 6), "left")
    options = {"max_new_tokens": 5, "num_beams": 4, "eos_id": EOS, **bos(model)}
    found = generate(model, token_ids, mask, **options)
    assert torch.equal(found, generate(model, token_ids, mask, use_cache=False, **options))
    options["num_beams"] = 1
    greedy = generate(model, token_ids, mask, **options)
    assert torch.equal(greedy, generate(model, token_ids, mask, use_cache=False, **options))
    assert not torch.equal(found, greedy)


def test_chance_follows_the_probabilities_that_are_left() -> None:
    model = build(LanguageModel, "alibi")
    (prompt,) = texts(4)
    many = prompt.expand(1500, -1)
    likely = (model(prompt)[0, -1] / 2.0).softmax(-1).detach()
    order = likely.argsort(descending=True)

    def frequencies(**options: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        drawn = generate(model, many, max_new_tokens=1, do_sample=True, temperature=2.0, generator=generator, **options)
        return drawn[:, 0].bincount(minlength=19) / 1500

    def assert_drawn_from(kept: torch.Tensor, found: torch.Tensor) -> None:
        expected = torch.zeros_like(likely)
        expected[kept] = likely[kept] / likely[kept].sum()
        assert (found - expected).abs().max() < 0.05
        assert set(found.nonzero().flatten().tolist()) <= set(kept.tolist())

    assert_drawn_from(order, frequencies())
    assert_drawn_from(order[:3], frequencies(top_k=3))
    some = float(likely[order[:2]].sum())
    assert_drawn_from(order[:2], frequencies(top_p=some - 1e-6))
    assert_drawn_from(order[:3], frequencies(top_p=some + 1e-6))
    assert_drawn_from(order[:1], frequencies(top_p=some + 1e-6, top_k=1))


def test_the_same_generator_gives_the_same_text_and_one_token_is_the_likeliest() -> None:
    model = build(LanguageModel, "alibi")
    prompts = torch.cat(texts(4, 4))

    def drawn(seed: int, **options: Any) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompts, max_new_tokens=8, do_sample=True, generator=generator, **options).tolist()

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, top_k=1) == generate(model, prompts, max_new_tokens=8).tolist()


def test_modes_are_left_as_they_were_and_nothing_is_dropped() -> None:
    model = build(LanguageModel, "alibi", dropout=0.5).train()
    (prompt,) = texts(4)
    model.decoder.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    found = generate(model, prompt, max_new_tokens=6)
    assert [module.training for module in model.modules()] == modes
    assert not found.is_inference()
    assert found.tolist() == generate(model.eval(), prompt, max_new_tokens=6).tolist()
    model.train()
    with refuses("holds the id 19"):
        generate(model, prompt * 0 + 19, max_new_tokens=6)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number of at least 1"),
        ({"num_beams": 0}, "num_beams=0 must be a whole number of at least 1"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2 and do_sample=True exclude one another"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 is for beam search"),
        ({"temperature": 0.5}, "temperature is for sampling; give do_sample=True"),
        ({"top_k": 3}, "top_k is for sampling"),
        ({"top_p": 0.5}, "top_p is for sampling"),
        ({"generator": torch.Generator()}, "generator is for sampling"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"do_sample": True, "top_k": 0}, "top_k=0 must be a whole number of at least 1"),
        ({"do_sample": True, "top_k": 20}, "top_k=20 must be at most 19"),
        ({"do_sample": True, "top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"eos_id": 19}, "eos_id=19 must be between 0 and 18"),
        ({"padding_id": -1}, "padding_id=-1 must be between 0 and 18"),
        ({"bos_id": 1}, "bos_id=1 is for an EncoderDecoder"),
        ({"mask": torch.tensor([[True] * 4, [True, True, True, False]])}, "row 1 of mask ends in padding"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with refuses(f"generate: {text}"):
        generate(build(LanguageModel), torch.cat(texts(4, 4)), **{"max_new_tokens": 3, **options})


def test_refuses_models_that_do_not_write() -> None:
    with refuses("generate: model is a Linear, allowed are LanguageModel and EncoderDecoder"):
        generate(torch.nn.Linear(2, 2), texts(4)[0], max_new_tokens=3)  # type: ignore[arg-type]
    with refuses("generate: an EncoderDecoder needs bos_id"):
        generate(build(EncoderDecoder), texts(4)[0], max_new_tokens=3)
