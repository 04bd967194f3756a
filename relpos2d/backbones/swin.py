"""timm's Swin Transformer (arXiv:2103.14030), and what it shares with Swin V2: windows, shifts and padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed, to_2tuple
from timm.models import FeatureDictNet, checkpoint
from timm.models.swin_transformer import (
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    WindowAttention,
    window_partition,
)
from torch import Tensor, nn

from relpos2d.attention import attend
from relpos2d.backbones.host import (
    Host,
    HostModel,
    Spec,
    exchange_class,
    felt,
    grid_of_native,
    make,
    native_source,
    split,
    take_over,
)
from relpos2d.backbones.report import SwapReport
from relpos2d.encoding import Encoding
from relpos2d.positions import Grid


class WindowHost(Host):
    """What a swapped window attention of either version does: its window is a grid, and its encoding follows it."""

    encoding: Encoding

    # timm's
    window_size: tuple[int, int]
    attn_drop: nn.Dropout
    proj: nn.Linear
    proj_drop: nn.Dropout

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """The window is now this large; the encoding decides how it is read there."""
        self.window_size = to_2tuple(window_size)
        self.window_area = self.window_size[0] * self.window_size[1]
        self.encoding.set_window_size(self.window_size)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention inside windows (B * windows, heads, tokens, head_dim); mask (windows, tokens, tokens), as each image has it."""
        mask = None if mask is None else mask.unsqueeze(1)
        dropout_p = self.attn_drop.p if self.training else 0.0
        positions = Grid(*self.window_size)
        out = attend(q, k, v, self.encoding, positions, mask=mask, dropout_p=dropout_p, scale=scale)
        out = out.transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(out))


class RelPosWindowAttention(WindowHost, WindowAttention):
    """timm's WindowAttention with any encoding in place of its table."""

    native_encoding = "table"
    native_parameters = ("relative_position_bias_table",)
    derived = ("relative_position_index",)

    def reset_parameters(self) -> None:
        """Nothing to draw or build: the table is the encoding's, and there is no index."""

    def _init_buffers(self) -> None:
        """As reset_parameters."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self._attend(q, k, v, mask, self.scale)


class BlockHost(Host):
    """What a swapped Swin block of either version does: if told so, it hides padding from the tokens of the image."""

    derived = ("attn_mask",)

    mask_padding: bool

    # timm's
    window_size: tuple[int, int]
    shift_size: tuple[int, int]
    attn: Any

    def _attn(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Attention within windows of (B, H, W, C); valid: bool (B, H, W), the tokens that are no padding of the batch.

        timm shifts the tokens and then pads them to whole windows. Where padding is hidden it comes first, as in the detectors of
        Swin's authors: then which tokens meet does not depend on how far the grid reaches.
        """
        B, H, W, C = x.shape
        (window_h, window_w), (shift_h, shift_w) = self.window_size, self.shift_size
        pad_h, pad_w = -H % window_h, -W % window_w
        if valid is None and not (self.mask_padding and (pad_h or pad_w)):
            return super()._attn(x)  # type: ignore[misc]
        shifted = nn.functional.pad(x, (0, 0, 0, pad_w, 0, pad_h)).roll((-shift_h, -shift_w), dims=(1, 2))
        windows = window_partition(shifted, self.window_size).flatten(1, 2)
        if valid is None:
            valid = torch.ones(1, H, W, dtype=torch.bool, device=x.device)
        out = self.attn(windows, mask=self._region_mask(nn.functional.pad(valid, (0, pad_w, 0, pad_h))))
        rows, columns = (H + pad_h) // window_h, (W + pad_w) // window_w
        out = out.reshape(B, rows, columns, window_h, window_w, C).transpose(2, 3).reshape(B, H + pad_h, W + pad_w, C)
        return out.roll((shift_h, shift_w), dims=(1, 2))[:, :H, :W]

    def _region_mask(self, valid: Tensor) -> Tensor:
        """(B * windows, tokens, tokens), True where the second is no padding and both lie on the same side of the seam that the
        shift makes; valid: (B, H, W) of whole windows."""
        shift_h, shift_w = self.shift_size
        valid = valid.roll((-shift_h, -shift_w), dims=(1, 2))
        below, right = (
            torch.arange(size, device=valid.device) >= size - shift
            for size, shift in zip(valid.shape[1:], self.shift_size, strict=True)
        )
        region = torch.where(valid, below[:, None] * 2 + right, -1)
        region = window_partition(region[..., None], self.window_size).flatten(1)
        return (region[:, :, None] == region[:, None, :]) & (region[:, None, :] >= 0)


class StageHost(Host):
    """What a swapped Swin stage of either version does: it keeps the padding of a batch away from the tokens of each image.

    `hidden_padding` tells it for one forward pass what is padding; it hands that on to its blocks, outside their checkpoints.
    """

    valid: Tensor | None = None  # (B, H, W), of the tokens that come in

    # timm's
    downsample: Any
    blocks: Any
    grad_checkpointing: bool

    def forward(self, x: Tensor) -> Tensor:
        valid = self.valid
        if valid is None:
            return super().forward(x)
        x = self.downsample(x.masked_fill(~valid.unsqueeze(-1), 0.0))
        if not isinstance(self.downsample, nn.Identity):
            valid = valid[:, ::2, ::2]  # images lie in the upper left corner
        for block in self.blocks:
            x = checkpoint(block, x, valid) if self.grad_checkpointing and torch.is_grad_enabled() else block(x, valid)
        return x


@contextmanager
def hidden_padding(model: nn.Module, valid: Tensor | None) -> Iterator[None]:
    """Within it a swapped Swin, or a feature extractor made from one, hides the padding of its batch from every image.

    Args:
        model: with `patch_embed` and the stages in their order.
        valid: bool (B, H, W), the pixels that are no padding, an upper left rectangle of each image; None hides nothing.
    """
    stages = [module for module in model.modules() if isinstance(module, StageHost)]
    if valid is not None and stages:
        step_y, step_x = model.patch_embed.patch_size  # type: ignore[union-attr, misc]
        tokens = valid[:, ::step_y, ::step_x]
        for stage in stages:
            stage.valid = tokens
            if not isinstance(stage.downsample, nn.Identity):
                tokens = tokens[:, ::2, ::2]
    try:
        yield
    finally:
        for stage in stages:
            stage.valid = None


class RelPosSwinTransformerBlock(BlockHost, SwinTransformerBlock):
    """timm's SwinTransformerBlock around a swapped attention."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        x = x + self.drop_path1(self._attn(self.norm1(x), valid))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class RelPosSwinTransformerStage(StageHost, SwinTransformerStage):
    """timm's SwinTransformerStage around swapped blocks."""


class RelPosSwinTransformer(HostModel, SwinTransformer):
    """A swapped SwinTransformer."""


class RelPosPatchEmbed(Host, PatchEmbed):
    """timm's PatchEmbed with an absolute encoding added to its output (B, H, W, C)."""

    encoding: Encoding

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        _, height, width, _ = x.shape
        return self.encoding.embed(x.flatten(1, 2), Grid(height, width)).unflatten(1, (height, width))

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """As timm's; the encoding learns the new grid."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        self.encoding.set_window_size(self.grid_size)


class SwinFamily:
    """How to swap a SwinTransformer, or a feature extractor made from one."""

    name = "swin"
    description = "swin_* (SwinTransformer)"
    # timm's class and ours
    attention: ClassVar[tuple[type[nn.Module], type[Host]]] = (WindowAttention, RelPosWindowAttention)
    block: ClassVar[tuple[type[nn.Module], type[Host]]] = (SwinTransformerBlock, RelPosSwinTransformerBlock)
    stage: ClassVar[tuple[type[nn.Module], type[Host]]] = (SwinTransformerStage, RelPosSwinTransformerStage)
    model: ClassVar[tuple[type[nn.Module], type[HostModel]]] = (SwinTransformer, RelPosSwinTransformer)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        if type(model) in cls.model:
            return True
        return isinstance(model, FeatureDictNet) and any(type(module) in cls.block for module in model.modules())

    @classmethod
    def defaults(cls, spec: Spec, attention: Any) -> Spec:
        """What the host knows and the encoding needs to agree with the native one."""
        return spec

    @classmethod
    def swap(cls, model: Any, spec: Spec, *, absolute: str | None, mask_padding: bool) -> SwapReport:
        if absolute not in (None, "keep"):
            raise ValueError(f"swap: absolute={absolute!r}, but a {cls.name} model has no absolute position embedding")
        absolute_spec, relative_spec = split(spec)
        native_name = cls.attention[1].native_encoding
        blocks = [module for module in model.modules() if type(module) in cls.block]
        prepared = []
        same_function = True
        for block in blocks:
            attention = block.attn
            before = felt(attention.encoding, native_name) if hasattr(attention, "encoding") else (1.0, False)
            source = native_source(attention, native_name, cls.attention[1].native_parameters)
            head_dim = attention.qkv.out_features // (3 * attention.num_heads)
            attention_spec = cls.defaults(relative_spec or "none", attention)
            grid = grid_of_native(attention, native_name, attention_spec, Grid(*attention.window_size))
            encoding = make(attention_spec, attention.num_heads, head_dim, grid, attention.qkv.weight)
            encoding.set_window_size(attention.window_size)
            taken_over = take_over(encoding, native_name, source)
            prepared.append((block, encoding, taken_over))
            after = felt(encoding, native_name)
            # the same share of the native part, with its own parameters, and nothing else before or after
            same_function &= before == after == (after[0] if taken_over else 0.0, False)
            same_function &= getattr(block, "mask_padding", False) == mask_padding
        embedding = None
        if absolute_spec is not None:
            embed = model.patch_embed
            embedding = make(absolute_spec, 1, embed.proj.out_channels, Grid(*embed.grid_size), embed.proj.weight)

        for absolute_encoding in (getattr(model.patch_embed, "encoding", None), embedding):
            same_function &= not felt(absolute_encoding, "")[1]

        # nothing is touched before this line, so a refused swap leaves the model as it was
        for block, encoding, _ in prepared:
            attention = block.attn
            for name in ("relative_position_index", "relative_coords_table"):
                attention._buffers.pop(name, None)
                attention._non_persistent_buffers_set.discard(name)
            for name in {path.split(".")[0] for path in cls.attention[1].native_parameters}:
                attention._parameters.pop(name, None)
                attention._modules.pop(name, None)
            attention.encoding = encoding.train(attention.training)
            exchange_class(attention, cls.attention[1])
            exchange_class(block, cls.block[1])
            block.mask_padding = mask_padding
        for stage in [module for module in model.modules() if type(module) in cls.stage]:
            exchange_class(stage, cls.stage[1])
        embed = model.patch_embed
        if embedding is not None:
            embed.encoding = embedding.train(embed.training)
            exchange_class(embed, RelPosPatchEmbed)
        elif isinstance(embed, RelPosPatchEmbed):
            del embed.encoding
            embed.__class__ = PatchEmbed  # type: ignore[assignment]
        if type(model) in cls.model:
            exchange_class(model, cls.model[1])

        taken = all(taken_over for *_, taken_over in prepared)
        return SwapReport(
            family=cls.name,
            encoding=spec,
            absolute="none to keep",
            num_attentions=len(prepared),
            taken_over=list(cls.attention[1].native_parameters) if taken else [],
            same_function=same_function,
        )
