"""Python's own source: which files, and which of them are for testing."""

import sysconfig
from pathlib import Path

from tests.refusals import refuses
from train.data import Code
from train.data.code import is_for_testing, source_files


def test_the_standard_library_without_its_tests() -> None:
    files = source_files(Path(sysconfig.get_path("stdlib")))
    assert {"os.py", "json/decoder.py"} <= set(files)
    assert not [file for file in files if file.startswith(("test/", "site-packages/")) or "/tests/" in file]
    assert 0.05 < sum(map(is_for_testing, files)) / len(files) < 0.2
    assert files == sorted(files)


def test_files_are_shared_out_by_name(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"m{number}.py").write_text(f"x = {number}  # größer\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_text("SECRET = 1\n")
    (tmp_path / "copy.py").write_text("x = 0  # größer\n")
    data = Code(name="code", path=str(tmp_path), max_length=16, tokenizer="bytes").load(0)
    text = data.tokenizer.decode(data.test.tokens.tolist())
    expected = "".join(
        f"x = {n}  # größer\n" for n in sorted(range(40), key=lambda n: f"m{n}.py") if is_for_testing(f"m{n}.py")
    )
    assert text == expected
    assert data.test_bytes == len(expected.encode())
    assert "SECRET" not in data.tokenizer.decode(data.train.tokens.tolist())
    assert data.origin.startswith(f"{tmp_path}: ")
    with refuses("no \\*.py file in this folder"):
        source_files(tmp_path / "absent")
