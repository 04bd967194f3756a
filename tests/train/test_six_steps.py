"""Short runs in each way of computing: taken up in the middle, they end the same. tests/gpu has them on a GPU.

In CI, test_resume.py does it in float32 with a run that is killed.
"""

from pathlib import Path

import pytest

from tests.train.six_steps import six_steps_twice
from tests.train.test_resume import assert_same

pytestmark = pytest.mark.usefixtures("undrawn")

WAYS = {
    "float32": [],
    "bf16": ["trainer.mixed_precision=bf16"],
    "fsdp2 on one process": ["trainer.parallel=fsdp2"],
    "in parts": ["trainer.accumulate=2"],
    "lamb": ["optimizer.name=lamb", "optimizer.layer_decay=0.7"],
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_straight_equals_taken_up(
    way: str, digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, taken_up = six_steps_twice(tmp_path, digits_csv, "trainer.device=cpu", *WAYS[way])
    assert "continues after step 3" in capsys.readouterr().out
    assert_same(straight, taken_up)
    assert straight["learner"]["num_updates"] == 6
    assert [line["strength"] for line in straight["history"]] == [0, 0.25, 0.5, 0.75, 1, 1]


def test_steps_left_out_are_counted_on(digits_csv: str, tmp_path: Path) -> None:
    """At a rate at which weights explode in the first step."""
    options = ["optimizer={name: sgd, lr: 1e38}", "schedule.warmup_steps=0", "trainer.device=cpu"]
    straight, taken_up = six_steps_twice(tmp_path, digits_csv, *options)
    assert (straight["learner"]["num_updates"], straight["learner"]["num_skipped"]) == (1, 5)
    assert taken_up["learner"] == straight["learner"]
