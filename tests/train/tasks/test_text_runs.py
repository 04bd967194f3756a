"""Short runs of the tasks on text, from the command line to the folder, and the tools on what they leave."""

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relpos2d.models import LanguageModel
from tests.train.test_resume import assert_same
from tests.train.texts import SHORT, TINY, write_jsonl
from train import evaluate, export, predict
from train.__main__ import main
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.data.description import read_description
from train.restore import restore

pytestmark = pytest.mark.usefixtures("undrawn")

TASKS = {  # task -> what its data are used as, its model, its file of records
    "text_classification": ("labels", "text_classifier", "predictions.jsonl"),
    "language_modeling": ("running", "language_model", "windows.jsonl"),
    "sequence_to_sequence": ("pairs", "encoder_decoder", "generated.jsonl"),
}
SCORES = {"text_classification": "accuracy", "language_modeling": "perplexity", "sequence_to_sequence": "rougeL"}
CONFIG = "task: {task}\nmodel: {{name: {model}, {tiny}}}\nencoding: rope_axial\noptimizer: adamw\nschedule: cosine\n"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """The command of a tiny run of a task."""
    folder = tmp_path_factory.mktemp("text")
    found: dict[str, list[str]] = {}

    def of(task: str, *options: str) -> list[str]:
        if task not in found:
            use, model, _ = TASKS[task]
            file = folder / f"{task}.yaml"
            file.write_text(CONFIG.format(task=task, model=model, tiny=TINY))
            found[task] = [str(file), *write_jsonl(folder / use, use), *SHORT]
        return [*found[task], *options]

    return of


@pytest.fixture(scope="module")
def runs(command: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> dict[str, Path]:
    """A finished run of each task."""
    folder = tmp_path_factory.mktemp("runs")
    for task in TASKS:
        assert main(command(task, f"output={folder / task}", "trainer.ema_decay=0.9")) == 0
    return {task: folder / task for task in TASKS}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("task", TASKS)
def test_a_run_fills_its_folder(task: str, runs: dict[str, Path]) -> None:
    names = {path.name for path in runs[task].iterdir()}
    assert {"config.yaml", "data.json", "tokenizer.json", "metrics.json", "curves.png", TASKS[task][2]} <= names
    metrics = json.loads((runs[task] / "metrics.json").read_text())
    assert math.isfinite(metrics[SCORES[task]])
    assert metrics["steps"] == 4
    assert metrics["skipped_steps"] == 0


def test_accuracy_is_what_the_records_say(runs: dict[str, Path]) -> None:
    metrics = json.loads((runs["text_classification"] / "metrics.json").read_text())
    records = read_lines(runs["text_classification"] / "predictions.jsonl")
    assert [record["index"] for record in records] == list(range(20))
    assert metrics["accuracy"] == sum(record["label"] == record["prediction"] for record in records) / 20
    assert records[0]["text"].endswith(".")


def test_perplexity_counts_each_token_once(runs: dict[str, Path]) -> None:
    metrics = json.loads((runs["language_modeling"] / "metrics.json").read_text())
    records = read_lines(runs["language_modeling"] / "windows.jsonl")
    restored = restore(runs["language_modeling"])
    tokens = restored.config.data.load(0).test.tokens
    assert metrics["num_tokens"] == sum(record["num_tokens"] for record in records) == len(tokens) - 1
    loss = sum(record["loss"] * record["num_tokens"] for record in records) / metrics["num_tokens"]
    assert metrics["perplexity"] == pytest.approx(math.exp(loss))
    length = restored.description.max_length
    with torch.no_grad():
        logits = restored.model(tokens[None, :length])
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[1 : length + 1])
    assert records[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(
        loss * metrics["num_tokens"] / math.log(2) / restored.config.data.load(0).test_bytes
    )


def test_what_was_written_has_its_rouge(runs: dict[str, Path]) -> None:
    metrics = json.loads((runs["sequence_to_sequence"] / "metrics.json").read_text())
    records = read_lines(runs["sequence_to_sequence"] / "generated.jsonl")
    assert len(records) == 20
    assert metrics["rougeL"] == pytest.approx(sum(record["rougeL"] for record in records) / 20)
    assert {"source", "target", "generated", "rouge1", "rouge2"} <= records[0].keys()


@pytest.mark.parametrize("task", TASKS)
def test_lost_after_two_steps_it_ends_the_same(
    task: str, command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(task, f"output={tmp_path / 'run'}", "encoding=[learned, rope_axial]", "handover={steps: 3}")
    outcomes = []
    for _ in range(2):
        assert main(arguments) == 0
        last = load_checkpoint(tmp_path / "run" / "checkpoints" / "step_4")
        lines = read_lines(tmp_path / "run" / "history.jsonl")
        history = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        outcomes.append({"weights": last.weights, "optimizer": last.optimizer, "history": history})
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4")
        (tmp_path / "run" / "metrics.json").unlink()
    assert "continues after step 2 of 4" in capsys.readouterr().out
    assert_same(*outcomes)
    assert [line["strength"] for line in outcomes[0]["history"]] == [0, 1 / 3, 2 / 3, 1]


def test_a_handover_begins_as_the_absolute_model(command: Callable[..., list[str]], tmp_path: Path) -> None:
    losses = {}
    for name, options in {
        "both": ["encoding=[learned, rope_axial]", "handover={steps: 3}"],
        "learned": ["encoding=learned"],
    }.items():
        assert main(command("language_modeling", f"output={tmp_path / name}", *options)) == 0
        losses[name] = [line["loss"] for line in read_lines(tmp_path / name / "history.jsonl")]
    assert losses["both"][0] == pytest.approx(losses["learned"][0], rel=1e-6)
    assert losses["both"][-1] != pytest.approx(losses["learned"][-1], rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_evaluate_gives_the_numbers_that_training_ended_with(
    task: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(runs[task]), "--json"]) == 0
    (found,) = printed(capsys)
    metrics = json.loads((runs[task] / "metrics.json").read_text())
    common = found.keys() & metrics.keys()
    assert {SCORES[task], "loss"} <= common
    assert {key: found[key] for key in common} == {key: metrics[key] for key in common}


def test_evaluate_at_another_length(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs["language_modeling"]
    assert evaluate.main([str(folder), "length=96", "--json"]) == 0
    (longer,) = printed(capsys)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert longer["length"] == 96
    assert longer["num_tokens"] == metrics["num_tokens"]
    assert longer["num_windows"] == math.ceil(metrics["num_tokens"] / 96) < metrics["num_windows"]
    assert longer["loss"] != metrics["loss"]
    assert evaluate.main([str(runs["text_classification"]), "length=3", "--json"]) == 0
    (shorter,) = printed(capsys)
    assert shorter["length"] == 3
    assert shorter["loss"] != json.loads((runs["text_classification"] / "metrics.json").read_text())["loss"]


def test_other_texts_are_read_with_the_tokenizer_of_the_run(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs["text_classification"]
    records = [r for r in read_lines(folder / "predictions.jsonl") if r["label"] in ("bert", "dora")]
    file = tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps({"text": r["text"], "label": r["label"]}) + "\n" for r in records))
    options = [f"data.train={file}", f"data.val={file}", "--json"]  # two of the four classes, and another tokenizer
    assert evaluate.main([str(folder), *options, f"output={tmp_path / 'out'}"]) == 0
    (found,) = printed(capsys)
    assert found["loss"] == pytest.approx(sum(r["loss"] for r in records) / len(records), rel=1e-4)
    again = read_lines(tmp_path / "out" / "predictions.jsonl")
    assert [r["prediction"] for r in again] == [r["prediction"] for r in records]
    file.write_text(json.dumps({"text": "emil sees dora.", "label": "emil"}) + "\n")
    assert evaluate.main([str(folder), *options]) == 1
    assert (
        "class 'emil' of the data is not among the classes of training, anna, bert, carl, dora"
        in capsys.readouterr().err
    )
    folder = runs["sequence_to_sequence"]
    assert evaluate.main([str(folder), "data.vocab_size=290", "--json"]) == 0
    (found,) = printed(capsys)
    assert found["loss"] == pytest.approx(json.loads((folder / "metrics.json").read_text())["loss"], rel=1e-5)
    assert evaluate.main([str(runs["language_modeling"]), "data.tokenizer=bytes", "data.vocab_size=null"]) == 1
    assert "a tokenizer that does not fit the checkpoint" in capsys.readouterr().err


REFUSED_OPTIONS = [
    (evaluate, "sequence_to_sequence", ["length=9"], "length = 9: is for text_classification and language_modeling; "),
    (evaluate, "language_modeling", ["image_size=9"], "image_size = 9: is for classify; "),
    (evaluate, "language_modeling", ["permute_tokens=true"], "permute_tokens = true: is for classify; "),
    (evaluate, "language_modeling", ["length=many"], "length = many: must be a whole number of at least 1"),
    (predict, "language_modeling", ["--text", "a", "--image-size", "9"], "--image-size 9: is for classify; "),
    (predict, "language_modeling", ["--text", "a", "--top", "2"], "--top 2: is for classify and text_classification; "),
    (
        predict,
        "text_classification",
        ["--text", "a", "--num-beams", "2"],
        "--num-beams 2: is for language_modeling and",
    ),
    (export, "language_modeling", ["--to", "onnx", "x"], "--to onnx: is for classifiers of images, "),
]


@pytest.mark.parametrize(("tool", "task", "options", "message"), REFUSED_OPTIONS)
def test_options_of_other_tasks_are_refused_by_name(
    tool: Any, task: str, options: list[str], message: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(runs[task]), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_predict_names_classes(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("anna sees bert on the hill.")
    (tmp_path / "texts" / "b.txt").write_text("dora calls carl.")
    folder = runs["text_classification"]
    assert predict.main([str(folder), str(tmp_path / "texts"), "--text", "anna sees bert on the hill.", "--json"]) == 0
    lines = printed(capsys)
    by_path = {line["path"]: line["predictions"] for line in lines}
    direct = by_path["anna sees bert on the hill."]
    file = by_path[str(tmp_path / "texts" / "a.txt")]
    assert [p["class"] for p in direct] == [p["class"] for p in file]
    restored = restore(folder)
    assert restored.tokenizer is not None
    tokens = torch.tensor([restored.tokenizer.encode("dora calls carl.").ids])
    with torch.no_grad():
        expected = restored.model(tokens).softmax(dim=1)[0]
    found = {p["class"]: p["probability"] for p in by_path[str(tmp_path / "texts" / "b.txt")]}
    for name, value in zip(restored.description.classes, expected.tolist(), strict=True):
        assert found[name] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("task", ["language_modeling", "sequence_to_sequence"])
def test_predict_writes_for_each_text_what_it_writes_for_it_alone(
    task: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["anna sees", "dora calls carl near the river."]
    options = [str(runs[task]), "--json", "--max-new-tokens", "5"]
    assert predict.main([*options, "--text", texts[0], "--text", texts[1]]) == 0
    together = printed(capsys)
    alone = []
    for text in texts:
        assert predict.main([*options, "--text", text]) == 0
        alone += printed(capsys)
    assert together == alone
    assert [line["path"] for line in together] == texts


def test_texts_that_cannot_be_read_are_named(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    files = [str(tmp_path / name) for name in ("empty.txt", "latin.txt", "absent.txt")]
    assert predict.main([str(runs["text_classification"]), *files, "--text", "anna", "--json"]) == 1
    told = capsys.readouterr()
    assert [json.loads(line)["path"] for line in told.out.splitlines()] == ["anna"]
    errors = told.err.splitlines()
    assert len(errors) == 3
    assert "empty.txt: the text is empty" in errors[0]
    assert "latin.txt: " in errors[1]
    assert "byte 3" in errors[1]
    assert "absent.txt: " in errors[2]


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run to be damaged."""
    return Path(shutil.copytree(runs["language_modeling"], tmp_path / "copy"))


def test_the_tokenizer_belongs_to_the_run(copy: Path, runs: dict[str, Path]) -> None:
    file = copy / "tokenizer.json"
    text = file.read_text()
    tree = json.loads(text)
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    file.write_text(json.dumps(tree))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: a tokenizer that does not fit the checkpoint: its tokens or rules"
    ):
        restore(copy)
    shutil.copy(runs["sequence_to_sequence"] / "tokenizer.json", file)
    with pytest.raises(ValueError, match=r"tokenizer\.json: a tokenizer that does not fit the checkpoint: "):
        restore(copy)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: no readable tokenizer"):
        restore(copy)
    file.unlink()
    with pytest.raises(
        ValueError, match=r"copy: holds no tokenizer\.json, which a run on text or speech writes when it starts"
    ):
        restore(copy)


def test_another_tokenizer_is_other_data(
    command: Callable[..., list[str]], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = json.loads((copy / "data.json").read_text())
    (copy / "data.json").write_text(json.dumps({**about, "tokenizer": "0" * 64}))
    assert main(command("language_modeling", f"output={copy}", "trainer.ema_decay=0.9")) == 1
    assert f"data.json.tokenizer: {'0' * 64} -> {about['tokenizer']}" in capsys.readouterr().err


def test_weights_go_out_with_what_they_are(runs: dict[str, Path], tmp_path: Path) -> None:
    from safetensors import safe_open

    for task, folder in runs.items():
        out = tmp_path / f"{task}.safetensors"
        assert export.main([str(folder), "--to", "safetensors", str(out)]) == 0
        with safe_open(out, "pt") as file:
            metadata = file.metadata()
        assert json.loads(metadata["tokenizer"]) == read_description(folder, task).tokenizer
        assert json.loads(metadata["model"]) == TASKS[task][1]


def test_the_recipe_of_web_text_runs_as_it_stands_on_a_few_lines_in_shards(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "web", "running")
    for split in ("train", "val"):
        lines = (tmp_path / "web" / f"{split}.jsonl").read_bytes().splitlines(keepends=True)
        for number in (0, 1):
            (tmp_path / "web" / f"{split}-{number}.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[number::2])))
    options = [
        f"data.train={tmp_path / 'web'}/train-*.jsonl.gz",
        f"data.val={tmp_path / 'web'}/val-*.jsonl.gz",
        *("data.vocab_size=300", "data.max_length=24", "model.embed_dim=24", "model.depth=1", "model.num_heads=3"),
        *("trainer.max_steps=2", "schedule.warmup_steps=1", "trainer.batch_size=8", "trainer.accumulate=2"),
        *("trainer.num_workers=0", "trainer.device=cpu", f"output={tmp_path / 'run'}"),
    ]
    assert main(["text/web_125m", *options]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["steps"], metrics["skipped_steps"]) == (2, 0)
    assert math.isfinite(metrics["perplexity"])
    size = load_config("text/web_125m").model.given()
    with torch.device("meta"):
        model = LanguageModel(50_000, max_length=1024, encoding="rope", **size)
    assert 120e6 < sum(parameter.numel() for parameter in model.parameters()) < 130e6
