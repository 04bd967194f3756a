"""The loop with a task of its own that is no classification: it knows about losses and batches, nothing else."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import Dataset

from train.checkpoint import Checkpoint, last_checkpoint, load_checkpoint
from train.config import Config, load_config
from train.learner import Learner
from train.loop import NonFiniteLoss, Result, Stopped, create_accelerator, create_draws, fit
from train.recipe import create_optimizer
from train.report import read_history
from train.tasks import Records


class Line(Dataset[dict[str, torch.Tensor]]):
    """Points of a plane: y = 2 a - 3 b + 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x @ torch.tensor([2.0, -3.0]) + 1}


class Regression:
    """The smallest task there is."""

    score, records_name, max_damaged = "error", "guesses.jsonl", 0

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.train_data = Line()
        self.model: nn.Module = nn.Linear(2, 1)
        self.losses: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (model(batch["x"])[:, 0] - batch["y"]).square().mean()
        self.losses.append(loss.item())
        return loss, {"train_error": loss.detach().sqrt()}

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        examples = [self.train_data[index] for index in range(5)]
        with torch.no_grad():
            errors = [(model(e["x"]) - e["y"]).abs().item() for e in examples]
        return {"error": sum(errors) / 5, "num_examples": 5}, [{"index": i, "error": e} for i, e in enumerate(errors)]

    def description(self) -> str:
        return "{}"

    def pictures(self, folder: Path, records: Records, model: nn.Module) -> list[Path]:
        return []


def config(*overrides: str) -> Config:
    short = [
        "trainer.max_steps=30",
        "trainer.batch_size=8",
        "schedule.warmup_steps=5",
        "optimizer.lr=0.3",
        "optimizer.weight_decay=0.0",
    ]
    return load_config("classify/digits", [*{o.split("=")[0]: o for o in [*short, *overrides]}.values()])


def run(folder: Path, *overrides: str, task: Regression | None = None) -> Regression:
    task = task or Regression()
    proceed(folder, task, *overrides)
    return task


def proceed(folder: Path, task: Regression, *overrides: str) -> Result:
    """Trains from the last checkpoint in the folder, if there is one."""
    folder.mkdir(exist_ok=True)
    chosen, last = config(*overrides), last_checkpoint(folder / "checkpoints")
    checkpoint, accelerator = load_checkpoint(last) if last else None, create_accelerator(chosen)
    draws = create_draws(chosen, task, accelerator, checkpoint)
    return fit(Learner(chosen, task, accelerator, checkpoint), draws, folder)


def saved(folder: Path) -> Checkpoint:
    last = last_checkpoint(folder / "checkpoints")
    assert last is not None
    return load_checkpoint(last)


def test_the_loss_falls_and_everything_is_written(tmp_path: Path) -> None:
    task = run(tmp_path, "trainer.log_every=10", "trainer.eval_every=15", "trainer.save_every=12")
    assert task.losses[-1] < 0.05 * task.losses[0]
    columns = read_history(tmp_path / "history.jsonl")
    assert columns["loss"][0] == [1, 10, 20, 30]
    assert columns["loss"][1] == [task.losses[step - 1] for step in (1, 10, 20, 30)]
    assert columns["test_error"][0] == [15, 30]
    assert columns["test_error"][1][1] == task.evaluate(task.model, None)[0]["error"]  # type: ignore[arg-type]
    assert columns["train_error"][1][0] == pytest.approx(math.sqrt(task.losses[0]))
    checkpoint = saved(tmp_path)
    assert (checkpoint.step, checkpoint.state["drawn"]) == (30, 240)
    assert torch.equal(checkpoint.weights["model"]["weight"], task.model.weight)  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_24", "step_30"]
    assert json.loads((tmp_path / "history.jsonl").read_text().splitlines()[1])["step"] == 10
    assert next((tmp_path / "tensorboard").iterdir()).stat().st_size > 100


def test_the_learning_rate_by_step(tmp_path: Path) -> None:
    run(tmp_path, "trainer.log_every=1", "schedule.warmup_lr=0.1", "schedule.min_lr=0.02")
    steps, rates = read_history(tmp_path / "history.jsonl")["lr"]
    expected = [
        0.1 + (0.3 - 0.1) * step / 5 if step < 5 else 0.02 + (0.3 - 0.02) * (1 + math.cos(math.pi * step / 30)) / 2
        for step in range(30)
    ]
    assert steps == list(range(1, 31))
    assert rates == pytest.approx(expected)


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    first, again, other = run(tmp_path / "1"), run(tmp_path / "2"), run(tmp_path / "3", "seed=1")
    assert first.losses == again.losses
    assert first.losses != other.losses


def test_gradients_are_clipped(tmp_path: Path) -> None:
    free = ["optimizer={name: sgd, lr: 0.01, momentum: 0.5}", "trainer.clip_grad_norm=null", "schedule.warmup_steps=0"]
    task, start = Regression(), Regression().model.weight.clone()  # type: ignore[operator]
    run(tmp_path / "free", *free, "trainer.max_steps=1", task=task)
    moved = (task.model.weight - start).norm().item()  # type: ignore[operator]
    task = Regression()
    run(tmp_path / "clipped", *free, "trainer.max_steps=1", "trainer.clip_grad_norm=0.5", task=task)
    norm = json.loads((tmp_path / "free" / "history.jsonl").read_text().splitlines()[0])["grad_norm"]
    assert norm > 0.5
    assert (task.model.weight - start).norm().item() == pytest.approx(moved * 0.5 / norm, rel=1e-3)  # type: ignore[operator]


class Wrong(Regression):
    """Some losses are not finite."""

    def __init__(self, value: float, *calls: int):
        super().__init__()
        self.value, self.calls = value, calls

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, scalars = super().loss(model, batch)
        return (loss * self.value if len(self.losses) in self.calls else loss), scalars


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_d7_steps_that_are_not_finite_are_left_out_and_counted(value: float, tmp_path: Path) -> None:
    task = Wrong(value, 8, 12, 13)
    result = proceed(tmp_path, task, "trainer.log_every=1", "trainer.max_skipped_steps=2")
    assert result.summary["skipped_steps"] == 3
    assert task.losses[-1] < 0.2 * task.losses[0]
    columns = read_history(tmp_path / "history.jsonl")
    assert columns["skipped_steps"] == (list(range(8, 31)), [1.0] * 4 + [2.0] + [3.0] * 18)
    assert not math.isfinite(columns["loss"][1][7])
    assert all(torch.isfinite(weight).all() for weight in saved(tmp_path).weights["model"].values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_d7_the_run_stops_after_so_many_in_a_row(value: float, tmp_path: Path) -> None:
    task = Wrong(value, 8, 9, 10)
    message = rf"3 steps in a row were not finite and left out, the last is step 10: loss {value}, .*: .*step_7"
    with pytest.raises(NonFiniteLoss, match=message):
        run(tmp_path, "trainer.save_every=7", "trainer.max_skipped_steps=2", task=task)
    assert torch.equal(saved(tmp_path).weights["model"]["weight"], task.model.weight)  # type: ignore[arg-type]


def test_d8_no_step_may_be_left_out_where_none_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=r"1 steps in a row .* step 8: "):
        run(tmp_path, "trainer.max_skipped_steps=0", task=Wrong(math.nan, 8))


def test_accumulated_parts_are_the_whole_batch(tmp_path: Path) -> None:
    whole = run(tmp_path / "1", "trainer.log_every=1")
    parts = run(tmp_path / "2", "trainer.log_every=1", "trainer.accumulate=4")
    assert len(parts.losses) == 4 * len(whole.losses)
    torch.testing.assert_close(parts.model.weight, whole.model.weight, rtol=1e-5, atol=1e-6)
    of_whole, of_parts = (read_history(tmp_path / str(i) / "history.jsonl") for i in (1, 2))
    for key in ("loss", "lr", "grad_norm"):
        assert of_parts[key][1] == pytest.approx(of_whole[key][1], rel=1e-4)


class Interrupted(Regression):
    """Asks for the end in the middle of a step, as a scheduler would."""

    def __init__(self, call: int, number: int):
        super().__init__()
        self.call, self.number = call, number

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if len(self.losses) == self.call:
            os.kill(os.getpid(), self.number)
        return super().loss(model, batch)


@pytest.mark.parametrize(("number", "num_workers"), [(signal.SIGTERM, 2), (signal.SIGINT, 0)])
def test_a_signal_saves_and_ends_and_the_run_goes_on(number: int, num_workers: int, tmp_path: Path) -> None:
    options = ("trainer.log_every=1", "trainer.eval_every=10", f"trainer.num_workers={num_workers}")
    straight = run(tmp_path / "straight", *options)
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name} after step 10, which is saved"):
        run(tmp_path / "stopped", *options, task=Interrupted(9, number))
    assert signal.getsignal(number) == before
    assert (
        len(read_history(tmp_path / "stopped" / "history.jsonl")["loss"][0]) == 9
    )  # step 10 comes with its evaluation
    task = Regression()
    proceed(tmp_path / "stopped", task, *options)
    assert task.losses == straight.losses[10:]
    assert history_without_time(tmp_path / "stopped")[9:] == history_without_time(tmp_path / "straight")[9:]
    assert torch.equal(task.model.weight, straight.model.weight)  # type: ignore[arg-type]


def history_without_time(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_a_run_is_saved_before_it_is_evaluated(tmp_path: Path) -> None:
    class Breaks(Regression):
        def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
            raise MemoryError

    with pytest.raises(MemoryError):
        run(tmp_path, "trainer.eval_every=12", "trainer.save_every=100", task=Breaks())
    assert saved(tmp_path).step == 12
    assert run(tmp_path, "trainer.eval_every=12").losses == run(tmp_path / "straight").losses[12:]
    assert read_history(tmp_path / "history.jsonl")["test_error"][0] == [12, 24, 30]


def test_a_lengthened_run_keeps_the_last_evaluation(tmp_path: Path) -> None:
    run(tmp_path, "trainer.max_steps=14", "trainer.eval_every=10")
    run(tmp_path, "trainer.max_steps=20", "trainer.eval_every=10")
    assert read_history(tmp_path / "history.jsonl")["test_error"][0] == [10, 14, 20]


def test_the_options_of_the_optimizer_are_those_of_the_config(tmp_path: Path) -> None:
    run(tmp_path, "trainer.max_steps=6")
    chosen = config("optimizer={name: adamw, lr: 0.3, betas: [0.5, 0.6]}", "optimizer.weight_decay=0.5")
    accelerator, checkpoint = create_accelerator(chosen), saved(tmp_path)
    learner = Learner(chosen, Regression(), accelerator, checkpoint)
    assert {group["weight_decay"] for group in learner.optimizer.param_groups} == {0.0, 0.5}
    assert all(tuple(group["betas"]) == (0.5, 0.6) for group in learner.optimizer.param_groups)
    assert all(state["step"] == 6 for state in learner.optimizer.state.values())
    with pytest.raises(ValueError, match=r"the optimizer's state in the checkpoint of step 6 is of another optimizer"):
        Learner(config("optimizer={name: sgd, lr: 0.3, momentum: 0.9}"), Regression(), accelerator, checkpoint)


@pytest.mark.parametrize(
    "name", ["madgrad", "sgd", *(pytest.param(n, marks=pytest.mark.long) for n in ("lion", "adan"))]
)
def test_going_on_is_exact_with_other_optimizers(name: str, tmp_path: Path) -> None:
    optimizer = f"optimizer={{name: {name}, lr: 0.01}}"
    straight = run(tmp_path / "straight", optimizer)
    with pytest.raises(Stopped):
        run(tmp_path / "parts", optimizer, task=Interrupted(12, signal.SIGTERM))
    rest = run(tmp_path / "parts", optimizer)
    assert rest.losses == straight.losses[13:]
    assert torch.equal(rest.model.weight, straight.model.weight)  # type: ignore[arg-type]


def test_m6_a_history_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"history.jsonl or tensorboard/ could not be written .*No space left"):
        run(tmp_path)


def test_m1_the_learning_rate_goes_on_by_step(tmp_path: Path) -> None:
    options = ("trainer.log_every=1", "trainer.save_every=4", "schedule.warmup_steps=9", "trainer.clip_grad_norm=null")
    run(tmp_path / "straight", *options)
    for step in (6, 17, 29):  # in the warm-up, after it, before the last
        with pytest.raises(Stopped):
            run(
                tmp_path / "parts",
                *options,
                task=Interrupted(step - 1 - resumed_at(tmp_path / "parts"), signal.SIGTERM),
            )
    run(tmp_path / "parts", *options)
    rates = [read_history(tmp_path / name / "history.jsonl")["lr"] for name in ("straight", "parts")]
    assert rates[0] == rates[1]
    assert history_without_time(tmp_path / "parts") == history_without_time(tmp_path / "straight")


def resumed_at(folder: Path) -> int:
    last = last_checkpoint(folder / "checkpoints")
    return int(last.name[5:]) if last else 0


def test_bf16_computes_in_bf16_and_keeps_float32_weights(tmp_path: Path) -> None:
    class Watched(Regression):
        def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            dtypes.add((model.weight.dtype, nn.functional.linear(batch["x"], model.weight).dtype))  # type: ignore[arg-type, union-attr]
            return super().loss(model, batch)

    dtypes: set[tuple[torch.dtype, torch.dtype]] = set()
    in_bf16 = run(tmp_path / "1", "trainer.mixed_precision=bf16", "trainer.device=cpu", task=Watched())
    AcceleratorState._reset_state(reset_partial_state=True)
    in_float32 = run(tmp_path / "2")
    assert dtypes == {(torch.float32, torch.bfloat16)}
    assert in_bf16.losses != in_float32.losses
    assert in_bf16.losses == pytest.approx(in_float32.losses, rel=0.1, abs=0.05)


def test_d7_fp16_without_a_gpu_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"trainer.mixed_precision = 'fp16': needs a GPU, the device is cpu; bf16 works"
    ):
        create_accelerator(config("trainer.mixed_precision=fp16", "trainer.device=cpu"))


def test_a_parameter_without_a_gradient_is_named(tmp_path: Path) -> None:
    task = Regression()
    task.model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match=r"1 parameters to be trained get no gradient from the loss: unused; freeze"):
        run(tmp_path, task=task)
    task = Regression()
    task.model.register_parameter("unused", nn.Parameter(torch.zeros(2), requires_grad=False))
    run(tmp_path, task=task)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "trainer.max_steps=6")
    task = Regression()
    task.model = nn.Linear(2, 2)
    with pytest.raises(
        ValueError,
        match=r"the checkpoint of step 6 is one of another model or encoding: of another shape: weight \(1, 2\) instead of",
    ):
        proceed(tmp_path, task)


def test_other_data_than_before_are_refused_unless_told(tmp_path: Path) -> None:
    class Longer(Line):
        def __len__(self) -> int:
            return 72

    run(tmp_path, "trainer.max_steps=6")
    task = Regression()
    task.train_data = Longer()
    with pytest.raises(ValueError, match=r"72 training examples, but the run to be continued was begun with 64"):
        proceed(tmp_path, task)
    proceed(tmp_path, task, "trainer.allow_changes=true")
    assert len(task.losses) == 24


def test_seconds_are_told_by_what_they_went_to(tmp_path: Path) -> None:
    result = proceed(tmp_path, Regression())
    seconds = result.summary["seconds"]
    assert set(seconds) == {"data", "logging", "evaluation", "saving", "total"}
    assert 0 <= sum(value for key, value in seconds.items() if key != "total") <= seconds["total"] + 0.05


def test_m7_data_smaller_than_a_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.batch_size = 65: must be at most 64"):
        run(tmp_path, "trainer.batch_size=65")
    run(tmp_path, "trainer.batch_size=64", "trainer.max_steps=6")


def test_biases_norms_and_positions_do_not_decay() -> None:
    model = timm.create_model(
        "relpos2d_swin_tiny_patch4_window7_224", encoding="table", depths=(1, 1), num_heads=(2, 2), embed_dim=32
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = config("optimizer.weight_decay=0.1")
    groups = create_optimizer(model, chosen).param_groups
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert any(name.endswith("mlp.fc1.weight") for name in decayed)
    assert any("relative_position_bias_table" in name for name in set(names.values()) - decayed)
