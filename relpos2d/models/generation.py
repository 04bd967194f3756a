"""generate(): go on with a text, or answer a source, by the likeliest token, by chance, or by beam search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relpos2d.models.cache import Cache
from relpos2d.models.encoder_decoder import EncoderDecoder
from relpos2d.models.language_model import LanguageModel
from relpos2d.models.token_model import check_size


@torch.no_grad()
def generate(
    model: LanguageModel | EncoderDecoder,
    token_ids: Int[Tensor, "batch tokens"],
    mask: Bool[Tensor, "batch tokens"] | None = None,
    *,
    max_new_tokens: int,
    eos_id: int | None = None,
    padding_id: int = 0,
    bos_id: int | None = None,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Int[Tensor, "batch new_tokens"]:
    """Write up to `max_new_tokens` tokens for each row, in evaluation mode and without gradients.

    Args:
        model: a LanguageModel, which goes on with the rows, or an EncoderDecoder, which answers them.
        token_ids: (B, N), prompts or sources.
        mask: (B, N), True for real tokens; prompts of unequal length are padded on the left. None: all are real.
        max_new_tokens: when to stop at the latest.
        eos_id: a row ends with this token; None: never.
        padding_id: what stands behind the end of a row.
        bos_id: first token of a target, which an EncoderDecoder needs and which is not returned.
        num_beams: texts that are kept at a time; 1: no search.
        length_penalty: beam search ranks texts by their log probability / (number of new tokens ** length_penalty).
        do_sample: draw tokens by their probability instead of taking the likeliest.
        temperature: what logits are divided by before a token is drawn.
        top_k: draw from this many likeliest tokens only; None: from all.
        top_p: draw from the fewest likeliest tokens that together have this probability; None: from all.
        generator: where random numbers come from.
        use_cache: keep keys and values; False: read everything again for each token.

    Returns:
        The new tokens (B, at most max_new_tokens), without the prompt; fewer if all rows have ended.

    Raises:
        ValueError: another kind of model, options that exclude one another or are out of range, a prompt that is padded on the
            right, or what the model refuses.
    """
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise ValueError(f"generate: model is a {type(model).__name__}, allowed are LanguageModel and EncoderDecoder")
    _check_options(max_new_tokens, num_beams, length_penalty, do_sample, temperature, top_k, top_p, generator)
    for name, token, needed in (
        ("eos_id", eos_id, False),
        ("padding_id", padding_id, True),
        ("bos_id", bos_id, isinstance(model, EncoderDecoder)),
    ):
        if token is None and needed:
            raise ValueError(f"generate: an EncoderDecoder needs {name}, the first token of every target")
        if token is not None and not 0 <= token < model.vocab_size:
            raise ValueError(
                f"generate: {name}={token} must be between 0 and {model.vocab_size - 1}, an id of the vocabulary"
            )
    if bos_id is not None and isinstance(model, LanguageModel):
        raise ValueError(
            f"generate: bos_id={bos_id} is for an EncoderDecoder; put it into the prompts of a LanguageModel"
        )
    if top_k is not None and top_k > model.vocab_size:
        raise ValueError(f"generate: top_k={top_k} must be at most {model.vocab_size}, the size of the vocabulary")

    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        writer = _new_writer(model, token_ids, mask, bos_id, Cache() if use_cache else None)
        if num_beams > 1:
            return _search(writer, max_new_tokens, eos_id, padding_id, num_beams, length_penalty)

        def chosen(logits: Tensor) -> Tensor:
            return _drawn(logits, temperature, top_k, top_p, generator) if do_sample else logits.argmax(dim=-1)

        return _write(writer, max_new_tokens, eos_id, padding_id, chosen)
    finally:
        for module in training:
            module.training = True


class Writer:
    """A text that grows, and what a model says comes next.

    Args:
        model: which reads it.
        text: (B, N), what stands there at the start.
        mask: (B, N), which of it is real; None: all.
        cache: None: everything is read again for each token.
        source: (B, M, C), states that an EncoderDecoder has made of its source.
        source_mask: (B, M), which of them are real; None: all.
    """

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        text: Int[Tensor, "batch tokens"],
        mask: Bool[Tensor, "batch tokens"] | None,
        cache: Cache | None,
        source: Float[Tensor, "batch source_tokens channels"] | None = None,
        source_mask: Bool[Tensor, "batch source_tokens"] | None = None,
    ) -> None:
        self.model, self.text, self.mask, self.cache = model, text, mask, cache
        self.source, self.source_mask = source, source_mask

    def logits(self) -> Float[Tensor, "batch vocabulary"]:
        """What comes behind the text, in at least float32."""
        start = 0 if self.cache is None else self.cache.length
        text, mask = self.text[:, start:], None if self.mask is None else self.mask[:, start:]
        if isinstance(self.model, LanguageModel):
            states = self.model.forward_features(text, mask, cache=self.cache)
        else:
            assert self.source is not None
            states = self.model.decode(self.source, text, self.source_mask, mask, cache=self.cache)
        logits = self.model.forward_head(states[:, -1])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def write(self, tokens: Int[Tensor, " batch"]) -> None:
        """Put one token behind each row."""
        self.text = torch.cat((self.text, tokens[:, None]), dim=1)
        if self.mask is not None:
            self.mask = nn.functional.pad(self.mask, (0, 1), value=True)

    def keep(self, rows: Int[Tensor, " new_batch"], *, same_source: bool = False) -> None:
        """Go on with these rows; `same_source`: each row takes the place of one with the same source."""

        def kept(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(0, rows)

        self.text, self.mask = self.text.index_select(0, rows), kept(self.mask)
        if not same_source:
            self.source, self.source_mask = kept(self.source), kept(self.source_mask)
        if self.cache is not None:
            self.cache.reorder(rows, same_source=same_source)


def _new_writer(
    model: LanguageModel | EncoderDecoder,
    token_ids: Tensor,
    mask: Tensor | None,
    bos_id: int | None,
    cache: Cache | None,
) -> Writer:
    if isinstance(model, EncoderDecoder):
        assert bos_id is not None
        source = model.encode(token_ids, mask)
        return Writer(model, token_ids.new_full((len(token_ids), 1), bos_id), None, cache, source, mask)
    if mask is not None and mask.shape == token_ids.shape and mask.numel() and not bool(mask[:, -1].all()):
        row = int(mask[:, -1].long().argmin())
        raise ValueError(f"generate: row {row} of mask ends in padding; pad prompts of unequal length on the left")
    return Writer(model, token_ids, mask, cache)


def _write(
    writer: Writer,
    max_new_tokens: int,
    eos_id: int | None,
    padding_id: int,
    chosen: Callable[[Tensor], Tensor],
) -> Int[Tensor, "batch new_tokens"]:
    """One token after another, each chosen from the logits."""
    written: list[Tensor] = []
    ended = torch.zeros_like(writer.text[:, 0], dtype=torch.bool)
    while True:
        tokens = torch.where(ended, padding_id, chosen(writer.logits()))
        written.append(tokens)
        if eos_id is not None:
            ended |= tokens == eos_id
        if len(written) == max_new_tokens or bool(ended.all()):
            return torch.stack(written, dim=1)
        writer.write(tokens)


def _search(
    writer: Writer, max_new_tokens: int, eos_id: int | None, padding_id: int, num_beams: int, length_penalty: float
) -> Int[Tensor, "batch new_tokens"]:
    """Beam search: of all texts that go on from those kept, keep the best by their log probability for their length.

    A text that has ended keeps its beam as long as it is among the best; it goes on with padding, which costs nothing.
    """
    logits = writer.logits()
    batch, vocab_size = logits.shape
    first_beam = torch.arange(batch, device=logits.device)[:, None] * num_beams
    rows = torch.arange(batch, device=logits.device).repeat_interleave(num_beams)
    writer.keep(rows)
    logits = logits[rows]
    # all beams of a row are the same text at first: only one of them counts
    totals = logits.new_full((batch, num_beams), float("-inf"))
    totals[:, 0] = 0.0
    lengths = torch.zeros_like(totals)
    ended = torch.zeros_like(totals, dtype=torch.bool)
    written = writer.text.new_empty(batch, num_beams, 0)
    goes_on_with_padding = logits.new_full((vocab_size,), float("-inf"))
    goes_on_with_padding[padding_id] = 0.0
    while True:
        steps = logits.log_softmax(dim=-1).unflatten(0, (batch, num_beams))
        candidates = totals[..., None] + torch.where(ended[..., None], goes_on_with_padding, steps)
        lengths = lengths + ~ended
        best = (candidates / lengths[..., None] ** length_penalty).flatten(1).topk(num_beams).indices
        parents, tokens = best // vocab_size, best % vocab_size
        totals = candidates.flatten(1).gather(1, best)
        lengths, ended = lengths.gather(1, parents), ended.gather(1, parents)
        written = torch.cat((written.gather(1, parents[..., None].expand_as(written)), tokens[..., None]), dim=2)
        if eos_id is not None:
            ended = ended | (tokens == eos_id)
        if written.shape[2] == max_new_tokens or bool((ended | totals.isneginf()).all()):
            break
        writer.keep((first_beam + parents).flatten(), same_source=True)
        writer.write(tokens.flatten())
        logits = writer.logits()
    winner = (totals / lengths**length_penalty).argmax(dim=1)
    found = written[torch.arange(batch, device=winner.device), winner]
    ended_at = lengths.gather(1, winner[:, None]).max().long()
    return found[:, : int(ended_at)]


def _drawn(
    logits: Float[Tensor, "batch vocabulary"],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Int[Tensor, " batch"]:
    """A token for each row by chance."""
    logits = logits / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    if top_p is not None:
        falling, order = logits.sort(dim=-1, descending=True)
        probabilities = falling.softmax(dim=-1)
        # what stands in front of a token has enough: it is not needed
        falling = falling.masked_fill(probabilities.cumsum(dim=-1) - probabilities >= top_p, float("-inf"))
        logits = torch.empty_like(logits).scatter(1, order, falling)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def _check_options(
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float,
    do_sample: bool,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> None:
    check_size("generate", "max_new_tokens", max_new_tokens)
    check_size("generate", "num_beams", num_beams)
    if do_sample and num_beams > 1:
        raise ValueError(f"generate: num_beams={num_beams} and do_sample=True exclude one another")
    if num_beams == 1 and length_penalty != 1.0:
        raise ValueError(f"generate: length_penalty={length_penalty} is for beam search; give num_beams above 1")
    sampling = {"temperature": temperature != 1.0, "top_k": top_k is not None, "top_p": top_p is not None}
    sampling["generator"] = generator is not None
    for name, given in sampling.items():
        if given and not do_sample:
            raise ValueError(f"generate: {name} is for sampling; give do_sample=True, or leave it out")
    if not 0.0 < temperature < float("inf"):
        raise ValueError(
            f"generate: temperature={temperature} must be above 0; for the likeliest token leave out do_sample"
        )
    if top_k is not None:
        check_size("generate", "top_k", top_k)
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"generate: top_p={top_p} must be above 0 and at most 1")
