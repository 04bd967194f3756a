"""What the tasks on text minimise and measure, by hand; and every config and encoding of text, built small."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from relpos2d.encodings import encoding_class
from tests.train.texts import TINY, write_jsonl
from train.config import TASKS, TaskName, list_configs, load_config
from train.loop import create_accelerator
from train.tasks import create_task
from train.tasks.language_modeling import perplexity, running_metrics, text_windows
from train.tasks.text_classification import accuracies
from train.tasks.texts import beginning, next_token_losses, trimmed

USES: dict[TaskName, str] = {
    "text_classification": "labels",
    "language_modeling": "running",
    "sequence_to_sequence": "pairs",
}
ON_A_LINE = [name for name in list_configs("encoding") if 1 in (encoding_class(name).axes or (1,))]


def test_a_batch_is_cut_to_its_longest_text() -> None:
    tokens = torch.arange(12).view(2, 6)
    cut, mask = trimmed(tokens, torch.tensor([2, 4]))
    assert torch.equal(cut, tokens[:, :4])
    assert mask is not None
    assert mask.tolist() == [[True, True, False, False], [True] * 4]
    assert trimmed(tokens, torch.tensor([3, 3]))[1] is None


def test_losses_of_the_next_tokens() -> None:
    logits, tokens = torch.randn(2, 4, 7), torch.tensor([[1, 4, 3, 6, 2], [1, 2, 0, 0, 0]])
    counts = torch.tensor([4, 1])
    for smoothing in (0.0, 0.2):
        losses = next_token_losses(logits, tokens, counts, smoothing)
        assert losses.shape == (2, 4)
        for row in range(2):
            for place in range(4):
                share = F.one_hot(tokens[row, place + 1], 7) * (1 - smoothing) + smoothing / 7
                expected = -(share * logits[row, place].log_softmax(dim=0)).sum() if place < counts[row] else 0.0
                assert float(losses[row, place]) == pytest.approx(float(expected), abs=1e-6)


def test_accuracy_within_each_question() -> None:
    pairs = [("intact", "intact"), ("intact", "acts"), ("acts", "acts"), ("shuffled", "shuffled"), ("acts", "acted on")]
    records = [{"label": label, "prediction": prediction} for label, prediction in pairs]
    classes, groups = ("intact", "shuffled", "acts", "acted on"), ("intact", "intact", "actor", "actor")
    found = accuracies(records, classes, groups)
    assert found["accuracy"] == 3 / 5
    assert found["accuracy_standard_error"] == pytest.approx(math.sqrt(0.6 * 0.4 / 5))
    assert (found["accuracy_intact"], found["accuracy_actor"]) == (2 / 3, 1 / 2)
    assert set(accuracies(records, classes, None)) == {"accuracy", "accuracy_standard_error"}


def test_a_whole_text_from_its_windows() -> None:
    records = [{"num_tokens": 3, "loss": 2.0}, {"num_tokens": 1, "loss": 4.0}]
    metrics = running_metrics(records, num_bytes=10)
    assert metrics["loss"] == 2.5
    assert metrics["perplexity"] == math.exp(2.5)
    assert metrics["bits_per_byte"] == pytest.approx(10 / math.log(2) / 10)
    assert (metrics["num_tokens"], metrics["num_windows"]) == (4, 2)
    assert perplexity(1e4) == math.inf


@pytest.mark.parametrize(("length", "most"), [(1, None), (3, None), (4, 7), (100, None), (3, 6)])
def test_windows_predict_each_token_once(length: int, most: int | None) -> None:
    tokens = torch.arange(11)
    windows = list(text_windows(tokens, length, most))
    assert torch.cat([window[1:] for window in windows]).tolist() == list(range(1, (most or 10) + 1))
    assert all(int(window[0]) == int(window[1]) - 1 for window in windows)
    assert all(len(window) == length + 1 for window in windows[:-1])


def test_the_beginning_of_a_text_is_one_line() -> None:
    assert beginning("a\n b") == "a b"
    assert beginning("ab " * 100).endswith("...")
    assert len(beginning("ab " * 100)) == 80


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("data")
    return {task: write_jsonl(folder / use, use) for task, use in USES.items()}


def check_gradients(task: Any) -> None:
    batch = next(iter(DataLoader(task.train_data, batch_size=3)))
    task.model.train()
    loss, _ = task.loss(task.model, batch)
    assert loss.isfinite()
    loss.backward()
    idle = [name for name, parameter in task.model.named_parameters() if parameter.grad is None]
    assert not idle


@pytest.mark.parametrize("name", [name for name in list_configs() if name.startswith("text/")])
def test_m10_every_config_of_text_builds_small_and_every_parameter_gets_a_gradient(
    name: str, data: dict[str, list[str]]
) -> None:
    config = load_config(name)
    small = ["model.embed_dim=24", "model.depth=1", "model.num_heads=3", *data[config.task], "trainer.device=cpu"]
    check_gradients(create_task(load_config(name, small)))


@pytest.mark.parametrize("encoding", [*ON_A_LINE, "[learned, rope]", "[t5, rope]"])
def test_every_encoding_trains_in_every_model_of_text(encoding: str, data: dict[str, list[str]]) -> None:
    for task in USES:
        example = {"text_classification": "text/news", "language_modeling": "text/verses"}.get(task, "text/headlines")
        options = [*data[task], f"model={{name: {TASKS[task].models[0]}, {TINY}}}", f"encoding={encoding}"]
        check_gradients(create_task(load_config(example, options)))


def test_beams_are_searched_where_the_config_says(data: dict[str, list[str]]) -> None:
    found = []
    for options in ([], ["generation={num_beams: 3, length_penalty: 0.0}"]):
        torch.manual_seed(3)
        model = [*data["sequence_to_sequence"], f"model={{name: encoder_decoder, {TINY}}}", "trainer.device=cpu"]
        config = load_config("text/headlines", [*model, *options, "trainer.num_workers=0"])
        task = create_task(config)
        with torch.no_grad():
            for parameter in task.model.parameters():
                parameter.normal_(std=0.3)
        _, records = task.evaluate(task.model, create_accelerator(config))
        found.append([record["generated"] for record in records])
    assert found[0] != found[1]
