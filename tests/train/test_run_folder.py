"""Which folder a run gets, whether it begins, goes on or is refused, and that nothing is lost by it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.refusals import refuses
from tests.train.forks import in_a_fork
from train.checkpoint import Checkpoint, save_checkpoint
from train.config import Config, load_config, resolved_yaml
from train.run_folder import FREE, Lock, Run, differences, flat, open_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*overrides: str) -> Config:
    return load_config("classify/digits", ["seed=4", *overrides])


DATA = json.dumps({"classes": ["a", "b"], "height": 3})


def enter(*overrides: str, data: str = DATA) -> Run:
    """As a command does: opens, and begins if there is something to do."""
    lock = Lock()
    try:
        run = open_run("classify/digits", config(*overrides), data, lock)
        if not run.finished:
            run.begin(config(*overrides), data)
        return run
    finally:
        lock.release()


def save(folder: Path, step: int) -> Path:
    weights = {"model": {"weight": torch.full((2,), float(step))}}
    return save_checkpoint(folder / "checkpoints", Checkpoint(step, weights, {}, {}))


def finish(folder: Path, steps: int = 1800) -> None:
    (folder / "metrics.json").write_text(json.dumps({"steps": steps, "accuracy": 0.5}))


def test_the_default_output_is_the_first_free_name() -> None:
    base = Path("runs/classify/digits-table+rope_axial-4")
    sum_of_two = "encoding=[table, rope_axial]"
    for suffix in ("", "-2", "-3"):
        run = enter(sum_of_two)
        assert run == Run(Path(f"{base}{suffix}"))
        finish(run.folder)
        save(run.folder, 1800)
    (Path(f"{base}-2") / "metrics.json").unlink()  # not finished: this command goes on there
    assert enter(sum_of_two).folder == Path(f"{base}-2")
    assert enter(sum_of_two, "optimizer.lr=0.5").folder == Path(f"{base}-4")


def test_one_process_at_a_time() -> None:
    first, second = Lock(), Lock()
    run = open_run("classify/digits", config(), DATA, first)

    def open_too() -> str:
        free = open_run("classify/digits", config(), "{}", Lock()).folder
        with refuses(f"output = '{run.folder}': another process is training there"):
            open_run("classify/digits", config(f"output={run.folder}"), "{}", Lock())
        return str(free)

    assert in_a_fork(open_too) == (0, f"{run.folder}-2")
    first.release()
    assert second.take(run.folder)
    second.release()


def test_the_same_config_goes_on_at_the_last_checkpoint() -> None:
    assert enter("output=run") == Run(Path("run"))
    save(Path("run"), 3)
    save(Path("run"), 6)
    left_over = Path("run/checkpoints/.step_9.123")
    left_over.mkdir()
    run = enter("output=run")
    assert run.checkpoint is not None
    assert (run.checkpoint.step, run.finished) == (6, False)
    assert run.notes == ("continues after step 6 of 1800",)
    assert not left_over.exists()
    (Path("run") / "checkpoints" / "step_6" / "state.json").write_text("")
    with pytest.warns(UserWarning, match="step_6: state.json is damaged"):
        run = enter("output=run")
    assert run.checkpoint is not None
    assert run.checkpoint.step == 3
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["damaged_step_6", "step_3"]


def test_a_run_of_which_no_checkpoint_can_be_read_is_not_thrown_away() -> None:
    enter("output=run")
    for step in (3, 6):
        (save(Path("run"), step) / "manifest.json").write_text("")
    (Path("run") / "history.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    message = r"none of its 2 checkpoints can be read \(the last: step_6: .*\); trainer.overwrite=true starts anew"
    with pytest.warns(UserWarning, match="looking for an earlier"), pytest.raises(ValueError, match=message):
        enter("output=run")
    assert len(list(Path("run/checkpoints").iterdir())) == 2
    assert (Path("run") / "history.jsonl").exists()


@pytest.mark.filterwarnings("ignore:run. goes on with another config")
def test_what_could_not_be_built_leaves_the_run_as_it_was() -> None:
    """Opening writes nothing: between it and `begin` the model is built and takes the checkpoint, or does not."""
    enter("output=run")
    save(Path("run"), 3)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    lock = Lock()
    changed = config("output=run", "encoding=rope_axial", "trainer.allow_changes=true")
    run = open_run("classify/digits", changed, DATA, lock)
    run.abandon()
    lock.release()
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    run = open_run("classify/digits", config("output=fresh"), DATA, lock)
    run.abandon()
    lock.release()
    assert not Path("fresh").exists()


def test_k5_other_data_are_refused_with_the_difference() -> None:
    enter("output=run")
    save(Path("run"), 3)
    other = json.dumps({"classes": ["b", "z"], "height": 3})
    with pytest.raises(ValueError, match="holds a run of another config") as caught:
        enter("output=run", data=other)
    assert "  - data.json.classes.0: a -> b\n  - data.json.classes.1: b -> z\n" in str(caught.value)
    assert Path("run/data.json").read_text() == DATA


def test_which_run_is_to_be_changed_must_be_said() -> None:
    for option in ("overwrite", "allow_changes"):
        with pytest.raises(ValueError, match=rf"trainer.{option} = true: which run is meant\? Name it: output=FOLDER"):
            enter(f"trainer.{option}=true")


def test_a_lengthened_run_is_not_finished_any_more() -> None:
    enter("output=run")
    save(Path("run"), 1800)
    finish(Path("run"))
    with pytest.warns(UserWarning, match="trainer.max_steps: 1800 -> 2000"):
        enter("output=run", "trainer.max_steps=2000", "trainer.allow_changes=true")
    assert not Path("run/metrics.json").exists()
    assert json.loads(Path("run/metrics-1800.json").read_text())["steps"] == 1800
    save(Path("run"), 1900)
    with (
        pytest.warns(UserWarning, match="2000 -> 1800"),
        pytest.raises(ValueError, match="has taken 1900 steps already"),
    ):
        enter("output=run", "trainer.allow_changes=true")


def test_a_run_without_a_whole_checkpoint_starts_again() -> None:
    enter("output=run")
    (Path("run") / "history.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    run = enter("output=run")
    assert run == Run(Path("run"), notes=("had no checkpoint yet; starts from the beginning",))
    assert not (Path("run") / "history.jsonl").exists()


def test_a_process_killed_before_it_began_leaves_a_free_folder() -> None:
    Path("run").mkdir()
    Path("run/.lock").touch()
    Path("run/.config.yaml.77").write_text("task: cla")
    assert enter("output=run") == Run(Path("run"))


def test_a_finished_run_is_left_alone() -> None:
    enter("output=run")
    save(Path("run"), 1800)
    finish(Path("run"))
    assert enter("output=run") == Run(Path("run"), finished=True)
    finish(Path("run"), steps=1700)  # that was before it was lengthened
    assert not enter("output=run").finished
    (Path("run") / "metrics.json").write_text('{"ste')
    assert not enter("output=run").finished


def test_m2_another_config_is_refused_with_the_difference() -> None:
    enter("output=run")
    save(Path("run"), 3)
    before = Path("run/config.yaml").read_text()
    changes = ["output=run", "optimizer.lr=0.5", "encoding=rope_axial", "trainer.max_steps=2000"]
    with pytest.raises(ValueError, match="holds a run of another config") as caught:
        enter(*changes)
    lines = str(caught.value).splitlines()
    assert lines[0] == "output = 'run': holds a run of another config:"
    assert set(lines[1:-1]) >= {
        "  - optimizer.lr: 0.002 -> 0.5",
        "  - encoding.name: table -> rope_axial",
        "  - encoding.resize: timm -> nothing",
        "  - encoding.theta: nothing -> 100.0",
        "  - trainer.max_steps: 1800 -> 2000",
    }
    assert "trainer.allow_changes=true goes on all the same, trainer.overwrite=true replaces it" in lines[-1]
    assert Path("run/config.yaml").read_text() == before
    assert Path("run/checkpoints/step_3").is_dir()

    with pytest.warns(UserWarning, match=r"run: goes on with another config: trainer.max_steps: 1800 -> 2000"):
        run = enter("output=run", "trainer.max_steps=2000", "trainer.allow_changes=true")
    assert run.checkpoint is not None
    assert not differences(Path("run"), config("trainer.max_steps=2000"), DATA)


def test_how_a_run_is_computed_and_written_may_change() -> None:
    enter("output=run")
    for change in ("num_workers=0", "log_every=3", "accumulate=2", "device=auto", "parallel=fsdp2", "num_threads=2"):
        assert f"trainer.{change.split('=')[0]}" in FREE
        assert not differences(Path("run"), config(f"trainer.{change}"), DATA)
    assert differences(Path("run"), config("trainer.batch_size=64"), DATA) == ["trainer.batch_size: 32 -> 64"]
    assert differences(Path("run"), config("encoding={name: table, strength: 0.5}"), DATA) == [
        "encoding.strength: nothing -> 0.5"
    ]


def test_a_run_is_not_overwritten_unless_told() -> None:
    Path("run").mkdir()
    Path("run/metrics.json").write_text("{}")
    with pytest.raises(ValueError, match=r"output = 'run': is not empty, and there is no config.yaml in it"):
        enter("output=run")
    with pytest.raises(ValueError, match=r"replaces runs only, and there is no config.yaml in it"):
        enter("output=run", "trainer.overwrite=true")
    assert Path("run/metrics.json").read_text() == "{}"
    for name in ("config.yaml", "maps.png", "history.jsonl", "data.json", "metrics-7.json", "notes.txt", "mine.png"):
        (Path("run") / name).write_text("x")
    save(Path("run"), 1)
    assert enter("output=run", "trainer.overwrite=true") == Run(Path("run"))
    left = sorted(path.name for path in Path("run").iterdir())
    assert left == [".lock", "config.yaml", "data.json", "mine.png", "notes.txt"]  # what a run does not write stays

    Path("file").write_text("")
    with pytest.raises(ValueError, match="is a file; a folder is wanted"):
        enter("output=file")
    with pytest.raises(OSError, match=r"output = 'file/below': cannot be written"):
        enter("output=file/below")


def test_a_config_that_cannot_be_read_is_said() -> None:
    enter("output=run")
    Path("run/config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"run/config.yaml: no readable YAML"):
        enter("output=run")


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user who may not write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_m6_a_read_only_folder_is_a_clear_error(tmp_path: Path) -> None:
    enter("output=run")
    save(Path("run"), 3)
    before = resolved_yaml(config("output=run"))
    for folder in (Path("run"), Path("run/checkpoints")):
        folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        if parent.name.startswith(("pytest", tmp_path.name)):
            parent.chmod(0o755)
    try:
        with without_privileges():
            with pytest.raises(OSError, match=r"output = 'run': cannot be written|Permission denied"):
                enter("output=run")
            with pytest.raises(
                OSError, match=r"the checkpoint of step 4 could not be written .*; the last one there is step_3"
            ):
                save(Path("run"), 4)
    finally:
        for folder in (Path("run"), Path("run/checkpoints")):
            folder.chmod(0o755)
    assert Path("run/config.yaml").read_text() == before
    run = enter("output=run")
    assert run.checkpoint is not None
    assert run.checkpoint.step == 3


def test_flat() -> None:
    assert flat({"a": {"b": 1, "c": [2, {"d": None}]}, "e": [], "f": {}}) == {
        "a.b": 1, "a.c.0": 2, "a.c.1.d": None, "e": "empty", "f": "empty"
    }  # fmt: skip
