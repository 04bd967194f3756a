"""Speech recognition: what is said in a recording, by CTC; error rates of characters and words."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from relpos2d.models.ctc import ctc_losses, frames_needed
from train.config import OWN_MODELS, Config, Trainer, encoding_argument
from train.data.description import SpeechDescription
from train.data.stream import Drawn
from train.decode import Decoder, create_decoder
from train.error_rates import char_errors, error_rates, word_errors
from train.tasks import Records
from train.tasks.texts import TextTask, gathered

INTERMEDIATE = 0.3  # share of the layers in the middle in the loss, unless given
NUM_FITTED = 256  # training recordings whose spectrum stands for that of all
LONGEST_DRAWN = 12.0  # seconds


class SpeechRecognition(TextTask):
    """A recogniser with one of our encodings, trained on recordings and their texts."""

    score = "cer"
    records_name = "predictions.jsonl"

    def __init__(self, config: Config):
        super().__init__(config)
        self.batch_size = evaluation_size(config.trainer, max(self.data.test.durations))
        self.intermediate = config.loss.intermediate_ctc or INTERMEDIATE
        self.decoding = {"name": config.decoding.name, **config.decoding.given()} if config.decoding else {}
        self.create_decoder()  # which may refuse it, now and not after training

    def load(self, config: Config) -> Any:
        """The recordings; the longest one as the model hears it, since slower ones last longer."""
        data: Any = config.data.load(config.seed)
        return replace(data, max_duration=data.max_duration / min(data.train.speed))

    def create_model(self, config: Config) -> nn.Module:
        """The model, which knows the mean of the spectrum where it wants to."""
        model: Any = create_speech_model(config, self.about)
        if model.log_mel.normalize == "fixed":
            model.log_mel.fit(some_samples(self.train_data, self.max_damaged))
        warn_of_short(model, self.data.train, self.data.test, max(self.data.train.speed))
        return model

    def create_decoder(self) -> Decoder:
        return create_decoder(self.data.tokenizer, self.decoding, self.data.train.texts)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        samples, num_samples, tokens, num_tokens = batch
        output = model(samples, num_samples)
        fits = output.num_frames >= frames_needed(tokens, num_tokens)
        count = num_tokens[fits].sum().clamp(min=1)
        last, *between = (
            ctc_losses(log_probs, output.num_frames, tokens, num_tokens).sum() / count
            for log_probs in (output.log_probs, *output.intermediate)
        )
        if between:
            last = (1 - self.intermediate) * last + self.intermediate * torch.stack(between).mean()
        return last, {"too_short": (~fits).sum().float()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        was_training = model.training
        model.eval()
        records: Records = []
        test, decoder = self.data.test, self.create_decoder()
        for indices, (samples, num_samples, tokens, num_tokens) in self.batches(test, accelerator):
            with accelerator.autocast():
                output = model(samples, num_samples)
            numbers = {
                "loss": ctc_losses(output.log_probs, output.num_frames, tokens, num_tokens),
                "num_tokens": num_tokens,
                "num_frames": output.num_frames,
                "num_needed": frames_needed(tokens, num_tokens),
            }
            columns = [values.tolist() for values in numbers.values()]
            predictions = decoder(output.log_probs, output.num_frames)
            for index, prediction, *row in zip(indices, predictions, *columns, strict=False):  # no index: not ours
                records.append(self.record(index, prediction) | dict(zip(numbers, row, strict=True)))
        model.train(was_training)
        records = gathered(records)
        if not records:
            raise ValueError(f"there is no test recording that can be read; {len(test)} are damaged")
        fitting = [record for record in records if record["num_frames"] >= record["num_needed"]]
        num_tokens = sum(record["num_tokens"] for record in fitting)
        metrics = {
            **error_rates(records),
            "loss": sum(record["loss"] for record in fitting) / max(1, num_tokens),
            "num_examples": len(records),
            "num_too_short": len(records) - len(fitting),
            "num_damaged": len(test) - len(records),
            "left_out": self.data.left_out,
        }
        return metrics, records

    def record(self, index: int, prediction: str) -> dict[str, Any]:
        """What is known of a test recording, and how far from its text the prediction is."""
        test = self.data.test
        text = test.texts[index]
        ((wrong_chars, num_chars),) = char_errors([text], [prediction])
        ((wrong_words, num_words),) = word_errors([text], [prediction])
        return {
            "index": index,
            "name": test.names[index],
            "language": test.languages[index],
            "seconds": test.durations[index],
            "text": text,
            "prediction": prediction,
            "char_errors": wrong_chars,
            "num_chars": num_chars,
            "word_errors": wrong_words,
            "num_words": num_words,
        }

    def pictures(self, folder: Path, records: Records, model: nn.Module) -> list[Path]:
        """The words that were heard in the first test recording of which there are some, over its spectrogram."""
        from train.align import align, beside_pauses, draw_alignment, loudness, to_words  # for the main process alone

        heard: Any = model
        tokenizer = self.data.tokenizer
        drawn = [record for record in records if record["prediction"] and record["seconds"] <= LONGEST_DRAWN]
        for record in drawn[:1]:
            samples, _ = self.data.test[record["index"]]
            with torch.no_grad():
                log_probs = heard(samples[None], torch.tensor([len(samples)])).log_probs[0]
            (tokens,) = self.create_decoder().tokens(log_probs[None], torch.tensor([len(log_probs)]))
            words = to_words(align(log_probs, tokens), tokenizer, heard.frame_time, record["seconds"])
            words = beside_pauses(words, loudness(samples, heard.log_mel.hop_samples), heard.log_mel.hop)
            title = f"{record['name']}: {record['text']}"
            return [draw_alignment(folder / "alignment.png", samples, log_probs, words, heard, tokenizer, title)]
        return []


def evaluation_size(trainer: Trainer, longest: float) -> int:
    """How many test recordings, of up to `longest` seconds, take no more memory than a part of a training batch."""
    size = trainer.batch_size
    if trainer.batch_seconds is not None:
        size = min(size, int(trainer.batch_seconds / longest))
    return max(1, size // trainer.accumulate)


def create_speech_model(config: Config, about: SpeechDescription) -> nn.Module:
    """The configured model with the configured encoding, for the tokens and the sample rate of the data.

    Raises:
        ValueError: the model cannot be built like this, with what it said.
    """
    model: Any = config.model
    frame = 4 * model.hop  # seconds: every fourth frame is left
    options = {"max_length": math.ceil(about.max_duration / frame), **model.given()}
    sizes = (about.vocab_size, about.sample_rate)
    try:
        return OWN_MODELS[model.name](*sizes, encoding=encoding_argument(config), **options)
    except (ValueError, ImportError) as error:
        raise ValueError(f"model {model.name} with {options}: {error}") from error


def some_samples(dataset: Dataset[Any], max_damaged: int) -> Iterator[Tensor]:
    """Training recordings, always the same and changed in the same way."""
    num_examples = len(dataset)  # type: ignore[arg-type]
    drawn = Drawn(dataset, seed=0, max_damaged=max_damaged)
    for index in np.random.default_rng(0).permutation(num_examples)[:NUM_FITTED].tolist():
        example, _ = drawn[0, index]
        if example is not None:
            yield example[0]


def warn_of_short(model: Any, train: Any, test: Any, fastest: float = 1.0) -> None:
    """Names the recordings that the loss passes over, for they have fewer frames than their text needs."""
    always = short_ones(model, train)
    at_times = {index: told for index, told in short_ones(model, train, fastest).items() if index not in always}
    kinds = (
        (always.values(), train, "training recordings are too short for their texts and teach nothing"),
        (at_times.values(), train, f"training recordings are too short for their texts at speed {fastest:g}"),
        (
            short_ones(model, test).values(),
            test,
            "test recordings are too short for their texts, their loss counts as 0",
        ),
    )
    lines = [
        f"{len(short)} of {len(split)} {what}: {', '.join(list(short)[:5])}{', ...' if len(short) > 5 else ''}"
        for short, split, what in kinds
        if short
    ]
    if lines:
        warnings.warn("; ".join(lines), stacklevel=2)


def short_ones(model: Any, split: Any, speed: float = 1.0) -> dict[int, str]:
    """The numbers of such recordings, and what is to be told of each."""
    lengths = [round(duration * model.sample_rate / speed) for duration in split.durations]
    all_frames = model.num_output_frames(torch.tensor(lengths)).tolist()
    found = {}
    for index, (name, frames) in enumerate(zip(split.names, all_frames, strict=True)):
        tokens = split.tokens(index)
        needed = int(frames_needed(tokens[None], torch.tensor([len(tokens)])))
        if frames < needed:
            found[index] = f"{name} ({frames} frames, {needed} needed)"
    return found
