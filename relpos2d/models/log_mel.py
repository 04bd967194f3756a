"""Log-mel features of recordings, the same for a clip alone and in a padded batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from relpos2d.eager import runs_eagerly
from relpos2d.models.blocks import check_choice
from relpos2d.models.token_model import check_size

Normalization = Literal["utterance", "fixed"]
#: power of samples between -1 and 1 that counts as silence, about that of the rounding of 16 bits
SILENCE = 1e-6
#: least variance that normalisation divides by
LEAST_VARIANCE = 1e-5


class LogMel(nn.Module):
    """The logarithm of the power in bands of the mel scale, normalised per band.

    Frame f is centred at (f + 0.5) * hop seconds. Around a clip there are zeros, never its own reflection, so that a frame does
    not depend on how much padding comes behind.

    Args:
        sample_rate: samples per second.
        num_mels: bands.
        window: seconds that a frame sees; its spectrum is taken over the next power of 2 of samples.
        hop: seconds from frame to frame.
        normalize: "utterance", each band to mean 0 and variance 1 over the frames of a clip; or "fixed", by `mean` and `std`,
            which are saved, are 0 and 1 at first, and are set by `fit`.

    Raises:
        ValueError: window or hop are no whole even number of samples, or a band holds no frequency of the spectrum.
    """

    filters: Tensor
    taper: Tensor
    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        sample_rate: int,
        *,
        num_mels: int = 80,
        window: float = 0.025,
        hop: float = 0.01,
        normalize: Normalization = "utterance",
    ) -> None:
        super().__init__()
        check_size("LogMel", "sample_rate", sample_rate)
        check_size("LogMel", "num_mels", num_mels)
        check_choice("LogMel", "normalize", normalize, Normalization)
        self.sample_rate, self.num_mels, self.normalize = sample_rate, num_mels, normalize
        self.window_samples = _samples("window", window, sample_rate)
        self.hop_samples = _samples("hop", hop, sample_rate)
        if self.hop_samples > self.window_samples:
            raise ValueError(f"LogMel: hop={hop} must be at most window={window}, or samples are never heard")
        self.n_fft = 1 << (self.window_samples - 1).bit_length()
        #: zeros in front of a clip, which put the middle of the first frame half a hop behind its start
        self.num_zeros = (self.n_fft - self.hop_samples) // 2
        self._check_bands()
        num_frequencies = self.n_fft // 2 + 1
        self.register_buffer("taper", torch.empty(self.window_samples), persistent=False)
        self.register_buffer("filters", torch.empty(num_frequencies, num_mels), persistent=False)
        is_fixed = normalize == "fixed"
        self.register_buffer("mean", torch.empty(num_mels) if is_fixed else None)
        self.register_buffer("std", torch.empty(num_mels) if is_fixed else None)
        self.reset_parameters()

    @property
    def hop(self) -> float:
        """Seconds from frame to frame."""
        return self.hop_samples / self.sample_rate

    def reset_parameters(self) -> None:
        """Forget what `fit` found, and rebuild what is derived; also after to_empty()."""
        if self.mean is not None and self.std is not None:
            nn.init.zeros_(self.mean)
            nn.init.ones_(self.std)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Rebuild the window and the bands, which are not saved."""
        if not self.filters.is_meta:
            with torch.no_grad():
                self.filters.copy_(_filters(self.n_fft, self.num_mels, self.sample_rate))
                self.taper.copy_(torch.hann_window(self.window_samples, device="cpu"))

    def num_frames(self, num_samples: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Frames of clips of so many samples."""
        return (-(-num_samples.long() // self.hop_samples)).clamp(min=1)

    def forward(
        self, samples: Float[Tensor, "batch samples"], num_samples: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch frames mels"], Int[Tensor, " batch"]]:
        """Features (B, F, num_mels), 0 behind the end of a clip, and the number of frames (B,), one for each begun hop.

        Args:
            samples: (B, T), between -1 and 1; what stands behind the end of a clip does not matter.
            num_samples: (B,), from 1 to T.

        Raises:
            ValueError: shapes or dtypes that do not fit, or a row with no samples or with one that is not finite.
        """
        check_samples("LogMel", samples, num_samples)
        return self.features(samples, num_samples)

    def features(
        self, samples: Float[Tensor, "batch samples"], num_samples: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch frames mels"], Int[Tensor, " batch"]]:
        """`forward` of what has been checked."""
        x = self.spectra(self.padded(hide(samples, num_samples)))
        num_frames = self.num_frames(num_samples)
        real = torch.arange(x.shape[1], device=x.device) < num_frames[:, None]
        return self.normalized(x, real), num_frames

    def padded(self, samples: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch all_samples"]:
        """Samples between zeros, with room for a frame of each begun hop."""
        unfilled = -samples.shape[1] % self.hop_samples
        return F.pad(samples, (self.num_zeros, unfilled + self.n_fft - self.hop_samples - self.num_zeros))

    def spectra(self, samples: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch frames mels"]:
        """Log power, not normalised, of the frames that fit into samples (B, hop * (F - 1) + n_fft)."""
        dtype = torch.promote_types(torch.promote_types(samples.dtype, self.filters.dtype), torch.float32)
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = torch.stft(
                samples.to(dtype),
                self.n_fft,
                self.hop_samples,
                self.window_samples,
                self.taper.to(dtype),
                center=False,
                return_complex=True,
            )
            # not abs(), which has no gradient where there is silence
            power = torch.view_as_real(spectrum).square().sum(-1)
            return torch.log(power.transpose(1, 2) @ self.filters.to(dtype) + SILENCE)

    def normalized(
        self, x: Float[Tensor, "batch frames mels"], real: Bool[Tensor, "batch frames"] | None = None
    ) -> Float[Tensor, "batch frames mels"]:
        """Spectra (B, F, num_mels), normalised; 0 where they are not real."""
        if self.mean is not None and self.std is not None:
            x = (x - self.mean.to(x.dtype)) / self.std.to(x.dtype)
        else:
            seen = torch.ones_like(x[..., :1], dtype=torch.bool) if real is None else real[..., None]
            count = seen.sum(dim=1, keepdim=True)
            x = x - torch.where(seen, x, 0).sum(dim=1, keepdim=True) / count
            variance = torch.where(seen, x, 0).square().sum(dim=1, keepdim=True) / count
            x = x * (variance + LEAST_VARIANCE).rsqrt()
        return x if real is None else torch.where(real[..., None], x, 0)

    @torch.no_grad()
    def fit(self, clips: Iterable[Float[Tensor, " samples"]]) -> None:
        """Set `mean` and `std` to those of all frames of these clips (t,).

        Raises:
            ValueError: the normalisation is not "fixed", there is no clip, or one that `forward` refuses.
        """
        if self.mean is None or self.std is None:
            raise ValueError(f"LogMel: normalize={self.normalize!r} has nothing to fit, only 'fixed' has")
        count = 0
        total = torch.zeros(2, self.num_mels, dtype=torch.float64)
        for number, clip in enumerate(clips):
            if clip.ndim != 1:
                raise ValueError(f"LogMel: clip {number} has shape {tuple(clip.shape)}, allowed is (t,)")
            samples = clip[None].to(self.filters.device)
            num_samples = torch.tensor([len(clip)], device=samples.device)
            check_samples(f"LogMel: clip {number}", samples, num_samples)
            x = self.spectra(self.padded(samples))[0].double().cpu()
            total += torch.stack((x.sum(dim=0), x.square().sum(dim=0)))
            count += len(x)
        if not count:
            raise ValueError("LogMel: needs at least one clip to fit")
        mean, square = total / count
        self.mean.copy_(mean)
        self.std.copy_(((square - mean.square()).clamp(min=0) + LEAST_VARIANCE).sqrt())

    def extra_repr(self) -> str:
        return (
            f"sample_rate={self.sample_rate}, num_mels={self.num_mels}, window_samples={self.window_samples}, "
            f"hop_samples={self.hop_samples}, n_fft={self.n_fft}, normalize={self.normalize!r}"
        )

    def _check_bands(self) -> None:
        """Refuse more bands than the spectrum has room for."""

        def has_empty(num_mels: int) -> bool:
            return not bool((_filters(self.n_fft, num_mels, self.sample_rate) > 0).any(dim=0).all())

        if has_empty(self.num_mels):
            most = next((m for m in range(self.num_mels - 1, 0, -1) if not has_empty(m)), 0)
            raise ValueError(
                f"LogMel: num_mels={self.num_mels} is too many at {self.sample_rate} samples per second with a window of "
                f"{self.window_samples} samples, some would hold no frequency; allowed are up to {most}, or a longer window"
            )


def check_samples(who: str, samples: Tensor, num_samples: Tensor) -> None:
    """Refuse what are no recordings and their lengths, `who` in front."""
    if samples.ndim != 2 or not samples.is_floating_point():
        raise ValueError(
            f"{who}: samples are {samples.dtype} of shape {tuple(samples.shape)}, allowed are floating point numbers, "
            "between -1 and 1, of shape (B, T)"
        )
    if not samples.numel():
        raise ValueError(f"{who}: samples have shape {tuple(samples.shape)}; an empty recording has nothing to hear")
    if num_samples.shape != samples.shape[:1] or num_samples.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{who}: num_samples is {num_samples.dtype} of shape {tuple(num_samples.shape)}, allowed is int64 of shape "
            f"({samples.shape[0]},)"
        )
    if not runs_eagerly() or samples.is_meta:
        return
    # one look, since on other devices each waits for all that was asked for before
    finite = torch.isfinite(hide(samples, num_samples)).all(dim=1)
    fewest, most, all_finite = torch.stack(
        (num_samples.amin(), num_samples.amax(), finite.all().to(num_samples))
    ).tolist()
    if fewest < 1 or most > samples.shape[1]:
        row = int(num_samples.argmin() if fewest < 1 else num_samples.argmax())
        raise ValueError(
            f"{who}: row {row} has num_samples={fewest if fewest < 1 else most}, allowed are 1 to {samples.shape[1]}"
        )
    if not all_finite:
        raise ValueError(f"{who}: row {int(finite.long().argmin())} has a sample that is not finite")


def hide(samples: Float[Tensor, "batch samples"], num_samples: Int[Tensor, " batch"]) -> Float[Tensor, "batch samples"]:
    """Samples with 0 behind the end of each clip."""
    return torch.where(torch.arange(samples.shape[1], device=samples.device) < num_samples[:, None], samples, 0)


def _samples(name: str, seconds: float, sample_rate: int) -> int:
    """Seconds in samples."""
    exact = seconds * sample_rate
    count = round(exact)
    if not seconds > 0 or abs(exact - count) > 1e-6 * max(count, 1) or count < 2 or count % 2:
        raise ValueError(
            f"LogMel: {name}={seconds} seconds are {exact:g} samples at {sample_rate} per second, which must be a whole even "
            "number; resample the recordings, or change it"
        )
    return count


def _filters(n_fft: int, num_mels: int, sample_rate: int) -> Float[Tensor, "frequencies mels"]:
    """How much of each frequency each band holds."""
    try:
        from torchaudio.functional import melscale_fbanks
    except ImportError as error:
        raise ImportError('LogMel: needs torchaudio; pip install "relpos2d[speech]"') from error
    with warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("ignore")  # empty bands are refused in our own words
        return melscale_fbanks(n_fft // 2 + 1, 0.0, sample_rate / 2, num_mels, sample_rate)
