"""The baseline of words that a model of text is compared with."""

import json
from pathlib import Path

import pytest

from train.text_baseline import main


def write(folder: Path) -> None:
    for split, count in (("train", 20), ("val", 8)):
        rows = [{"text": f"{word} number {i}", "label": word} for i in range(count) for word in ("cat", "dog")]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_words_that_tell_the_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["text_jsonl", f"path={tmp_path}", "data.tokenizer=bytes", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["accuracy"], result["accuracy_standard_error"]) == (1.0, 0.0)
    assert (result["num_train"], result["num_test"]) == (40, 16)
    assert main(["text_jsonl", f"path={tmp_path}"]) == 0
    assert "text_jsonl: 100.0 % of 16 test texts (standard error 0.0 points)" in capsys.readouterr().out


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    for arguments, message in (
        (["nws"], "unknown data file; did you mean news?"),
        (["text_jsonl", "pth=x"], "pth = 'x': unknown key; did you mean path?"),
        (["text_jsonl", f"path={tmp_path}", "use=running", "max_length=8"], "holds no texts in classes"),
        (["digits", "rotate=-1"], "rotate = -1"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
