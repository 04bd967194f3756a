"""Text classification: one label a text, cross entropy, accuracy, also for each question that the classes answer."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from train.tasks import Records
from train.tasks.texts import TextTask, beginning, gathered, trimmed


class TextClassification(TextTask):
    """An encoder of text with one of our encodings, trained on labelled texts."""

    score = "accuracy"
    records_name = "predictions.jsonl"

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tokens, lengths, labels = batch
        logits = model(*trimmed(tokens, lengths))
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing), {"train_accuracy": accuracy}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        was_training = model.training
        model.eval()
        records: Records = []
        classes, texts = self.about.classes, self.data.test.texts
        for indices, (tokens, lengths, labels) in self.batches(self.data.test, accelerator):
            with accelerator.autocast():
                log_probabilities = F.log_softmax(model(*trimmed(tokens, lengths)).float(), dim=1)
            best, predictions = log_probabilities.max(dim=1)
            losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
            columns = (labels.tolist(), predictions.tolist(), best.exp().tolist(), losses.tolist())
            records += [
                {
                    "index": index,
                    "text": beginning(texts[index]),
                    "label": classes[label],
                    "prediction": classes[prediction],
                    "probability": probability,
                    "loss": loss,
                }
                for index, label, prediction, probability, loss in zip(indices, *columns, strict=False)
            ]
        model.train(was_training)
        records = gathered(records)
        metrics = {
            **accuracies(records, classes, self.about.groups),
            "loss": sum(record["loss"] for record in records) / len(records),
            "num_examples": len(records),
            "num_damaged": len(self.data.test) - len(records),
        }
        return metrics, records


def accuracies(records: Records, classes: tuple[str, ...], groups: tuple[str, ...] | None) -> dict[str, float]:
    """Over all records, and over those of each group of classes; a prediction may be any class."""
    right = [record["label"] == record["prediction"] for record in records]
    accuracy = sum(right) / len(right)
    found = {
        "accuracy": accuracy,
        "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / len(right)),
    }
    group_of = dict(zip(classes, groups, strict=True)) if groups else {}
    for group in dict.fromkeys(group_of.values()):
        own = [hit for hit, record in zip(right, records, strict=True) if group_of[record["label"]] == group]
        if own:
            found[f"accuracy_{group}"] = sum(own) / len(own)
    return found
