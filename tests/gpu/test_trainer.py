"""Short training runs on the device: mixed precision and its loss scaling, compiling, FSDP2, and going on from a checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.train.six_steps import six_steps_twice

pytestmark = pytest.mark.gpu

WAYS = {
    "float32": [],
    "bf16": ["trainer.mixed_precision=bf16"],
    "fp16": ["trainer.mixed_precision=fp16"],
    "compile": ["trainer.compile=true"],
    "compile in bf16": ["trainer.compile=true", "trainer.mixed_precision=bf16"],
    "fsdp2 on one process": ["trainer.parallel=fsdp2", "trainer.mixed_precision=bf16"],
}


@pytest.mark.parametrize("way", WAYS)
def test_straight_equals_taken_up(
    way: str, digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums on a GPU may come in any order, and Adam takes whole steps where a gradient is noise around 0; so weights are compared
    within six such steps, gradients by their moving average as a whole: without what was saved of it, half would be missing.
    """
    straight, taken_up = six_steps_twice(tmp_path, digits_csv, *WAYS[way])
    printed = capsys.readouterr().out
    assert "parameters on cuda" in printed
    assert "continues after step 3" in printed
    for kind, weights in straight["weights"].items():
        for name, weight in weights.items():
            assert weight.isfinite().all()
            torch.testing.assert_close(taken_up["weights"][kind][name], weight, rtol=0, atol=6e-3, msg=f"{kind} {name}")
    first, second = (
        torch.cat([state["exp_avg"].flatten() for state in outcome["optimizer"]["state"].values()])
        for outcome in (straight, taken_up)
    )
    assert (first - second).norm() <= 0.1 * first.norm()
    for line, again in zip(straight["history"], taken_up["history"], strict=True):
        assert again["loss"] == pytest.approx(line["loss"], rel=1e-2)
        assert again["lr"] == line["lr"]
        assert again["strength"] == line["strength"]
    assert taken_up["learner"] == straight["learner"]
    updates = straight["learner"]["num_updates"]
    assert updates + straight["learner"]["num_skipped"] == 6
    scaler = straight["learner"]["scaler"]
    assert (scaler is not None) == (way == "fp16")
    if scaler is not None:
        assert updates > 0
        assert scaler["scale"] == 65536.0 / 2 ** straight["learner"]["num_skipped"]


def test_fp16_counts_an_overflow_that_its_scaling_met(digits_csv: str, tmp_path: Path) -> None:
    """A rate at which weights explode: the steps are left out, the scale is halved, and both are there after going on."""
    options = [
        "trainer.mixed_precision=fp16",
        "optimizer={name: sgd, lr: 1e6}",
        "schedule.warmup_steps=0",
        "trainer.clip_grad_norm=null",
    ]
    straight, taken_up = six_steps_twice(tmp_path, digits_csv, *options)
    assert straight["learner"]["num_skipped"] > 0
    assert taken_up["learner"] == straight["learner"]
    assert straight["learner"]["scaler"]["scale"] < 65536.0
