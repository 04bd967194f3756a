"""timm's Swin Transformer (arXiv:2103.14030), and what it shares with Swin V2: windows, shifts and padding."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed, to_2tuple
from timm.models import FeatureDictNet
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention, window_partition
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

    def _attn(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        (window_h, window_w), shift = self.window_size, self.shift_size
        pad_h, pad_w = -H % window_h, -W % window_w
        if not self.mask_padding or not (pad_h or pad_w):
            return super()._attn(x)  # type: ignore[misc]
        shifted = torch.roll(x, shifts=(-shift[0], -shift[1]), dims=(1, 2))
        shifted = nn.functional.pad(shifted, (0, 0, 0, pad_w, 0, pad_h))
        windows = window_partition(shifted, self.window_size).flatten(1, 2)
        out = self.attn(windows, mask=self._region_mask(H, W, x.device))
        rows, columns = (H + pad_h) // window_h, (W + pad_w) // window_w
        out = out.reshape(B, rows, columns, window_h, window_w, C).transpose(2, 3).reshape(B, H + pad_h, W + pad_w, C)
        return torch.roll(out[:, :H, :W], shifts=tuple(shift), dims=(1, 2))

    def _region_mask(self, height: int, width: int, device: torch.device) -> Tensor:
        """(windows, tokens, tokens), True where both belong to the same region: on the same side of the seam that the shift
        makes, and not padding."""
        sides = []
        for size, window, shift in zip((height, width), self.window_size, self.shift_size, strict=True):
            place = torch.arange(-(-size // window) * window, device=device)
            # an image smaller than the shift goes round more than once
            sides.append(torch.where(place >= size, 2, (place >= size - shift % size).long()))
        region = sides[0][:, None] * 3 + sides[1][None, :]
        region = torch.where((sides[0][:, None] == 2) | (sides[1][None, :] == 2), -1, region)
        region = window_partition(region[None, :, :, None], self.window_size).flatten(1)
        return (region[:, :, None] == region[:, None, :]) & (region[:, None, :] >= 0)


class RelPosSwinTransformerBlock(BlockHost, SwinTransformerBlock):
    """timm's SwinTransformerBlock around a swapped attention."""


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
