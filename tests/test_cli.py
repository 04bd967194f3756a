"""The console script, through main() and once as a process."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import relpos2d
from relpos2d import cli
from relpos2d.cli import encodings_table, main
from tests.tools.test_check import BothSigns


def test_list_names_every_encoding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "family", "axes", "formula", "paper"]
    assert [line.split()[0] for line in lines[1:]] == [info.name for info in relpos2d.list_encodings()]


def test_markdown_is_a_table_with_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| name | family | axes | formula | paper |", "| --- | --- | --- | --- | --- |"]
    cells = {}
    for line in lines[2:]:
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(row) == 5, line
        cells[row[0]] = row[1:]
    assert list(cells) == [f"`{info.name}`" for info in relpos2d.list_encodings()]
    link = "[2108.12409](https://arxiv.org/abs/2108.12409)"
    assert cells["`alibi`"] == ["number", "1, 2", r"`-slope_h \|d\|`", link]
    assert cells["`table`"][1] == "any"


def test_the_readme_holds_the_table_that_is_printed() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    held = re.search(r"<!-- encodings -->\n(.*?)\n<!-- /encodings -->", readme, re.DOTALL)
    assert held, "README.md has no table between <!-- encodings --> and <!-- /encodings -->"
    assert held[1].strip() == encodings_table(markdown=True), "write it anew: relpos2d list --markdown"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rope_axial"], "AxialRope on Grid(5, 7, num_prefix_tokens=1): all properties hold"),
        (["rope_axial", "--grid", "3x5", "theta=10", "layout=half"], "AxialRope on Grid(3, 5, num_prefix_tokens=1)"),
        (["alibi", "--grid", "9", "--prefix", "0", "--heads", "5", "--head-dim", "7"], "5 of 5 heads"),
        (["table+rope_axial", "--grid=2x3x4"], "Combined on Grid(2, 3, 4, num_prefix_tokens=1)"),
        (["cpb", "pretrained_window_size=7,9", "hidden_dim=9", "--prefix", "2"], "num_prefix_tokens=2"),
    ],
)
def test_check_prints_the_report(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert main(["check", *arguments]) == 0
    assert expected in capsys.readouterr().out


def test_options_reach_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "check", lambda encoding, grid: seen.append((encoding, grid)))
    assert (
        main(["check", "rope_mixed", "--heads", "5", "--head-dim", "12", "theta=3", "--grid", "3x7", "strength=0.5"])
        == 0
    )
    encoding, grid = seen[0]
    assert (encoding.num_heads, encoding.head_dim, encoding.theta) == (5, 12, 3)
    assert float(encoding.strength) == 0.5
    assert grid == relpos2d.Grid(3, 7, num_prefix_tokens=1)


def test_a_fault_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["check", "learned"]) == 1
    assert "Learned is absolute" in capsys.readouterr().err
    monkeypatch.setattr(cli, "create_encoding", lambda spec, *sizes: BothSigns(*sizes))
    assert main(["check", "rope_mixed"]) == 1
    assert "BothSigns on Grid(5, 7, num_prefix_tokens=1) fails at 'depends on" in capsys.readouterr().err


def test_plot_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "map.png"
    assert main(["plot", "table+rope_axial", str(picture), "--grid", "5x9"]) == 0
    assert str(picture) in capsys.readouterr().out
    with Image.open(picture) as image:
        assert image.format == "PNG"


def test_swap_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["swap", "vit_tiny_patch16_224", "rope_mixed", "--absolute", "fade", "theta=3", "strength=0.0"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "position encoding of 12 attentions (vit)" in out
    assert "'theta': 3" in out
    assert re.search(r"absolute +fade", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["lst"], "invalid choice: 'lst'"),
        (["list", "a=b"], "unrecognized arguments: a=b"),
        (["list", "--html"], "unrecognized arguments: --html"),
        (["check"], "required: NAME"),
        (["check", "rope_mxed"], "unknown encoding 'rope_mxed'; did you mean 'rope_mixed'"),
        (["check", "table+"], "unknown encoding ''"),
        (["check", "rope_axial", "thta=3"], "has no option 'thta'; did you mean 'theta'"),
        (["check", "rope_axial", "theta=ten"], "option theta='ten' of 'rope_axial' must be of the type float"),
        (["check", "rope_axial", "theta=True"], "option theta=True of 'rope_axial' must be of the type float"),
        (["check", "cpb", "hidden_dim=1.5"], "option hidden_dim=1.5 of 'cpb' must be of the type int"),
        (["check", "cpb", "pretrained_window_size=7,x"], "must be of the type int | tuple"),
        (["check", "cpb", "pretrained_window_size=7,7,7"], "for each of the 2 axes"),
        (["check", "table", "resize=3"], "option resize=3 of 'table' must be of the type str"),
        (["check", "table", "strength=2"], "strength=2.0 must be between 0"),
        (["check", "table", "resize"], "'resize' is no option; write key=value"),
        (["check", "table", "resize=timm", "resize=clamp"], "option 'resize' is given twice"),
        (["check", "table+rope_axial", "theta=3"], "members of the list, one by one"),
        (["check", "table", "--grid", "0x7"], "0x7 has 0 places"),
        (["check", "table", "--grid", "1x1"], "has 1 places, allowed are 2 to 2500"),
        (["check", "table", "--grid", "999x999"], "999x999 has 998001 places"),
        (["check", "table", "--grid", "5,7"], "'5,7' is no grid; write 5x7"),
        (["check", "table", "--grid", "-5x7"], "--grid"),
        (["check", "table", "--prefix", "-1"], "--prefix"),
        (["check", "table", "--heads", "0"], "'0' must be a whole number from 1 to 256"),
        (["check", "rope_axial", "--head-dim", "30"], "head_dim=30 must be a multiple of 4"),
        (["check", "alibi", "--grid", "2x3x5"], "has no meaning on 3 axes"),
        (["plot", "table"], "required: OUT.png"),
        (["plot", "table", "map.nothing"], "Format 'nothing' is not supported"),
        (["plot", "table", "no/such/folder/map.png"], "No such file or directory: 'no/such/folder/map.png'"),
        (["plot", "sincos", "map.png"], "SinCos is absolute"),
        (["swap", "vit_tiny_patch16_22", "table"], "unknown timm model 'vit_tiny_patch16_22'; did you mean 'vit_tiny"),
        (["swap", "resnet18", "table"], "ResNet has no attention that is known here; families that can be swapped"),
        (["swap", "vit_tiny_patch16_224", "tabel"], "did you mean 'table'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_told_in_a_line_with_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"relpos2d \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["check", "--help"]) == 0
    assert "--head-dim" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:'relpos2d.cli' found in sys.modules:RuntimeWarning")
def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["relpos2d", "check", "nope"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("relpos2d.cli", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("relpos2d: unknown encoding 'nope'")


@pytest.mark.long
def test_as_a_process() -> None:
    command = [sys.executable, "-m", "relpos2d.cli"]
    root = Path(__file__).parents[1]
    done = subprocess.run([*command, "check", "nope"], capture_output=True, text=True, check=False, cwd=root)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("relpos2d: unknown encoding 'nope'")
    assert len(done.stderr.splitlines()) == 1
