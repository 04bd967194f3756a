"""Recordings of hub data sets, from local folders: nothing here needs the network, or torchcodec."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.refusals import refuses
from train.data import SpeechHub
from train.data.recordings import Recordings
from train.data.stream import TooManyDamaged
from train.schema import validate

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def load(path: Path, **options: Any) -> Recordings:
    node, problems = validate(SpeechHub, {"name": "speech_hub", "path": str(path), "sample_rate": 8000, **options})
    assert node is not None, problems
    return node.load(seed=0)


def sound(seconds: float, kind: str = "flac", rate: int = 16000) -> bytes:
    content = io.BytesIO()
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, round(seconds * rate))
    soundfile.write(content, noise, rate, format=kind)
    return content.getvalue()


def save(folder: Path, texts: list[Any], sounds: list[Any], **columns: list[Any]) -> Path:
    text = datasets.Value("string")
    features = {"audio": {"bytes": datasets.Value("binary"), "path": text}, "sentence": text} | dict.fromkeys(
        columns, text
    )
    rows = {"audio": sounds, "sentence": texts, **columns}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    train = table.cast_column("audio", datasets.Audio(sampling_rate=16000))  # from_dict would ask for torchcodec
    datasets.DatasetDict({"train": train, "validation": train.select([0])}).save_to_disk(folder)
    return folder


def test_bytes_and_paths(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(sound(0.5, "wav"))
    sounds = [{"bytes": sound(1.0), "path": "x.flac"}, {"bytes": None, "path": str(tmp_path / "a.wav")}]
    saved = save(tmp_path / "set", ["A Fox.", "a dog fox"], sounds, tongue=["en", None])
    data = load(saved, text_key="sentence", language_key="tongue", speed=[1.0])
    assert data.train.texts == ["a fox", "a dog fox"]
    assert data.train.durations == [1.0, 0.5]
    assert data.train.languages == ["en", None]
    assert data.test.names == [f"{saved}[validation][0]"]
    samples, tokens = pickle.loads(pickle.dumps(data.train))[0]
    assert samples.shape == (8000,)
    assert data.tokenizer.decode(tokens.tolist()) == "a fox"


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    good = {"bytes": sound(0.5), "path": None}
    sounds = [good, None, {"bytes": b"junk", "path": None}, good, good]
    saved = save(tmp_path / "set", ["a fox", "a", "a", None, "!"], sounds)
    with (
        pytest.warns(UserWarning, match=r"\[train\]\[1\]: there is no recording"),
        pytest.warns(UserWarning, match=r"\[train\]\[2\]: no readable recording"),
        pytest.warns(UserWarning, match=r"\[train\]\[3\]: its text '' holds nothing"),
        pytest.warns(UserWarning, match=r"\[train\]\[4\]: its text '!' holds nothing"),
    ):
        data = load(saved, text_key="sentence", max_damaged=4)
    assert len(data.train) == 1
    with pytest.raises(TooManyDamaged, match=r"set\[train\]\[1\]"):
        load(saved, text_key="sentence")


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    saved = save(tmp_path / "set", ["a"], [{"bytes": sound(0.5), "path": None}])
    with refuses(r"data.text_key = 'text': no such column of texts in .*set\[train\]; there are audio"):
        load(saved)
    with refuses(r"data.audio_key = 'sound': no such column of audios"):
        load(saved, text_key="sentence", audio_key="sound")
    with refuses("there is no such split; there are train, validation"):
        load(saved, text_key="sentence", val="test")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "plain")
    with refuses("data.audio_key: must be named, since 0 columns may be meant"):
        load(tmp_path / "plain", val="train")


def test_tables_of_parquet(tmp_path: Path) -> None:
    saved = datasets.load_from_disk(save(tmp_path / "set", ["a fox"], [{"bytes": sound(0.5), "path": "a.flac"}]))
    for split in ("train", "validation"):
        saved[split].to_parquet(tmp_path / f"parquet/{split}-0.parquet")
    data = load(tmp_path / "parquet", text_key="sentence")
    assert data.test.texts == ["a fox"]
    assert data.test[0][0].shape == (4000,)


def test_a_folder_of_audio_files_is_better_read_by_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **options: object) -> None:
        try:
            raise ImportError("To support encoding audio data, please install 'torchcodec'.")
        except ImportError as error:
            raise RuntimeError("An error occurred while generating the dataset") from error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with refuses("with the package torchcodec alone; .* is data=speech_folder, and tables"):
        load(tmp_path)
