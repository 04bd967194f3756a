"""A Conformer (arXiv:2005.08100) that hears speech and writes it by CTC, with positions by any encoding of one axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from relpos2d.attention import attend
from relpos2d.backbones.host import position_parameters, split
from relpos2d.encoding import Encoding, Prepared
from relpos2d.encodings import create_encoding
from relpos2d.encodings.xlnet import XLNet
from relpos2d.models.blocks import check_choice
from relpos2d.models.context import Context, Past, Sight
from relpos2d.models.log_mel import LogMel, Normalization, check_samples
from relpos2d.models.streaming import Stream
from relpos2d.models.token_model import check_size
from relpos2d.positions import Grid

ConvNorm = Literal["layer", "batch"]


@dataclass(frozen=True, eq=False)
class CTCOutput:
    """What a model heard.

    Args:
        log_probs: (B, N, vocabulary), logarithms of probabilities per frame, at least float32; id 0 is the blank.
        num_frames: (B,), how many of the N frames are real.
        intermediate: the same as log_probs, after blocks in the middle; in training alone.
    """

    log_probs: Float[Tensor, "batch frames vocabulary"]
    num_frames: Int[Tensor, " batch"]
    intermediate: tuple[Float[Tensor, "batch frames vocabulary"], ...] = ()


class Subsampling(nn.Module):
    """Two convolutions of stride 2 over time and frequency, and a projection: a frame of every four and the three before them.

    Args:
        num_mels: bands of the features.
        channels: of the convolutions.
        embed_dim: of what comes out.
    """

    def __init__(self, num_mels: int, channels: int, embed_dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.proj = nn.Linear(channels * -(-num_mels // 4), embed_dim)

    def forward(
        self, features: Float[Tensor, "batch frames mels"], num_frames: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch new_frames channels"]:
        """Features, 0 where they are not real, to every fourth frame; a last group of less than four counts."""
        x = features.to(self.proj.weight.dtype)[:, None]
        for conv in (self.conv1, self.conv2):
            num_frames = -(-num_frames // 2)
            x = conv(x)
            # zeros behind the end, which the last frame sees next
            padding = torch.arange(x.shape[2], device=x.device)[:, None] >= num_frames[:, None, None, None]
            x = x.masked_fill_(padding, 0).relu_()
        return self.projected(x)

    def projected(self, x: Float[Tensor, "batch channels frames bands"]) -> Float[Tensor, "batch frames embed_dim"]:
        """Channels and bands of each frame together."""
        return self.proj(x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A norm and two linear layers, half of whose output is to be added."""

    def __init__(self, embed_dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, hidden)
        self.fc2 = nn.Linear(hidden, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "batch frames channels"]) -> Float[Tensor, "batch frames channels"]:
        return self.dropout(self.fc2(F.silu(self.fc1(self.norm(x)))))


class FrameAttention(nn.Module):
    """Attention of frames to one another as far as they see.

    Args:
        embed_dim: channels.
        num_heads: attention heads.
        encoding: of its own; None: the caller gives one in each forward pass.
        dropout: of the attention weights.
    """

    def __init__(self, embed_dim: int, num_heads: int, encoding: Encoding | None, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.encoding = encoding

    def forward(
        self,
        x: Float[Tensor, "batch frames channels"],
        sight: Sight,
        *,
        encoding: Encoding | Prepared | None = None,
        past: Past | None = None,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch frames channels"]:
        """x (B, N, C) to (B, N, C); `encoding` stands in for its own, keys and values of the `past` are seen too."""
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past is not None:
            k, v = past.seen(k, v)
        encoding = self.encoding if encoding is None else encoding
        assert encoding is not None
        out = attend(
            sight.queries_of(q),
            sight.keys_of(k),
            sight.keys_of(v),
            encoding,
            sight.queries,
            sight.keys,
            mask=sight.mask,
            dropout_p=self.dropout if self.training else 0.0,
            memory_limit=memory_limit,
            project=(self.q_proj, self.k_proj),
        )
        return self.out_proj(sight.joined(out, x.shape[1]).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A gate, a convolution of each channel over time, and a norm, which hear nothing of padding.

    Args:
        embed_dim: channels.
        kernel_size: frames that a channel sees.
        norm: "layer", over the channels of a frame; "batch", over the real frames of the batch.
        is_causal: all these frames are past ones and the frame itself.
    """

    def __init__(self, embed_dim: int, kernel_size: int, norm: ConvNorm, dropout: float, *, is_causal: bool) -> None:
        super().__init__()
        self.num_past = kernel_size - 1 if is_causal else (kernel_size - 1) // 2
        self.num_future = kernel_size - 1 - self.num_past
        self.norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, 2 * embed_dim)
        # without a bias, since a norm follows
        self.depthwise = nn.Conv1d(embed_dim, embed_dim, kernel_size, groups=embed_dim, bias=False)
        self.inner_norm = nn.LayerNorm(embed_dim) if norm == "layer" else nn.BatchNorm1d(embed_dim)
        self.fc2 = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch frames channels"],
        real: Bool[Tensor, "batch frames"] | None = None,
        *,
        past: Past | None = None,
    ) -> Float[Tensor, "batch frames channels"]:
        """x (B, N, C) to (B, N, C); `real` frames are heard, all if it is None."""
        x = F.glu(self.fc1(self.norm(x)), dim=-1)
        if real is not None:
            x = torch.where(real[..., None], x, 0)
        x = x.transpose(1, 2)
        x = F.pad(x, (self.num_past, self.num_future)) if past is None else past.heard(x, self.num_past)
        x = self._normalized(self.depthwise(x).transpose(1, 2), real)
        return self.dropout(self.fc2(F.silu(x)))

    def _normalized(self, x: Tensor, real: Tensor | None) -> Tensor:
        norm = self.inner_norm
        if not isinstance(norm, nn.BatchNorm1d):
            return norm(x)
        frames = x.flatten(0, 1) if real is None else x[real]
        if len(frames) > 1 or not self.training:
            frames = norm(frames)
        else:  # one frame has no variance
            frames = F.batch_norm(frames, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
        if real is None:
            return frames.view_as(x)
        return frames.new_zeros(x.shape).masked_scatter(real[..., None], frames)


class ConformerBlock(nn.Module):
    """Attention and convolution between two feed-forward layers that count half, each beside a residual path, and a norm."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        encoding: Encoding | None,
        *,
        ff_ratio: float = 4.0,
        kernel_size: int = 15,
        conv_norm: ConvNorm = "layer",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        hidden = max(1, round(ff_ratio * embed_dim))
        self.ff1 = FeedForward(embed_dim, hidden, dropout)
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = FrameAttention(embed_dim, num_heads, encoding, attention_dropout)
        self.dropout = nn.Dropout(dropout)
        self.conv = Convolution(embed_dim, kernel_size, conv_norm, dropout, is_causal=is_causal)
        self.ff2 = FeedForward(embed_dim, hidden, dropout)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(
        self,
        x: Float[Tensor, "batch frames channels"],
        sight: Sight,
        real: Bool[Tensor, "batch frames"] | None = None,
        *,
        encoding: Encoding | Prepared | None = None,
        past: Past | None = None,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch frames channels"]:
        """x (B, N, C) to (B, N, C).

        Args:
            sight: who sees whom.
            real: which frames are no padding; None: all.
            encoding: in place of the attention's own.
            past: what was heard before, in streaming.
            memory_limit: bytes that the attention may hold.
        """
        x = x + 0.5 * self.ff1(x)
        attended = self.attention(
            self.attention_norm(x), sight, encoding=encoding, past=past, memory_limit=memory_limit
        )
        x = x + self.dropout(attended)
        x = x + self.conv(x, real, past=past)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


class ConformerCTC(nn.Module):
    """Samples to log-mel features, to a frame for every four of them, through Conformer blocks, to probabilities of tokens.

    Without a context every frame sees all frames. With `left_context` and `right_context` a frame sees a window around itself;
    bounded on both sides, memory grows with the length of the recording and not with its square. With `chunk_size` a frame sees
    to the end of its chunk and `left_context` frames before it, convolutions see the past alone, and `stream` hears a recording
    while it is made. torch.compile takes the model; torch.export does not, since a full view looks at where padding is.

    Args:
        vocab_size: token ids run from 0, the blank, to vocab_size - 1.
        sample_rate: samples per second.
        encoding: a name, a mapping with a name, or a list of these; absolute members are added to the frames.
        max_length: frames, of those left after subsampling, that encodings with a size are made for; beyond it a table is read as
            on its edge.
        embed_dim: channels.
        depth: blocks.
        num_heads: attention heads.
        ff_ratio: hidden channels of the feed-forward layers, in embed_dim.
        kernel_size: frames that the convolutions of blocks see; odd, unless they see the past alone.
        conv_norm: "layer", or "batch" over the real frames of a batch, as in the paper.
        subsampling_channels: of the convolutions in front of the blocks.
        dropout: of frames and of what is added to the residual path. Hidden channels have none: on a CPU, drawing it takes longer
            than the layers themselves.
        attention_dropout: of the attention weights.
        num_mels, window, hop, normalize: see `LogMel`; streaming cannot know the whole recording, so "fixed" is needed.
        chunk_size: frames of a chunk.
        left_context: frames seen before the frame or its chunk; None: all.
        right_context: frames seen behind the frame; None: all.
        intermediate_layers: blocks, counted from 1, behind which training wants probabilities too (arXiv:2102.03216).
        self_conditioning: blocks behind these are told the probabilities (arXiv:2104.02724).
        num_time_masks, time_mask: how many stretches of each recording training hides, each shorter than so many features and
            all together than half the recording (arXiv:1904.08779); anywhere in the batch's length, so that short ones lose less.
        num_freq_masks, freq_mask: how many stretches of bands, each of fewer than so many.
        shared_encoding: one encoding for all blocks and not one each.
        checkpointing: less memory in training, for a second forward pass.

    Raises:
        ValueError: sizes that do not fit one another, options that say nothing, or what the encoding refuses.
    """

    def __init__(
        self,
        vocab_size: int,
        sample_rate: int,
        *,
        encoding: str | Mapping[str, Any] | Sequence[Any] = "none",
        max_length: int = 1024,
        embed_dim: int = 144,
        depth: int = 4,
        num_heads: int = 4,
        ff_ratio: float = 4.0,
        kernel_size: int = 15,
        conv_norm: ConvNorm = "layer",
        subsampling_channels: int = 64,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        num_mels: int = 80,
        window: float = 0.025,
        hop: float = 0.01,
        normalize: Normalization = "utterance",
        chunk_size: int | None = None,
        left_context: int | None = None,
        right_context: int | None = None,
        intermediate_layers: tuple[int, ...] = (),
        self_conditioning: bool = False,
        num_time_masks: int = 0,
        time_mask: int = 40,
        num_freq_masks: int = 0,
        freq_mask: int = 15,
        shared_encoding: bool = False,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        for name, size in (
            ("vocab_size", vocab_size),
            ("max_length", max_length),
            ("embed_dim", embed_dim),
            ("depth", depth),
            ("num_heads", num_heads),
            ("kernel_size", kernel_size),
            ("subsampling_channels", subsampling_channels),
            ("time_mask", time_mask),
            ("freq_mask", freq_mask),
        ):
            check_size("ConformerCTC", name, size)
        for name, count in (("num_time_masks", num_time_masks), ("num_freq_masks", num_freq_masks)):
            if count != 0:
                check_size("ConformerCTC", name, count)
        if vocab_size < 2:
            raise ValueError(f"ConformerCTC: vocab_size={vocab_size} must be at least 2, the blank and a token")
        if embed_dim % num_heads:
            raise ValueError(f"ConformerCTC: embed_dim={embed_dim} must be a multiple of num_heads={num_heads}")
        if not 0 < ff_ratio < float("inf"):
            raise ValueError(f"ConformerCTC: ff_ratio={ff_ratio} must be positive")
        for name, share in (("dropout", dropout), ("attention_dropout", attention_dropout)):
            if not 0.0 <= share < 1.0:
                raise ValueError(f"ConformerCTC: {name}={share} must be at least 0 and below 1")
        check_choice("ConformerCTC", "conv_norm", conv_norm, ConvNorm)
        if chunk_size is None and kernel_size % 2 == 0:
            raise ValueError(f"ConformerCTC: kernel_size={kernel_size} must be odd, to see as much past as future")
        for name, width, count in (("time_mask", time_mask, num_time_masks), ("freq_mask", freq_mask, num_freq_masks)):
            if count and width < 2:
                raise ValueError(f"ConformerCTC: {name}={width} must be at least 2, for what is hidden is shorter")
        if num_freq_masks and freq_mask > num_mels:
            raise ValueError(f"ConformerCTC: freq_mask={freq_mask} must be at most num_mels={num_mels}")
        try:
            self.context = Context(chunk_size, left_context, right_context)
        except ValueError as error:
            raise ValueError(f"ConformerCTC: {error}") from None
        if chunk_size is not None and normalize != "fixed":
            raise ValueError(
                f"ConformerCTC: normalize={normalize!r} needs the whole recording, and with chunk_size={chunk_size} the future "
                "is not known; normalize='fixed' is allowed"
            )
        self.vocab_size, self.embed_dim, self.max_length = vocab_size, embed_dim, max_length
        self.intermediate_layers = _checked_layers(intermediate_layers, depth)
        if self_conditioning and not self.intermediate_layers:
            raise ValueError(
                "ConformerCTC: self_conditioning needs intermediate_layers, whose probabilities it feeds back"
            )
        self.num_time_masks, self.time_mask = num_time_masks, time_mask
        self.num_freq_masks, self.freq_mask = num_freq_masks, freq_mask
        self.checkpointing = checkpointing

        self.log_mel = LogMel(sample_rate, num_mels=num_mels, window=window, hop=hop, normalize=normalize)
        self.subsampling = Subsampling(num_mels, subsampling_channels, embed_dim)
        self.dropout = nn.Dropout(dropout)
        absolute, relative = split(encoding, "ConformerCTC")

        def new_encoding(spec: Any) -> Encoding:
            return create_encoding(spec, num_heads, embed_dim // num_heads, Grid(max_length))

        #: the absolute members of the encoding; None without such members
        self.absolute = None if absolute is None else new_encoding(absolute)
        relative = "none" if relative is None else relative
        self.encoding = new_encoding(relative) if shared_encoding else None
        self.blocks = nn.ModuleList(
            ConformerBlock(
                embed_dim,
                num_heads,
                None if shared_encoding else new_encoding(relative),
                ff_ratio=ff_ratio,
                kernel_size=kernel_size,
                conv_norm=conv_norm,
                dropout=dropout,
                attention_dropout=attention_dropout,
                is_causal=chunk_size is not None,
            )
            for _ in range(depth)
        )
        self._check_encoding(encoding)
        self.head = nn.Linear(embed_dim, vocab_size)
        self.feedback = nn.Linear(vocab_size, embed_dim) if self_conditioning else None
        self.reset_parameters()
        self.register_load_state_dict_post_hook(_rebuild)

    @property
    def sample_rate(self) -> int:
        """Samples per second."""
        return self.log_mel.sample_rate

    @property
    def seconds_per_frame(self) -> float:
        """Seconds from one frame of the output to the next."""
        return 4 * self.log_mel.hop

    @property
    def an_encoding(self) -> Encoding:
        """The encoding of one of its attentions; all are of a kind."""
        encoding = self.encoding if self.encoding is not None else self.blocks[0].get_submodule("attention.encoding")
        assert isinstance(encoding, Encoding)
        return encoding

    def frame_time(self, index: int | float) -> float:
        """Second at which frame `index` of the output is centred."""
        return (4 * index + 0.5) * self.log_mel.hop

    def num_output_frames(self, num_samples: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Frames of the output for recordings of so many samples."""
        return -(-self.log_mel.num_frames(num_samples) // 4)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, with a variance of 1 / numbers that they read; also after to_empty()."""
        _reset(self)
        self.log_mel.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that must not decay: those of the encodings."""
        return position_parameters(self)

    def init_non_persistent_buffers(self) -> None:
        """Rebuild what is derived and not saved."""
        self.log_mel.init_non_persistent_buffers()
        for module in self.modules():
            if isinstance(module, Encoding):
                module.init_non_persistent_buffers()

    def forward(
        self,
        samples: Float[Tensor, "batch samples"],
        num_samples: Int[Tensor, " batch"],
        *,
        memory_limit: int | None = None,
    ) -> CTCOutput:
        """Probabilities of tokens, frame by frame.

        Args:
            samples: (B, T), between -1 and 1, at the model's sample rate; what stands behind the end of one does not matter.
            num_samples: (B,), from 1 to T.
            memory_limit: bytes that each attention may hold; None: as many as the fastest way takes.

        Raises:
            ValueError: shapes or dtypes that do not fit, a row with no samples or with one that is not finite, or a memory limit
                that no way keeps.
        """
        check_samples("ConformerCTC", samples, num_samples)
        features, num_features = self.log_mel.features(samples, num_samples)
        if self.training:
            features = self._masked(features, num_features)
        num_frames = -(-num_features // 4)
        x = self.subsampling(features, num_features)
        real = torch.arange(x.shape[1], device=x.device) < num_frames[:, None]
        sight = self.context.sight("ConformerCTC", self.an_encoding, num_frames, real)
        x = self.placed(x, 0)
        logits, intermediate = self.encode(x, sight, real, memory_limit=memory_limit)
        return CTCOutput(
            log_probs_of(logits), num_frames, tuple(map(log_probs_of, intermediate)) if self.training else ()
        )

    def placed(self, x: Float[Tensor, "batch frames channels"], start: int) -> Float[Tensor, "batch frames channels"]:
        """Frames, the first of which is number `start`, with what the absolute encoding adds to them."""
        return self.dropout(x if self.absolute is None else self.absolute.embed(x, Grid(x.shape[1], origin=start)))

    def encode(
        self,
        x: Float[Tensor, "batch frames channels"],
        sight: Sight,
        real: Bool[Tensor, "batch frames"] | None,
        *,
        pasts: Sequence[Past] | None = None,
        memory_limit: int | None = None,
    ) -> tuple[Float[Tensor, "batch frames vocabulary"], list[Float[Tensor, "batch frames vocabulary"]]]:
        """Frames through all blocks: logits, and those after blocks in the middle where somebody needs them."""
        encoding: Encoding | Prepared | None = self.encoding
        on_grids = isinstance(sight.queries, Grid) and isinstance(sight.keys, Grid)
        # what is prepared is held in full, whatever the limit
        if self.encoding is not None and on_grids and memory_limit is None:
            encoding = self.encoding.prepare(sight.queries, sight.keys)
        intermediate = []
        for number, block in enumerate(self.blocks, start=1):
            options: dict[str, Any] = {
                "encoding": encoding,
                "past": None if pasts is None else pasts[number - 1],
                "memory_limit": memory_limit,
            }
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(
                    block,
                    x,
                    sight,
                    real,
                    use_reentrant=False,
                    context_fn=lambda block=block: (nullcontext(), _counting_once(block)),
                    **options,
                )
            else:
                x = block(x, sight, real, **options)
            if number in self.intermediate_layers and (self.training or self.feedback is not None):
                intermediate.append(self.head(x))
                if self.feedback is not None:
                    x = x + self.feedback(intermediate[-1].softmax(dim=-1))
        return self.head(x), intermediate

    def stream(self) -> Stream:
        """Hear recordings while they are made: push samples, get the probabilities of the frames that are complete.

        Raises:
            ValueError: the model has no chunk_size, or is in training mode.
        """
        return Stream(self)

    def _masked(
        self, features: Float[Tensor, "batch frames mels"], num_features: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames mels"]:
        """Features with stretches of time and bands set to 0, their mean."""
        # what a recording says must stay to be heard, however short it is
        share = num_features // max(1, 2 * self.num_time_masks)
        times, bands = share.clamp(max=self.time_mask), torch.full_like(share, self.freq_mask)
        for _ in range(self.num_time_masks):
            features = features.masked_fill(_stretches(features.shape[1], times)[..., None], 0.0)
        for _ in range(self.num_freq_masks):
            features = features.masked_fill(_stretches(features.shape[2], bands)[:, None], 0.0)
        return features

    def _check_encoding(self, spec: Any) -> None:
        """Refuse what cannot learn, or has no meaning, here."""
        encoding = self.an_encoding
        for part in encoding.modules():
            if isinstance(part, XLNet) and part.seg_embed is not None:
                raise ValueError(
                    f"ConformerCTC: encoding={spec!r} has a term for token types, which recordings do not have, so it would "
                    "learn nothing; xlnet is allowed with token_types=False"
                )
        if encoding.knows_length and not self.context.is_full:
            raise ValueError(
                f"ConformerCTC: encoding={spec!r} depends on the length of the whole recording, which a frame of limited context "
                "does not know; allowed are encodings of offsets alone, or no chunk_size, left_context and right_context"
            )


def log_probs_of(logits: Float[Tensor, "batch frames vocabulary"]) -> Float[Tensor, "batch frames vocabulary"]:
    """Logarithms of probabilities, at least in float32."""
    return F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _stretches(size: int, widths: Int[Tensor, " batch"]) -> Bool[Tensor, "batch places"]:
    """For each width, a stretch of less than it, drawn anywhere among so many places."""
    width = torch.rand(len(widths), device=widths.device) * widths
    start = (torch.rand(len(widths), device=widths.device) * (size - width)).long()[:, None]
    places = torch.arange(size, device=widths.device)
    return (places >= start) & (places < start + width.long()[:, None])


def _checked_layers(layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise ValueError(f"ConformerCTC: intermediate_layers={layers!r} must be blocks, such as (1,)")
    for layer in layers:
        check_size("ConformerCTC", "intermediate_layers", layer)
    if len(set(layers)) < len(layers) or any(layer >= depth for layer in layers):
        raise ValueError(
            f"ConformerCTC: intermediate_layers={layers} must be different blocks, from 1 to {depth - 1}; behind the last, "
            f"block {depth}, stands the head itself"
        )
    return layers


@contextmanager
def _counting_once(block: nn.Module) -> Iterator[None]:
    """What a block computes again is no second batch for the statistics of its norm."""
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm1d)]
    before = [(norm.momentum, norm.get_buffer("num_batches_tracked").clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.get_buffer("num_batches_tracked").copy_(count)


def _reset(module: nn.Module) -> None:
    for child in module.children():
        if isinstance(child, Encoding | nn.LayerNorm | nn.BatchNorm1d):
            child.reset_parameters()
        elif isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.normal_(child.weight, std=child.weight[0].numel() ** -0.5)
            if child.bias is not None:
                nn.init.zeros_(child.bias)
        else:
            _reset(child)


def _rebuild(model: nn.Module, incompatible_keys: object) -> None:
    assert isinstance(model, ConformerCTC)
    model.init_non_persistent_buffers()
