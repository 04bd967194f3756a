"""Text to text: an encoder-decoder that learns to write the target, ROUGE of what it writes by itself."""

from typing import Any

import torch
from accelerate import Accelerator
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor, nn

from relpos2d.models import generate
from train.config import Config, Generation
from train.data.tokenize import BOS, EOS
from train.tasks import Records
from train.tasks.texts import TextTask, beginning, gathered, next_token_losses, trimmed

ROUGE = ("rouge1", "rouge2", "rougeL")


class SequenceToSequence(TextTask):
    """An encoder-decoder with one of our encodings, trained on pairs of texts."""

    score = "rougeL"
    records_name = "generated.jsonl"

    def __init__(self, config: Config):
        super().__init__(config)
        self.scorer = RougeScorer(list(ROUGE), use_stemmer=True)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses, counts = self.target_losses(model, batch, self.smoothing)
        return losses.sum() / counts.sum(), {}

    def target_losses(self, model: nn.Module, batch: Any, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """Of each token of the targets when those before it are given, and how many there are of each target."""
        sources, source_lengths, targets, target_lengths = batch
        sources, source_mask = trimmed(sources, source_lengths)
        written, mask = trimmed(targets, target_lengths - 1)  # the last token is to be predicted only
        logits = model(sources, written, source_mask, mask)
        counts = target_lengths - 1
        return next_token_losses(logits, targets, counts, smoothing), counts

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        was_training = model.training
        model.eval()
        records: Records = []
        test = self.data.test
        for indices, batch in self.batches(test, accelerator):
            sources, lengths, *_ = batch
            with accelerator.autocast():
                losses, counts = self.target_losses(model, batch)
                written = write(model, sources, lengths, self.about.max_target_length - 1, self.generation)
            means = (losses.sum(dim=1) / counts).tolist()
            texts = self.data.tokenizer.decode_batch(written.tolist())
            for index, count, loss, text in zip(indices, counts.tolist(), means, texts, strict=False):
                rouge = self.scorer.score(test.targets[index], text)
                records.append(
                    {
                        "index": index,
                        "source": beginning(test.sources[index]),
                        "target": test.targets[index],
                        "generated": text,
                        "num_tokens": count,
                        "loss": loss,
                        **{name: rouge[name].fmeasure for name in ROUGE},
                    }
                )
        model.train(was_training)
        records = gathered(records)
        num_tokens = sum(record["num_tokens"] for record in records)
        metrics = {
            **{name: sum(record[name] for record in records) / len(records) for name in ("rougeL", "rouge1", "rouge2")},
            "loss": sum(record["num_tokens"] * record["loss"] for record in records) / num_tokens,
            "num_examples": len(records),
            "num_damaged": len(test) - len(records),
        }
        return metrics, records


def write(model: Any, sources: Tensor, lengths: Tensor, max_new_tokens: int, generation: Generation | None) -> Tensor:
    """What the model writes about each source, as tokens."""
    options = generation.given() if generation else {}
    tokens, mask = trimmed(sources, lengths)
    return generate(model, tokens, mask, max_new_tokens=max_new_tokens, bos_id=BOS, eos_id=EOS, **options)
