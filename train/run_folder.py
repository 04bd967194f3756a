"""The folder of a run: who may write into it, whether what lies there is finished, to be continued, or another run's."""

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.checkpoint import Checkpoint, last_checkpoint, load_checkpoint, remove_unfinished, replace_text
from train.config import Config, default_output, resolved_yaml
from train.data.description import DESCRIPTION

CONFIG, METRICS, HISTORY = "config.yaml", "metrics.json", "history.jsonl"
CHECKPOINTS, TENSORBOARD, LOCK = "checkpoints", "tensorboard", ".lock"

#: what may differ between two parts of one run: where and how it is computed and written, not what
FREE = {
    "output",
    *(
        f"trainer.{key}"
        for key in (
            "accumulate",
            "log_every",
            "eval_every",
            "save_every",
            "keep_checkpoints",
            "compile",
            "device",
            "parallel",
            "num_workers",
            "num_threads",
            "overwrite",
            "allow_changes",
        )
    ),
}


@dataclass(frozen=True)
class Run:
    """A folder to train into.

    Attributes:
        checkpoint: where to go on, None to start from nothing.
        finished: there is nothing left to do.
        notes: what one should be told about it.
    """

    folder: Path
    checkpoint: Checkpoint | None = None
    finished: bool = False
    notes: tuple[str, ...] = ()


class Lock:
    """One process at a time in a folder. The system lets go of it when the process ends, however it ends."""

    def __init__(self) -> None:
        self.file: Any = None

    def take(self, folder: Path) -> bool:
        """Whether the folder is ours now."""
        try:
            import fcntl
        except ImportError:  # not on Windows
            return True
        self.release()
        file = (folder / LOCK).open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which data workers would inherit and keep
        except BlockingIOError:
            file.close()
            return False
        except OSError:  # a file system without locks
            pass
        self.file = file
        return True

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def open_run(name: str, config: Config, lock: Lock) -> Run:
    """Makes or finds the run's folder, locks it, writes config.yaml.

    It is `output`, or runs/<config>-<encoding>-<seed> with the first suffix that is free or holds this very run, unfinished.

    Raises:
        ValueError: the folder holds something else, or a run of another config.
        OSError: it cannot be written.
    """
    if config.output is not None:
        folder = Path(config.output)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output = {config.output!r}: is a file; a folder is wanted")
        make(folder)
        if not lock.take(folder):
            raise ValueError(f"output = {config.output!r}: another process is training there")
        return enter(folder, config)
    wanted, suffix = default_output(name, config), 1
    while True:
        folder = Path(wanted if suffix == 1 else f"{wanted}-{suffix}")
        make(folder)
        if lock.take(folder):
            if is_empty(folder):
                return enter(folder, config)
            same = (folder / CONFIG).is_file() and not differences(folder, config)
            if same and not is_finished(folder, config):
                return enter(folder, config)
        suffix += 1


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise OSError(f"output = {str(folder)!r}: cannot be written ({error})") from error


def enter(folder: Path, config: Config) -> Run:
    """Start, continue or refuse."""
    run = Run(folder)
    if not is_empty(folder):
        if not (folder / CONFIG).is_file():
            what = "trainer.overwrite=true replaces runs only, and" if config.trainer.overwrite else "is not empty, and"
            raise ValueError(f"output = {str(folder)!r}: {what} there is no {CONFIG} in it; name another folder")
        if config.trainer.overwrite:
            clear_run(folder)
        else:
            run = continued(folder, config)
    replace_text(folder / CONFIG, resolved_yaml(config))
    return run


def continued(folder: Path, config: Config) -> Run:
    changes = differences(folder, config)
    if changes and not config.trainer.allow_changes:
        listed = "".join(f"\n  - {change}" for change in changes)
        raise ValueError(
            f"output = {str(folder)!r}: holds a run of another config:{listed}\n"
            f"trainer.allow_changes=true goes on all the same, trainer.overwrite=true replaces it; or name another folder"
        )
    for change in changes:
        warnings.warn(f"{folder}: goes on with another config: {change}", stacklevel=2)
    remove_unfinished(folder / CHECKPOINTS)
    if is_finished(folder, config):
        return Run(folder, finished=True)
    found = last_checkpoint(folder / CHECKPOINTS)
    if found is None:
        clear_run(folder)
        return Run(folder, notes=("no checkpoint was left; starts from the beginning",))
    checkpoint = load_checkpoint(found)
    if checkpoint.step > config.trainer.max_steps:
        raise ValueError(
            f"trainer.max_steps = {config.trainer.max_steps}: the run in {folder} has taken {checkpoint.step} steps already"
        )
    return Run(folder, checkpoint, notes=(f"continues after step {checkpoint.step} of {config.trainer.max_steps}",))


def is_empty(folder: Path) -> bool:
    """Nothing there, or only what a process left that was killed before it had begun."""
    return all(entry.name.startswith(".") for entry in folder.iterdir())


def is_finished(folder: Path, config: Config) -> bool:
    try:
        return json.loads((folder / METRICS).read_text())["steps"] == config.trainer.max_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def differences(folder: Path, config: Config) -> list[str]:
    """What of a run's config is another now, as `optimizer.lr: 0.002 -> 0.001`.

    Raises:
        ValueError: the config that lies there cannot be read.
    """
    try:
        before = flat(OmegaConf.to_container(OmegaConf.load(folder / CONFIG)))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{folder / CONFIG}: no readable YAML ({' '.join(str(error).split())})") from error
    now = flat(OmegaConf.to_container(OmegaConf.create(resolved_yaml(config))))
    absent = object()
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in FREE]
    return [
        f"{key}: {before.get(key, 'nothing')} -> {now.get(key, 'nothing')}"
        for key in keys
        if before.get(key, absent) != now.get(key, absent)
    ]


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}, "c": [2]}` -> `{"a.b": 1, "c.0": 2}`"""
    if isinstance(tree, dict):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [(str(number), value) for number, value in enumerate(tree)]
    else:
        return {prefix: tree}
    if not items:
        return {prefix: "empty"}
    return {
        path: leaf for key, value in items for path, leaf in flat(value, f"{prefix}.{key}" if prefix else key).items()
    }


def clear_run(folder: Path) -> None:
    """Removes what a run writes, and nothing else."""
    for entry in (CHECKPOINTS, TENSORBOARD):
        shutil.rmtree(folder / entry, ignore_errors=True)
    for pattern in ("*.png", "*.jsonl", METRICS, DESCRIPTION, CONFIG):
        for file in folder.glob(pattern):
            file.unlink()
