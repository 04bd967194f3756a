"""The folder of a run: who may write into it, whether what lies there is finished, to be continued, or another run's."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.checkpoint import (
    Checkpoint,
    damage_of,
    last_checkpoint,
    load_checkpoint,
    remove_unfinished,
    replace_text,
    set_aside_after,
    step_folders,
)
from train.config import Config, default_output, resolved_yaml
from train.data.description import DESCRIPTION, TOKENIZER

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


#: what a run writes beside its checkpoints
WRITTEN = (
    CONFIG,
    METRICS,
    DESCRIPTION,
    TOKENIZER,
    HISTORY,
    "predictions.jsonl",
    "detections.json",
    "annotations.json",
    "detections.png",
    "alignment.png",
    "windows.jsonl",
    "generated.jsonl",
    "curves.png",
    "predictions.png",
    "maps.png",
)


@dataclass(frozen=True)
class Run:
    """A folder to train into, in which nothing has been written yet.

    Attributes:
        checkpoint: where to go on, None to start from nothing.
        finished: there is nothing left to do.
        notes: what one should be told about it.
    """

    folder: Path
    checkpoint: Checkpoint | None = None
    finished: bool = False
    notes: tuple[str, ...] = ()

    def begin(self, config: Config, description: str, files: Mapping[str, str] | None = None) -> None:
        """Writes what the run is, once everything has been built: a config that could not be is not left behind.

        Args:
            description: of the data, as in data.json.
            files: further text files to write beside it, by name.
        """
        if self.checkpoint is None:
            clear_run(self.folder)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of a run that was shorter
            before = json.loads((self.folder / METRICS).read_text())["steps"]
            (self.folder / METRICS).replace(self.folder / f"metrics-{before}.json")
        replace_text(self.folder / CONFIG, resolved_yaml(config))
        for name, text in (files or {}).items():
            replace_text(self.folder / name, text)
        replace_text(self.folder / DESCRIPTION, description)

    def abandon(self) -> None:
        """Leaves no folder behind if nothing has been written into it."""
        if is_empty(self.folder):
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()


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


def open_run(name: str, config: Config, description: str, lock: Lock) -> Run:
    """Makes or finds the run's folder and locks it.

    It is `output`, or runs/<config>-<encoding>-<seed> with the first suffix that is free or holds this very run, unfinished.

    Args:
        description: of the data, as in data.json.

    Raises:
        ValueError: the folder holds something else, a run of another config or of other data, or only damaged checkpoints.
        OSError: it cannot be written.
    """
    if config.output is not None:
        folder = Path(config.output)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output = {config.output!r}: is a file; a folder is wanted")
        make(folder)
        if not lock.take(folder):
            raise ValueError(f"output = {config.output!r}: another process is training there")
        return enter(folder, config, description)
    for option in ("overwrite", "allow_changes"):
        if getattr(config.trainer, option):
            raise ValueError(f"trainer.{option} = true: which run is meant? Name it: output=FOLDER")
    wanted, suffix = default_output(name, config), 1
    while True:
        folder = Path(wanted if suffix == 1 else f"{wanted}-{suffix}")
        make(folder)
        if lock.take(folder):
            if is_empty(folder):
                return enter(folder, config, description)
            same = (folder / CONFIG).is_file() and not differences(folder, config, description)
            if same and not is_finished(folder, config):
                return enter(folder, config, description)
        suffix += 1


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise OSError(f"output = {str(folder)!r}: cannot be written ({error})") from error


def enter(folder: Path, config: Config, description: str) -> Run:
    """Start, continue or refuse."""
    if is_empty(folder):
        return Run(folder)
    if not (folder / CONFIG).is_file():
        what = "trainer.overwrite=true replaces runs only, and" if config.trainer.overwrite else "is not empty, and"
        raise ValueError(f"output = {str(folder)!r}: {what} there is no {CONFIG} in it; name another folder")
    return Run(folder) if config.trainer.overwrite else continued(folder, config, description)


def continued(folder: Path, config: Config, description: str) -> Run:
    changes = differences(folder, config, description)
    if changes and not config.trainer.allow_changes:
        listed = "".join(f"\n  - {change}" for change in changes)
        raise ValueError(
            f"output = {str(folder)!r}: holds a run of another config:{listed}\n"
            f"trainer.allow_changes=true goes on all the same, trainer.overwrite=true replaces it; or name another folder"
        )
    for change in changes:
        warnings.warn(f"{folder}: goes on with another config: {change}", stacklevel=2)
    if not changes and is_finished(folder, config):
        return Run(folder, finished=True)
    checkpoints = folder / CHECKPOINTS
    remove_unfinished(checkpoints)
    found = last_checkpoint(checkpoints)
    if found is None:
        if left := step_folders(checkpoints):
            raise ValueError(
                f"output = {str(folder)!r}: none of its {len(left)} checkpoints can be read (the last: "
                f"{left[-1].name}: {damage_of(left[-1])}); trainer.overwrite=true starts anew"
            )
        return Run(folder, notes=("had no checkpoint yet; starts from the beginning",))
    checkpoint = load_checkpoint(found)
    if checkpoint.step > config.trainer.max_steps:
        raise ValueError(
            f"trainer.max_steps = {config.trainer.max_steps}: the run in {folder} has taken {checkpoint.step} steps already"
        )
    set_aside_after(checkpoints, checkpoint.step)
    return Run(folder, checkpoint, notes=(f"continues after step {checkpoint.step} of {config.trainer.max_steps}",))


def is_empty(folder: Path) -> bool:
    """Nothing there, or only what a process left that was killed before it had begun."""
    return all(entry.name.startswith(".") for entry in folder.iterdir())


def is_finished(folder: Path, config: Config) -> bool:
    try:
        return json.loads((folder / METRICS).read_text())["steps"] == config.trainer.max_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def differences(folder: Path, config: Config, description: str) -> list[str]:
    """What of a run's config, or of its data, is another now: `optimizer.lr: 0.002 -> 0.001`.

    Raises:
        ValueError: what lies there cannot be read.
    """
    before = {key: value for key, value in read_config(folder).items() if key not in FREE}
    now = {key: value for key, value in flat_config(config).items() if key not in FREE}
    if (folder / DESCRIPTION).is_file():
        try:
            before |= flat(json.loads((folder / DESCRIPTION).read_text()), DESCRIPTION)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / DESCRIPTION}: no readable JSON ({error})") from error
        now |= flat(json.loads(description), DESCRIPTION)
    return [
        f"{key}: {before.get(key, 'nothing')} -> {now.get(key, 'nothing')}"
        for key in dict.fromkeys([*before, *now])
        if key not in before or key not in now or before[key] != now[key]
    ]


def read_config(folder: Path) -> dict[str, Any]:
    """The config in a run's folder, flat.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return flat(OmegaConf.to_container(OmegaConf.load(folder / CONFIG)))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{folder / CONFIG}: no readable YAML ({' '.join(str(error).split())})") from error


def flat_config(config: Config) -> dict[str, Any]:
    return flat(OmegaConf.to_container(OmegaConf.create(resolved_yaml(config))))


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


def records_text(name: str, records: list[dict[str, Any]]) -> str:
    """Records as the file of that name has them: a line of JSON each, or, in a .json, one array that COCO's tools read."""
    lines = [json.dumps(record) for record in records]
    if name.endswith(".json"):
        return "[" + ",\n".join(lines) + "]\n"
    return "".join(line + "\n" for line in lines)


def clear_run(folder: Path) -> None:
    """Removes what a run writes, and nothing else."""
    for entry in (CHECKPOINTS, TENSORBOARD):
        shutil.rmtree(folder / entry, ignore_errors=True)
    for file in (*(folder / name for name in WRITTEN), *folder.glob("metrics-*.json")):
        file.unlink(missing_ok=True)
