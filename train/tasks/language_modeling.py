"""Language modelling: the next token of running text, perplexity."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from train.tasks import Records
from train.tasks.texts import TextTask, gathered, next_token_losses


class LanguageModeling(TextTask):
    """A decoder with one of our encodings, trained on windows of running text and tested on all of the test text."""

    score = "perplexity"
    records_name = "windows.jsonl"

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tokens, counts = batch
        losses = next_token_losses(model(tokens[:, : int(counts.max())]), tokens, counts, self.smoothing)
        return losses.sum() / counts.sum(), {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        was_training = model.training
        model.eval()
        records: Records = []
        windows = self.data.test.windows(self.length or self.about.max_length)
        for indices, (tokens, counts) in self.batches(windows, accelerator):
            with accelerator.autocast():
                logits = model(tokens[:, : int(counts.max())])
            means = (next_token_losses(logits, tokens, counts).sum(dim=1) / counts).tolist()
            records += [
                {"index": index, "num_tokens": count, "loss": loss}
                for index, count, loss in zip(indices, counts.tolist(), means, strict=False)
            ]
        model.train(was_training)
        records = gathered(records)
        return running_metrics(records, self.data.test_bytes), records


def running_metrics(records: Records, num_bytes: int) -> dict[str, Any]:
    """Of a whole text from its windows: each token counts once."""
    num_tokens = sum(record["num_tokens"] for record in records)
    total = sum(record["num_tokens"] * record["loss"] for record in records)
    loss = total / num_tokens
    return {
        "perplexity": perplexity(loss),
        "loss": loss,
        "bits_per_byte": total / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
        "num_windows": len(records),
    }


def perplexity(loss: float) -> float:
    """e to the mean loss; infinite where that is too much for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def text_windows(tokens: Tensor, length: int, max_tokens: int | None = None) -> Iterator[Tensor]:
    """The text as windows (tokens + 1,) that predict each token but the first once; only the last may be shorter."""
    last = len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)
    for start in range(0, last, length):
        yield tokens[start : min(start + length, last) + 1]
