"""Prompts: which are kept, how they are written, and on which side of the split they are."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.refusals import refuses
from train.data import Prompts
from train.data.prompts import is_test_text, lost_accents, read_prompts, without_signs
from train.data.recordings import Recordings
from train.data.stream import TooManyDamaged
from train.data.texts import Damage
from train.schema import validate

ENGLISH = [
    ("vm-one", "Press 1, please."),
    ("vm-two", "You\u2019re on hold\u2026"),
    ("letters/at", "at [@]"),
    ("silence/1", "(1 second of silence)"),
    ("beep", "a beep"),
    ("tones", "<two tones>"),
    ("spy-h323", "H.323"),
    ("stars", "press * to go on"),
    ("vm-intro", "Leave a message. (a tone follows)"),
    ("nothing", ""),
    ("missing", "there is no such file"),
    ("twice", "one text"),
    ("twice", "another text"),
    ("long", "this is too long"),
]
ITALIAN = [
    ("sara", "il tempo sar? esattamente"),
    ("cosi", "La conferenza ? piena."),
    ("dove", "In quale cartella?"),
    ("due", "Casella? Premere 8."),
    ("runs-on", "eliminato vm-then-pound: poi premere"),
]
RUSSIAN = [("bukva", "буквы «Q»"), ("nazhmite", "Нажмите «7»"), ("is", "")]


def write_packages(root: Path, language: str, lines: list[tuple[str, str]]) -> None:
    doc, sounds = (
        root / f"usr/share/doc/asterisk-core-sounds-{language}",
        root / f"usr/share/asterisk/sounds/{language}_X",
    )
    doc.mkdir(parents=True)
    text = "\ufeff; a comment: of the file\n\n" + "".join(f"{key}: {text}\n" for key, text in lines)
    (doc / f"core-sounds-{language}.txt.gz").write_bytes(gzip.compress(text.encode()))
    for number, (key, _) in enumerate(lines):
        if key != "missing":
            (sounds / key).parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(number).integers(-9000, 9000, 80000 if key == "long" else 4000 + number)
            soundfile.write(sounds / f"{key}.wav", noise.astype(np.int16), 8000)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packages")
    for language, lines in (("en", ENGLISH), ("it", ITALIAN), ("ru", RUSSIAN)):
        write_packages(root, language, lines)
    return root


def load(**options: Any) -> Recordings:
    node, problems = validate(Prompts, {"name": "prompts", **options})
    assert node is not None, problems
    return node.load(seed=0)


def test_what_is_kept_and_what_is_left_out(packages: Path) -> None:
    clips, left_out = read_prompts("en", str(packages))
    assert [(clip.name, clip.text) for clip in clips] == [
        ("en/vm-one.wav", "Press 1, please."),
        ("en/vm-two.wav", "You\u2019re on hold\u2026"),
        ("en/letters/at.wav", "at"),
        ("en/long.wav", "this is too long"),
    ]
    assert left_out == {
        "no speech": 3,
        "unclear numbers": 1,
        "signs or notes": 2,
        "no text": 1,
        "text without a recording": 1,
        "two texts for one recording": 2,
    }
    clips, left_out = read_prompts("it", str(packages))
    assert [clip.name for clip in clips] == ["it/dove.wav", "it/due.wav"]
    assert left_out == {"lost accents": 2, "signs or notes": 1}
    clips, left_out = read_prompts("ru", str(packages))
    assert [(clip.text, clip.language) for clip in clips] == [("Нажмите «7»", "ru")]
    assert left_out == {"letters of another alphabet": 1, "no text": 1}


def test_samples_are_those_of_the_file(packages: Path) -> None:
    clip = read_prompts("en", str(packages))[0][2]
    file = packages / "usr/share/asterisk/sounds/en_X/letters/at.wav"
    np.testing.assert_array_equal(
        clip.source.read(0, None)[0], soundfile.read(file, dtype="float32", always_2d=True)[0]
    )
    assert clip.source.seconds() == 4002 / 8000


def test_the_split_is_by_text_alone(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "train.data.prompts.is_test_text", lambda text: text in ("at", "premere otto", "casella premere otto")
    )
    options = {"path": str(packages), "languages": ["en", "it"], "tokenizer": "bpe"}
    data = load(**options)
    assert data.train.texts == ["press one please", "you're on hold", "in quale cartella"]
    assert data.test.texts == ["at", "casella premere otto"]
    assert data.test.languages == ["en", "it"]
    assert data.left_out["longer than 8 s (train)"] == 1
    assert data.left_out["lost accents"] == 2
    kept = load(**options, punctuation="keep", lowercase=False, max_duration=20.0)
    assert kept.test.texts == ["at", "Casella? Premere otto."]  # the same ones, however they are written
    assert 10.0 in kept.train.durations


def test_which_texts_are_for_testing() -> None:
    texts = [f"text number {number}" for number in range(2000)]
    assert 0.13 < sum(map(is_test_text, texts)) / 2000 < 0.17
    assert [is_test_text(text) for text in ("agent", "please hold", "due")] == [False, False, False]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("sar? lungo", True),
        ("cos?come", True),
        ("Pu? essere", True),
        ("è vero?", False),
        ("Sì? No.", False),
        ("no ?", False),
    ],
)
def test_question_marks_that_were_letters(text: str, lost: bool) -> None:
    assert lost_accents(text) is lost


def test_signs_that_show_what_is_said() -> None:
    assert [without_signs(text) for text in ("dash [-]", "space [ ]", "spazio []", "[quello] non")] == [
        "dash", "space", "spazio", "[quello] non",
    ]  # fmt: skip


def test_packages_that_are_not_there(tmp_path: Path) -> None:
    with refuses(r"core-sounds-fr.txt.gz: no readable file of texts"):
        load(path=str(tmp_path), languages=["fr"])
    _, problems = validate(Prompts, {"name": "prompts", "languages": ["en", "de", "en"]})
    assert "languages.1 = 'de': must be 'en', 'fr', 'es', 'it' or 'ru'" in problems[0]
    _, problems = validate(Prompts, {"name": "prompts", "languages": ["en", "en"]})
    assert "en is there again" in problems[0]


def test_a_damaged_prompt_is_passed_over_where_that_is_allowed(tmp_path: Path) -> None:
    write_packages(tmp_path, "en", [(f"p-{letter}", f"some text {letter}") for letter in "abcdefghijklmnopqrst"])
    (tmp_path / "usr/share/asterisk/sounds/en_X/p-c.wav").write_bytes(b"no sound")
    with pytest.raises(TooManyDamaged, match=r"en/p-c\.wav"):
        load(path=str(tmp_path))
    with pytest.warns(UserWarning, match=r"en/p-c\.wav: no readable recording"):
        clips, _ = read_prompts("en", str(tmp_path), Damage(1))
    assert len(clips) == 19


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_the_real_prompts() -> None:
    clips, left_out = read_prompts("en")
    assert len(clips) + left_out["signs or notes"] + left_out["unclear numbers"] == 551
    data = load()
    assert (len(data.train), len(data.test)) == (450, 70)
    assert not set(data.train.texts) & set(data.test.texts)
    assert set("".join(data.train.texts)) == set(" 'abcdefghijklmnopqrstuvwxyz")
    for split in (data.train, data.test):
        assert max(split.durations) <= 8
        for index, text in enumerate(split.texts):
            assert data.tokenizer.decode(split.tokens(index).tolist()) == text
    assert sum(data.train.durations) / 60 == pytest.approx(14.25, abs=0.01)
