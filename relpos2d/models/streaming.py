"""Speech recognised while it is spoken: what a model with chunks must remember between two pushes of samples."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

# each of the two knows the other: the model makes streams, a stream goes through the model
from relpos2d.models import conformer
from relpos2d.models.context import Past, Sight
from relpos2d.models.log_mel import check_samples
from relpos2d.positions import Grid


class Stream:
    """Recordings heard piece by piece, all rows in the same pieces; made by `ConformerCTC.stream`.

    What comes out, put together, is what the model says of the whole recordings. A frame comes out once its chunk is complete.
    """

    def __init__(self, model: conformer.ConformerCTC) -> None:
        if model.context.chunk_size is None:
            raise ValueError("ConformerCTC: has no chunk_size, so a frame may see the future; a stream needs one")
        self._model, self._chunk_size, self._left = model, model.context.chunk_size, model.context.left
        self._pasts = [Past(self._left) for _ in model.blocks]
        self._is_finished = False
        self._num_samples = 0
        #: frames that went through the blocks
        self._num_frames = 0
        self._samples: Tensor | None = None
        #: what each of the two convolutions of the subsampling has not used up, and the frame in front of it
        self._features: list[Tensor | None] = [None, None]
        self._frames: Tensor | None = None
        self._check_open()

    @torch.no_grad()
    def push(self, samples: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch frames vocabulary"]:
        """Logarithms of probabilities (B, n, vocabulary) of the frames of chunks that these samples (B, t) complete.

        Raises:
            ValueError: the stream is finished, the model is in training mode, the samples have another number of rows than those
                before, or are refused by the model.
        """
        self._check_open()
        check_samples(
            "Stream", samples, samples.new_full(samples.shape[:1], samples.shape[-1:].numel(), dtype=torch.long)
        )
        log_mel = self._model.log_mel
        if self._samples is None:
            self._samples = F.pad(samples, (log_mel.num_zeros, 0))
        elif len(samples) != len(self._samples):
            raise ValueError(f"Stream: samples have {len(samples)} rows, those before had {len(self._samples)}")
        else:
            self._samples = torch.cat((self._samples, samples), dim=1)
        self._num_samples += samples.shape[1]
        return self._advance()

    @torch.no_grad()
    def finish(self) -> Float[Tensor, "batch frames vocabulary"]:
        """Logarithms of probabilities (B, n, vocabulary) of all frames that did not come out before.

        Raises:
            ValueError: the stream is finished already, or heard nothing, or the model is in training mode.
        """
        self._check_open()
        if self._samples is None:
            raise ValueError("Stream: heard nothing; push samples first")
        self._is_finished = True
        hop, n_fft = self._model.log_mel.hop_samples, self._model.log_mel.n_fft
        # one frame for each begun hop, with zeros behind the end
        left_over = self._num_samples % hop
        missing = (hop - left_over if left_over else 0) + (n_fft - hop) // 2
        self._samples = F.pad(self._samples, (0, missing))
        return self._advance()

    def _check_open(self) -> None:
        if self._is_finished:
            raise ValueError("Stream: is finished; model.stream() begins another one")
        if self._model.training:
            raise ValueError("ConformerCTC: a stream hears in evaluation; call eval() first")

    def _advance(self) -> Tensor:
        model = self._model
        x = self._halved(0, self._new_features()[:, None])
        x = model.subsampling.projected(self._halved(1, x))
        start = self._num_frames + (0 if self._frames is None else self._frames.shape[1])
        if x.shape[1]:
            x = model.placed(x, start)
        frames = x if self._frames is None else torch.cat((self._frames, x), dim=1)
        outputs = [frames.new_zeros(len(frames), 0, model.vocab_size)]
        while frames.shape[1] >= self._chunk_size or (self._is_finished and frames.shape[1]):
            outputs.append(self._chunk(frames[:, : self._chunk_size]))
            frames = frames[:, self._chunk_size :]
        self._frames = frames.clone()
        return torch.cat(outputs, dim=1)

    def _new_features(self) -> Tensor:
        """Features of the windows that are full."""
        log_mel = self._model.log_mel
        assert self._samples is not None
        num_frames = max(0, (self._samples.shape[1] - log_mel.n_fft) // log_mel.hop_samples + 1)
        if not num_frames:
            return self._samples.new_zeros(len(self._samples), 0, log_mel.num_mels, dtype=log_mel.filters.dtype)
        x = log_mel.normalized(log_mel.spectra(self._samples))
        self._samples = self._samples[:, num_frames * log_mel.hop_samples :].clone()
        return x

    def _halved(self, number: int, x: Tensor) -> Tensor:
        """Frames of every two of x and what was left over before; with the last one, what is still missing is silent."""
        subsampling = self._model.subsampling
        conv = (subsampling.conv1, subsampling.conv2)[number]
        x = x.to(subsampling.proj.weight.dtype)
        kept = self._features[number]
        x = F.pad(x, (0, 0, 1, 0)) if kept is None else torch.cat((kept, x), dim=2)
        if self._is_finished:
            x = F.pad(x, (0, 0, 0, (x.shape[2] - 1) % 2))
        used = (x.shape[2] - 1) // 2 * 2
        self._features[number] = x[:, :, used:].clone()
        if used:
            return F.conv2d(x[:, :, : used + 1], conv.weight, conv.bias, stride=2, padding=(0, 1)).relu_()
        return x.new_zeros(len(x), conv.out_channels, 0, -(-x.shape[3] // 2))

    def _chunk(self, x: Tensor) -> Tensor:
        model = self._model
        num_past = self._num_frames if self._left is None else min(self._left, self._num_frames)
        # offsets are all that most encodings know, and those between a chunk and its past are always the same
        first = self._num_frames if model.an_encoding.knows_query else 0
        size = x.shape[1]
        sight = Sight(Grid(size, origin=first), Grid(num_past + size, origin=first - num_past), None)
        logits, _ = model.encode(x, sight, None, pasts=self._pasts)
        self._num_frames += size
        return conformer.log_probs_of(logits)
