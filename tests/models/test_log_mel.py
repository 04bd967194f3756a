"""Log-mel features against a spectrum taken sample by sample, alone and in a batch, and what is refused."""

import ast
import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import relpos2d.models
from relpos2d.models.log_mel import SILENCE, LogMel
from tests.models.hearing import RATE, batch, noise
from tests.refusals import refuses
from tests.tolerances import assert_close


def front_end(**options: Any) -> LogMel:
    return LogMel(RATE, **{"num_mels": 9, **options}).double()


def mel(frequency: float) -> float:
    return 2595 * math.log10(1 + frequency / 700)


def power_by_hand(clip: Tensor, frame: int, num_mels: int) -> list[float]:
    """A frame of 40 samples around (frame + 0.5) * 16, at 64 frequencies, in bands between points evenly spaced in mel."""
    first = frame * 16 + 8 - 20
    heard = [float(clip[i]) if 0 <= i < len(clip) else 0.0 for i in range(first, first + 40)]
    tapered = torch.tensor([x * 0.5 * (1 - math.cos(2 * math.pi * i / 40)) for i, x in enumerate(heard)])
    powers = []
    for k in range(33):
        angles = 2 * math.pi * k * torch.arange(40, dtype=torch.float64) / 64
        powers.append(float((tapered.double() * angles.cos()).sum() ** 2 + (tapered * angles.sin()).sum() ** 2))
    points = [700 * (10 ** (i / (num_mels + 1) * mel(RATE / 2) / 2595) - 1) for i in range(num_mels + 2)]
    bands = []
    for low, middle, high in zip(points, points[1:], points[2:], strict=False):
        weights = [max(0.0, min((f - low) / (middle - low), (high - f) / (high - middle))) for f in range(0, 801, 25)]
        bands.append(sum(w * p for w, p in zip(weights, powers, strict=True)))
    return bands


def test_frames_by_hand() -> None:
    """Every frame, the first and the last among them, sees zeros beyond the ends and is centred at (f + 0.5) hops."""
    log_mel, (clip,) = front_end(normalize="fixed"), noise(75)
    features, num_frames = log_mel(clip[None], torch.tensor([75]))
    assert num_frames.tolist() == [5]
    expected = torch.tensor([power_by_hand(clip, f, 9) for f in range(5)])
    # the bands of torchaudio are made in float32
    assert_close(features[0], torch.log(expected + SILENCE), torch.float32)


@pytest.mark.parametrize("normalize", ["utterance", "fixed"])
def test_a_batch_gives_what_each_clip_gives_alone(normalize: Any) -> None:
    """Case G8: what stands behind an end, also NaN, is in no frame and in no statistics."""
    log_mel, clips = front_end(normalize=normalize), noise(1, 16, 17, 200, 131)
    features, num_frames = log_mel(*batch(clips, longer=50))
    assert num_frames.tolist() == [1, 1, 2, 13, 9]
    assert features.shape == (5, 16, 9)
    for row, frames, clip in zip(features, num_frames, clips, strict=True):
        alone, _ = log_mel(clip[None], torch.tensor([len(clip)]))
        assert_close(row[:frames], alone[0])
        assert not row[frames:].any()


def test_g8_statistics_leave_padding_out() -> None:
    features, num_frames = front_end()(*batch(noise(900, 350), longer=400))
    for row, frames in zip(features, num_frames, strict=True):
        assert_close(row[:frames].mean(dim=0), torch.zeros(9, dtype=torch.float64))
        variances = row[:frames].var(dim=0, correction=0)
        assert (variances < 1).all(), "a little less, since that of silence is 0"
        assert (variances > 1 - 1e-4).all()


@pytest.mark.parametrize("normalize", ["utterance", "fixed"])
def test_silence_is_finite_and_so_are_its_gradients(normalize: Any) -> None:
    samples = torch.zeros(2, 100, requires_grad=True)
    features, _ = LogMel(RATE, num_mels=9, normalize=normalize)(samples, torch.tensor([100, 30]))
    features.sin().sum().backward()
    assert features.isfinite().all()
    assert samples.grad.isfinite().all()


def test_no_gradient_for_what_is_not_heard() -> None:
    samples, num_samples = batch(noise(90, 40))
    samples.requires_grad_()
    front_end()(samples, num_samples)[0].sin().sum().backward()
    assert samples.grad[0].all()
    assert samples.grad[1, :40].all()
    assert not samples.grad[1, 40:].any()


@pytest.mark.parametrize(("rate", "n_fft", "hop"), [(8000, 256, 80), (16000, 512, 160)])
def test_a_tone_is_heard_in_its_band_at_its_time(rate: int, n_fft: int, hop: int) -> None:
    log_mel = LogMel(rate, normalize="fixed")
    assert (log_mel.n_fft, log_mel.hop_samples, log_mel.hop) == (n_fft, hop, 0.01)
    time = torch.arange(rate) / rate
    tone = torch.where((time > 0.3) & (time < 0.4), torch.sin(2 * math.pi * 1000 * time), 0)
    features, num_frames = log_mel(tone[None], torch.tensor([rate]))
    assert num_frames.tolist() == [100]
    band = round(81 * mel(1000) / mel(rate / 2)) - 1
    assert set(features[0, 31:39].argmax(dim=1).tolist()) == {band}
    loud = features[0, :, band] > features[0, :, band].max() - 1
    assert loud.nonzero().flatten().tolist() == list(range(30, 40))


def test_float32_under_autocast_and_for_half_precision() -> None:
    log_mel, (clip,) = LogMel(RATE, num_mels=9), noise(200)
    num_samples = torch.tensor([200])
    expected, _ = log_mel(clip[None].float(), num_samples)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = log_mel(clip[None].float(), num_samples)
    assert torch.equal(found, expected)
    features, num_frames = log_mel(clip[None].half(), num_samples.int())
    assert (features.dtype, num_frames.dtype) == (torch.float32, torch.int64)


def test_fit() -> None:
    """Afterwards all frames of the clips together have mean 0 and variance 1; what was found is saved."""
    log_mel, clips = front_end(normalize="fixed"), noise(1, 300, 77)
    spectra = torch.cat([log_mel(clip[None], torch.tensor([len(clip)]))[0][0] for clip in clips])
    log_mel.fit(iter(clips))
    assert_close(log_mel.mean, spectra.mean(dim=0))
    assert_close(log_mel.std, spectra.std(dim=0, correction=0), torch.float32)
    again = front_end(normalize="fixed")
    again.load_state_dict(log_mel.state_dict())
    assert set(log_mel.state_dict()) == {"mean", "std"}
    inputs = batch(clips)
    features, num_frames = again(*inputs)
    assert torch.equal(features, log_mel(*inputs)[0])
    assert_close(features[1, : num_frames[1]], (spectra[1:20] - log_mel.mean) / log_mel.std)
    again.reset_parameters()
    assert not again.mean.any()
    assert (again.std == 1).all()


def test_built_without_memory(nan_memory: None) -> None:
    with torch.device("meta"):
        empty = LogMel(RATE, num_mels=9, normalize="fixed")
    assert empty.mean.is_meta
    filled = empty.to_empty(device="cpu")
    filled.reset_parameters()
    (clip,) = noise(120)
    inputs = clip[None].float(), torch.tensor([120])
    assert torch.equal(filled(*inputs)[0], LogMel(RATE, num_mels=9, normalize="fixed")(*inputs)[0])
    assert torch.equal(copy.deepcopy(filled)(*inputs)[0], filled(*inputs)[0])


@pytest.mark.parametrize(
    ("rate", "options", "text"),
    [
        (0, {}, "sample_rate=0 must be a whole number of at least 1"),
        (8000, {"num_mels": 0}, "num_mels=0 must be a whole number"),
        (8000, {"num_mels": 100}, "num_mels=100 is too many at 8000 samples per second.*up to 86, or a longer window"),
        (11025, {}, "window=0.025 seconds are 275.625 samples at 11025 per second, which must be a whole even number"),
        (8000, {"hop": 0.010125}, "hop=0.010125 seconds are 81 samples"),
        (8000, {"hop": -0.01}, "hop=-0.01 seconds are -80 samples"),
        (8000, {"hop": 0.03}, "hop=0.03 must be at most window=0.025"),
        (8000, {"normalize": "fix"}, "normalize='fix' must be one of utterance, fixed; did you mean 'fixed'"),
    ],
)
def test_refuses_what_makes_no_features(rate: int, options: dict[str, Any], text: str) -> None:
    with refuses(f"LogMel: {text}"):
        LogMel(rate, **options)


def test_refuses_what_is_no_recording() -> None:
    log_mel, samples, number = front_end(), torch.zeros(2, 50), torch.tensor([50, 3])
    broken = samples.clone()
    broken[1, 2] = float("nan")
    for given, num_samples, text in (
        (samples[0], number, r"samples are torch.float32 of shape \(50,\), allowed are floating point"),
        (samples.short(), number, "samples are torch.int16"),
        (samples[:, :0], number, ".*an empty recording has nothing to hear"),
        (samples, number[:1], r"num_samples is torch.int64 of shape \(1,\), allowed is int64 of shape \(2,\)"),
        (samples, number.double(), "num_samples is torch.float64"),
        (samples, number - 3, "row 1 has num_samples=0, allowed are 1 to 50"),
        (samples, number + 1, "row 0 has num_samples=51, allowed are 1 to 50"),
        (broken, number, "row 1 has a sample that is not finite"),
    ):
        with refuses(f"LogMel: {text}"):
            log_mel(given, num_samples)


def test_refuses_what_cannot_be_fitted() -> None:
    for log_mel, clips, text in (
        (front_end(), noise(50), "normalize='utterance' has nothing to fit"),
        (front_end(normalize="fixed"), [], "needs at least one clip"),
        (front_end(normalize="fixed"), [noise(50)[0][None]], r"clip 0 has shape \(1, 50\)"),
        (front_end(normalize="fixed"), [*noise(50), torch.full((9,), torch.nan)], "clip 1: row 0 has a sample that is"),
    ):
        with refuses(f"LogMel: {text}"):
            log_mel.fit(clips)


def test_who_has_no_torchaudio_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported where it is needed, and nowhere else."""
    for path in Path(relpos2d.models.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            assert "torchaudio" not in ast.unparse(node) or not isinstance(node, ast.Import | ast.ImportFrom), path
    monkeypatch.setitem(sys.modules, "torchaudio.functional", None)
    with pytest.raises(ImportError, match=r'pip install "relpos2d\[speech\]"'):
        front_end()
