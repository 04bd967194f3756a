"""Manifests of recordings: what they hold, and which line is wrong."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.refusals import refuses
from train.data import SpeechJsonl
from train.data.recordings import Recordings
from train.data.stream import TooManyDamaged
from train.schema import validate


def load(path: Path | None, **options: Any) -> Recordings:
    folder = {} if path is None else {"path": str(path)}
    node, problems = validate(SpeechJsonl, {"name": "speech_jsonl", "sample_rate": 8000, **folder, **options})
    assert node is not None, problems
    return node.load(seed=0)


def write(path: Path, *rows: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Recordings of 1 and 2 seconds below audio/, and a validation manifest."""
    (tmp_path / "audio").mkdir()
    for number, seconds in ((1, 1), (2, 2)):
        noise = np.random.default_rng(number).integers(-9000, 9000, 8000 * seconds)
        soundfile.write(tmp_path / f"audio/{number}.wav", noise.astype(np.int16), 8000)
    write(tmp_path / "val.jsonl", {"path": "audio/1.wav", "text": "a fox"})
    return tmp_path


def test_manifests_and_parts_of_files(folder: Path) -> None:
    write(
        folder / "train-0.jsonl",
        {"path": "audio/1.wav", "text": "A fox.", "language": "en", "speaker": 7},
        "",
        {"path": "audio/2.wav", "text": "a", "start": 0.5, "duration": 0.25},
    )
    write(
        folder / "train-1.jsonl.gz",
        {"path": str(folder / "audio/2.wav"), "text": "fox", "start": 1.5, "language": None},
    )
    data = load(folder)
    whole = soundfile.read(folder / "audio/2.wav", dtype="float32")[0]
    assert data.train.texts == ["a fox", "a", "fox"]
    assert data.train.durations == [1.0, 0.25, 0.5]
    assert data.train.languages == ["en", None, None]
    assert data.train.names == [
        str(folder / "audio/1.wav"),
        f"{folder / 'audio/2.wav'} from 0.5 s",
        f"{folder / 'audio/2.wav'} from 1.5 s",
    ]
    steady = load(folder, speed=[1.0])
    np.testing.assert_array_equal(steady.train[1][0], whole[4000:6000])
    np.testing.assert_array_equal(steady.train[2][0], whole[12000:])


def test_the_names_of_nemo_and_names_of_ones_own(folder: Path) -> None:
    row = {"audio_filepath": "audio/2.wav", "duration": 0.5, "offset": 0.75, "text": "a fox", "lang": "en"}
    write(folder / "train_manifest.json", row)
    data = load(folder, val="train_manifest.json", speed=[1.0])
    assert (data.train.durations, data.train.languages, len(data.train[0][0])) == ([0.5], ["en"], 4000)
    assert data.train.names[0].endswith("2.wav from 0.75 s")
    write(folder / "own.jsonl", {"sound": "audio/1.wav", "sentence": "fox", "path": "gone.wav", "text": "no"})
    own = load(folder, train="own.jsonl", val="own.jsonl", audio_key="sound", text_key="sentence")
    assert own.test.texts == ["fox"]


def test_files_are_sought_beside_the_manifest_and_then_in_the_folder(folder: Path) -> None:
    row = {"path": "audio/1.wav", "text": "a fox"}
    write(folder / "lists/train.jsonl", row)
    assert load(folder, train="lists/train.jsonl").train.names == [str(folder / "audio/1.wav")]
    with pytest.raises(TooManyDamaged, match=r"lists/train.jsonl:1 .*there is no file .*lists/audio/1.wav"):
        load(None, train=str(folder / "lists/train.jsonl"), val=str(folder / "val.jsonl"))
    (folder / "lists/audio").mkdir()
    soundfile.write(folder / "lists/audio/1.wav", np.array([0.1, 0.2, 0.3]), 8000)
    assert load(folder, train="lists/train.jsonl").train.names == [str(folder / "lists/audio/1.wav")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train.jsonl:2: no readable json"),
        ("[1]", r"train.jsonl:2: must be an object such as \{'path': ...\}, is list"),
        ({"text": "a"}, r"train.jsonl:2: has no key 'path' or 'audio_filepath'; there are text"),
        ({"path": "audio/1.wav"}, r"train.jsonl:2: has no key 'text'; there are path"),
        ({"path": 3, "text": "a"}, r"train.jsonl:2: path must be text, is 3"),
        ({"path": "audio/1.wav", "text": " "}, r"train.jsonl:2: text is empty"),
        ({"path": "audio/1.wav", "text": "..."}, r"audio/1.wav: its text '...' holds nothing that is said"),
        ({"path": "audio/1.wav", "text": "a\ud800"}, r"train.jsonl:2: text has half a character"),
        ({"path": "audio/1.wav", "text": "a", "language": 1}, r"train.jsonl:2: language must be text, is 1"),
        ({"path": "audio/9.wav", "text": "a"}, r"train.jsonl:2: there is no file .*audio/9.wav"),
        ({"path": "audio", "text": "a"}, r"train.jsonl:2: there is no file .*audio"),
        ({"path": "x" * 5000, "text": "a"}, r"train.jsonl:2: there is no file .*xxx"),
        (
            {"path": "audio/1.wav", "text": "a", "start": 1e308, "duration": 1},
            r"0 or more seconds, is 1e\+308 \(less than",
        ),
        ({"path": "audio/1.wav", "text": "a", "start": 1.5}, r"audio/1.wav from 1.5 s: is at an end there"),
        *(
            (
                {"path": "audio/1.wav", "text": "a", key: value},
                rf"train.jsonl:2: {key} must be {allowed} seconds, is {shown}",
            )
            for key, value, allowed, shown in (
                ("duration", -1, "more than 0", "-1"),
                ("duration", 0, "more than 0", "0"),
                ("duration", float("nan"), "more than 0", "nan"),
                ("duration", float("inf"), "more than 0", "inf"),
                ("duration", "1.5", "more than 0", "'1.5'"),
                ("duration", True, "more than 0", "True"),
                ("duration", 10**400, "more than 0", "10+"),
                ("start", -0.5, "0 or more", "-0.5"),
                ("start", float("-inf"), "0 or more", "-inf"),
                ("offset", float("nan"), "0 or more", "nan"),
            )
        ),
    ],
)
def test_bad_lines_are_named_and_counted(line: object, message: str, folder: Path) -> None:
    good = {"path": "audio/1.wav", "text": "a fox"}
    write(folder / "train.jsonl", good, line, good)
    with pytest.warns(UserWarning, match=message):
        data = load(folder, max_damaged=1)
    assert len(data.train) == 2
    with pytest.raises(TooManyDamaged, match=r"1 damaged examples, data.max_damaged = 0 are allowed"):
        load(folder)


def test_damage_that_only_reading_shows(folder: Path) -> None:
    content = (folder / "audio/2.wav").read_bytes()
    (folder / "audio/2.wav").write_bytes(content[:9000])
    late = {"path": "audio/1.wav", "text": "a fox", "start": 0.5, "duration": 3}
    write(folder / "train.jsonl", late, {"path": "audio/2.wav", "text": "fox", "duration": 2})
    data = load(folder, max_damaged=2)
    for index, message in enumerate((r"1.wav: should go on to 3.5 s, it has 1 s", "2.wav: is cut off")):
        with pytest.raises(ValueError, match=message):
            data.train[index]
    write(folder / "train.jsonl", {"path": "audio/2.wav", "text": "fox"}, {"path": "audio/1.wav", "text": "a fox"})
    with pytest.warns(UserWarning, match="2.wav: is cut off"):
        assert load(folder, max_damaged=1).train.texts == ["a fox"]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with refuses(r"train\*.json\*: no such file"):
        load(tmp_path)
