"""The recorded prompts of the telephone system Asterisk: real speech in five languages, one speaker each."""

import hashlib
import io
import re
import tarfile
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from train.data.fetch import fetch_prompts, prompt_lines, unpacked_prompts
from train.data.images import without_repeats
from train.data.recordings import (
    Clip,
    DamagedRecording,
    HeldSamples,
    Recordings,
    SpeechData,
    UnclearText,
    import_package,
    read_part,
    spoken_form,
)
from train.data.texts import Damage

TEST_FRACTION = 0.15
Language = Literal["en", "fr", "es", "it", "ru"]

NOISES = ("ascending-2tone", "beep", "beeperr", "confbridge-join", "confbridge-leave", "descending-2tone", "tt-monkeys")
CUT_SHORT = ("fr/vm-mismatch", "es/vm-mismatch")  # 28 and 21 characters a second: not all of the text is said


class Prompts(SpeechData):
    """Some 500 recordings in each of `languages`, 8 kHz. A seventh of the texts is for testing, by a hash of the text, so that no
    text is on both sides, and none changes sides with the languages that are chosen.

    Left out, and counted: what is no speech, what is written with signs or notes of which nobody can tell how they are said, and
    what has lost its accents ("sar? esattamente"). Numbers are written out. `path` is a folder in which the packages of all these
    languages were unpacked (`dpkg-deb -x`), in place of apt.
    """

    name: Literal["prompts"]
    languages: Annotated[tuple[Language, ...], Field(min_length=1), AfterValidator(without_repeats)] = ("en",)
    path: str | None = None
    sample_rate: PositiveInt = 8000
    max_duration: PositiveFloat = 8.0
    max_test_duration: PositiveFloat | None = 8.0
    spell_numbers: bool = True

    def load(self, seed: int) -> Recordings:
        import_package("num2words")
        train: list[Clip] = []
        test: list[Clip] = []
        left_out: Counter[str] = Counter()
        damage = Damage(self.max_damaged)
        for language in self.languages:
            clips, reasons = read_prompts(language, self.path, damage)
            left_out += reasons
            for clip in clips:
                (test if is_test_text(spoken_form(clip.text, spell_numbers=True, language=language)) else train).append(
                    clip
                )
        return self.recordings(train, test, damage, **left_out)


def is_test_text(text: str) -> bool:
    """Whether a text as it is said is for testing: chosen once and for all."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) < TEST_FRACTION * 2**32


def read_prompts(
    language: str, path: str | None = None, damage: Damage | None = None
) -> tuple[list[Clip], Counter[str]]:
    """The prompts of a language, and how many others there are, by the reason why they are none.

    Args:
        damage: takes recordings that cannot be read; None: there may be none.

    Raises:
        TooManyDamaged: there are more than it allows.
        FetchError: they cannot be fetched.
        ValueError: they are not in the folder `path`.
    """
    damage = damage or Damage(0)
    files = unpacked_prompts(Path(path), language) if path else unpack(fetch_prompts(language))
    lines = prompt_lines(files[f"core-sounds-{language}.txt"].decode("utf-8", errors="replace"))
    times = Counter(key for key, _ in lines)
    clips: list[Clip] = []
    left_out: Counter[str] = Counter()
    for key, text in lines:
        if f"{key}.wav" not in files:
            left_out["text without a recording"] += 1
            continue
        reason = "two texts for one recording" if times[key] > 1 else why_unusable(key, text, language)
        if reason:
            left_out[reason] += 1
            continue
        name = f"{language}/{key}.wav"
        try:
            samples, rate = read_part(name, io.BytesIO(files[f"{key}.wav"]), 0, None)
        except DamagedRecording as error:
            damage.add(error)
            continue
        held = (samples[:, 0] * 2**15).round().astype("int16")
        clips.append(Clip(name, without_signs(text), HeldSamples(held, rate), language=language))
    return clips, left_out


def unpack(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}


def why_unusable(key: str, text: str, language: str) -> str:
    """Why a prompt is left out; nothing if it is not."""
    if key in NOISES or key.startswith("silence/") or re.match(r"[\[<(]", text):
        return "no speech"
    if f"{language}/{key}" in CUT_SHORT:
        return "text that is not said to its end"
    if not text:
        return "no text"
    if lost_accents(text):
        return "lost accents"
    text = without_signs(text)
    if re.search(r"[\[\]()<>@#$*=+/%&]", text) or re.search(r"\w-\w[\w-]*:", text):
        return "signs or notes"
    if language == "ru" and any(unicodedata.name(letter, "").startswith("LATIN") for letter in text):
        return "letters of another alphabet"
    try:
        return "" if spoken_form(text, spell_numbers=True, language=language) else "no text"
    except UnclearText:
        return "unclear numbers"


def lost_accents(text: str) -> bool:
    """Whether a question mark stands in place of a letter: it does where the sentence goes on after it."""
    return any(not between or letter.islower() for between, letter in re.findall(r"\?(\W*)(\w)", text))


def without_signs(text: str) -> str:
    """`at [@]` -> `at`: brackets without a letter in them show what is said."""
    return re.sub(r"\s*\[[\W_]*\]", "", text)
