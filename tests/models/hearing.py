"""Tiny models that hear, with every parameter redrawn, and recordings of noise with anything behind their ends."""

from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.models import ConformerCTC
from tests.models.builders import NAMES, SUMS

VOCAB_SIZE = 7
RATE = 1600
#: a frame of features is 16 samples, one of the output 64; a window is 40 samples, and its spectrum is taken over 64
SMALL: dict[str, Any] = {
    "embed_dim": 12, "depth": 2, "num_heads": 3, "ff_ratio": 1.5, "kernel_size": 5, "subsampling_channels": 3,
    "num_mels": 9, "freq_mask": 3, "max_length": 6, "dropout": 0.0,
}  # fmt: skip
#: FIRE beyond its L, where it knows the place of the query, among them
SPECS: list[Any] = [{"name": "fire", "init_length": 3.0} if name == "fire" else name for name in NAMES] + SUMS


def build(encoding: Any = "none", *, seed: int = 1, **options: Any) -> ConformerCTC:
    """A tiny model in float64 and eval mode, every parameter and every saved buffer of a norm redrawn from a seed."""
    if "chunk_size" in options:
        options = {"normalize": "fixed", **options}
    state = torch.get_rng_state()  # what a test draws must not depend on the model that it builds
    model = ConformerCTC(VOCAB_SIZE, RATE, encoding=encoding, **{**SMALL, **options}).double().eval()
    draw(model, seed)
    torch.set_rng_state(state)
    return model


def draw(model: ConformerCTC, seed: int) -> None:
    """Redraw; the same for the same seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("L_multiplier"):
                parameter.normal_(std=0.3)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
        if model.log_mel.mean is not None:
            model.log_mel.mean.normal_(-3.0)
            model.log_mel.std.uniform_(1.0, 3.0)


def noise(*lengths: int) -> list[Tensor]:
    """A recording (t,) of each length."""
    return [torch.randn(length, dtype=torch.float64) * 0.2 for length in lengths]


def batch(clips: list[Tensor], *, longer: int = 0) -> tuple[Tensor, Tensor]:
    """Samples (B, T) and their numbers; behind the ends stand NaN and infinity, `longer` of them behind the longest."""
    num_samples = torch.tensor([len(clip) for clip in clips])
    samples = torch.full((len(clips), int(num_samples.max()) + longer), float("nan"), dtype=torch.float64)
    samples[:, -1] = float("inf")
    for row, clip in zip(samples, clips, strict=True):
        row[: len(clip)] = clip
    return samples, num_samples
