"""A plain ViT as a detection backbone: windows, a few global blocks, and a simple feature pyramid (ViTDet, arXiv:2203.16527)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from timm.layers import LayerNorm2d, PatchEmbed
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from relpos2d.backbones.host import check_sizes
from relpos2d.backbones.vit import PositionHost
from relpos2d.encoding import Combined, Encoding
from relpos2d.interpolation import resize, resize_matrices
from relpos2d.positions import Grid

STRIDES = (4, 8, 16, 32)
#: what a classifier has beside its blocks: parameters, and modules
TOKENS = ("cls_token", "reg_token", "dist_token")
HEADS = ("norm", "fc_norm", "attn_pool", "head_drop", "head", "head_dist")

Shape = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the images of a batch lie in its maps, each in the upper left corner.

    Args:
        pixels: height and width of each image.
        groups: of tokens (rows, columns) of an image: the images that have as many.
        windows: (B * windows, 1, 1, tokens), which keys of each window belong to an image; None: all.
    """

    pixels: tuple[Shape, ...]
    groups: tuple[tuple[Shape, Tensor], ...]
    windows: Bool[Tensor, "windows 1 1 tokens"] | None

    def inside(
        self, like: Float[Tensor, "batch channels rows columns"], stride: int
    ) -> Bool[Tensor, "batch 1 rows columns"]:
        """Which places of a map belong to an image: the first ceil(size / stride) of each axis."""
        axes = []
        for axis, size in enumerate(like.shape[-2:]):
            ends = torch.tensor([-(-image[axis] // stride) for image in self.pixels], device=like.device)
            axes.append(torch.arange(size, device=like.device) < ends[:, None])
        return (axes[0][:, :, None] & axes[1][:, None, :]).unsqueeze(1)


class SimpleFeaturePyramid(nn.Module):
    """Maps of several strides from the last map of a swapped VisionTransformer, for images of any size.

    Most blocks attend inside windows, the others inside whole images. Padding, of a window or of a batch, is never attended to
    and never reaches a convolution: a map of an image is the same alone and beside a larger one.

    A window block reads its encoding at the size of the window, a global one at the size of each image, as does an absolute
    embedding; what that means is up to the encoding: formulas are evaluated at the places, a `table` follows its own
    `resize="timm" | "bicubic" | "clamp"`, embeddings are resampled as timm does. `report` tells.

    The model becomes `body`. What it has for classification is taken away: class and register tokens (they have no window),
    the terms of encodings for these, final norm and head. Load weights and swap before; the state dict of a classifier still
    loads into `body`, strictly but for these.

    Args:
        model: a VisionTransformer of timm after `swap`, with square patches of 4, 8, 16 or 32 pixels. It is changed.
        out_channels: channels of each map.
        window_size: tokens along each axis of a window, one number or (rows, columns).
        global_blocks: how many blocks attend globally, the last of each of as many equal parts; or which.
        image_grid: tokens (rows, columns) at which all images read encodings and embeddings, of which they then see the upper
            left part; beyond it these go on as at its edge. None: each its own.
        strides: which of 4, 8, 16 and 32 are wanted.

    Attributes:
        strides: pixels from one place of a map to the next, by the names of the maps (p2: 4, p3: 8, ...).
        report: what was left out, which blocks see what, and what is read at another size than before.

    Raises:
        ValueError: a model that is not swapped or drops patches, other patches, sizes below 1, blocks that are not there.
    """

    body: Any
    hides_padding = True

    def __init__(
        self,
        model: nn.Module,
        out_channels: int = 256,
        *,
        window_size: int | Sequence[int] = 14,
        global_blocks: int | Sequence[int] = 4,
        image_grid: Sequence[int] | None = None,
        strides: Sequence[int] = STRIDES,
    ) -> None:
        super().__init__()
        if not strides or not set(strides) <= set(STRIDES):
            raise ValueError(f"SimpleFeaturePyramid: strides={strides!r} must be some of {STRIDES}")
        self.body = body = _checked_model(model)
        self.window_size = _checked_pair("window_size", window_size)
        self.image_grid = None if image_grid is None else _checked_pair("image_grid", image_grid)
        self.global_blocks = _checked_blocks(global_blocks, len(body.blocks))
        check_sizes("SimpleFeaturePyramid: out_channels", out_channels)
        self.out_channels = out_channels
        self.patch_size: int = body.patch_embed.patch_size[0]
        self.strides = {f"p{stride.bit_length() - 1}": stride for stride in sorted(strides)}

        left_out = _leave_out(body)
        for index, block in enumerate(body.blocks):
            set_window(block.attn.encoding, self._reading(index, None))
        weight = body.patch_embed.proj.weight
        self.levels = nn.ModuleDict(
            {
                name: Level(body.embed_dim, out_channels, self.patch_size, stride, weight.device, weight.dtype)
                for name, stride in self.strides.items()
            }
        )
        self.report = self._reported(left_out)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Make activations of each block again in the backward pass."""
        self.body.set_grad_checkpointing(enable)

    def stages(self) -> Iterator[tuple[str, str]]:
        """Names of the body's parameters, each with what it belongs to: "stem", or a stage, that ends with a global block, and a
        block of it: "2.1"."""
        stage = block = 0
        places = []
        for index in range(len(self.body.blocks)):
            places.append(f"{stage}.{block}")
            stage, block = (stage + 1, 0) if index in self.global_blocks else (stage, block + 1)
        for name, _ in self.body.named_parameters():
            yield f"body.{name}", places[int(name.split(".")[1])] if name.startswith("blocks.") else "stem"

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> OrderedDict[str, Tensor]:
        """Maps by name, "p2" (stride 4) to "p5" (stride 32), 0 where there is no image.

        Args:
            x: (B, 3, H, W) normalised images; or (B, 4, H, W), the last channel 1 in the image, which lies in the upper left
                corner, and 0 in the padding, whatever that holds.

        Returns:
            name -> (B, out_channels, ceil(H / stride), ceil(W / stride)).

        Raises:
            ValueError: another number of channels, or a last channel that is no such corner.
        """
        x, pixels = self._images(x)
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % STRIDES[-1], 0, -height % STRIDES[-1]))
        x = self.body.patch_embed.norm(self.body.patch_embed.proj(x).permute(0, 2, 3, 1))
        layout = self._layout(pixels, x)
        x = per_image(self._embedded, x, layout)
        for index, block in enumerate(self.body.blocks):
            if block.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(self._block, index, x, layout)
            else:
                x = self._block(index, x, layout)
        x = x.permute(0, 3, 1, 2)
        maps = OrderedDict((name, level(x, layout)) for name, level in self.levels.items())
        return OrderedDict(
            (name, maps[name][..., : -(-height // stride), : -(-width // stride)])
            for name, stride in self.strides.items()
        )

    def _images(self, x: Tensor) -> tuple[Tensor, tuple[Shape, ...]]:
        """Images with 0 as padding, and the size of each."""
        channels = self.body.patch_embed.proj.in_channels
        if x.ndim != 4 or x.shape[1] not in (channels, channels + 1):
            raise ValueError(
                f"SimpleFeaturePyramid: x has shape {tuple(x.shape)}, allowed is (B, {channels}, H, W), or "
                f"(B, {channels + 1}, H, W) with 1 for the image and 0 for padding as last channel"
            )
        batch, _, height, width = x.shape
        if x.shape[1] == channels:
            return x, ((height, width),) * batch
        inside = x[:, channels] > 0.5
        counts = torch.stack((inside[:, :, 0].sum(1), inside[:, 0].sum(1), inside.sum((1, 2))), dim=1).tolist()
        corner = torch.zeros_like(inside)
        for index, (rows, columns, _) in enumerate(counts):
            corner[index, :rows, :columns] = True
        wrong = (corner != inside).flatten(1).any(1).tolist()
        for index, (*_, area) in enumerate(counts):
            if wrong[index] or not area:
                raise ValueError(
                    f"SimpleFeaturePyramid: the last channel of image {index} must be 1 in a rectangle in the upper left corner, "
                    "where the image is, and 0 elsewhere"
                )
        return torch.where(inside.unsqueeze(1), x[:, :channels], 0), tuple(
            (rows, columns) for rows, columns, _ in counts
        )

    def _layout(self, pixels: tuple[Shape, ...], x: Float[Tensor, "batch rows columns channels"]) -> Layout:
        rows, columns = x.shape[1:3]
        members: dict[Shape, list[int]] = {}
        for index, (height, width) in enumerate(pixels):
            members.setdefault((-(-height // self.patch_size), -(-width // self.patch_size)), []).append(index)
        groups = tuple((shape, torch.tensor(index, device=x.device)) for shape, index in members.items())
        is_full = list(members) == [(rows, columns)] and not any(
            size % window for size, window in zip((rows, columns), self.window_size, strict=True)
        )
        layout = Layout(pixels, groups, None)
        if is_full:
            return layout
        inside = layout.inside(x.permute(0, 3, 1, 2), self.patch_size).permute(0, 2, 3, 1)
        return Layout(pixels, groups, to_windows(inside, self.window_size)[:, None, None, :, 0])

    def _reading(self, index: int, shape: Shape | None) -> Shape | None:
        """At what size a block reads its encoding for an image of this many tokens; None: as it did."""
        if index not in self.global_blocks:
            return self.window_size
        return self.image_grid or shape

    def _embedded(self, tokens: Tensor, shape: Shape) -> Tensor:
        """Tokens (b, tokens, channels) of images of one size, with what belongs to their places."""
        body = self.body
        if body.pos_embed is not None:
            places = self._pos_embed(shape).to(tokens.dtype)
            if body.absolute_strength is not None:
                places = places * body.absolute_strength.to(tokens.dtype)
            tokens = body.pos_drop(tokens + places)
        if body.encoding is not None:
            set_window(body.encoding, self.image_grid or shape)
            tokens = body.encoding.embed(tokens, Grid(*shape))
        return body.norm_pre(tokens)

    def _pos_embed(self, shape: Shape) -> Float[Tensor, "tokens channels"]:
        old_shape, new_shape = tuple(self.body.patch_embed.grid_size), self.image_grid or shape
        values = self.body.pos_embed[0, _num_prefix_rows(self.body) :].unflatten(0, old_shape)
        if new_shape != old_shape:
            values = resize(values, resize_matrices(old_shape, new_shape, "antialias"))
        if new_shape != shape:
            y, x = (
                torch.arange(n, device=values.device).clamp(max=m - 1) for n, m in zip(shape, new_shape, strict=True)
            )
            values = values[y[:, None], x]
        return values.flatten(0, 1)

    def _block(self, index: int, x: Float[Tensor, "batch rows columns channels"], layout: Layout) -> Tensor:
        """A block on a map. All that it reads is given to it or set by it, so that it can run again in the backward pass."""
        block = self.body.blocks[index]
        attention = block.attn
        if index in self.global_blocks:

            def attended(tokens: Tensor, shape: Shape) -> Tensor:
                set_window(attention.encoding, self._reading(index, shape))
                return attention(tokens, Grid(*shape))

            out = per_image(attended, block.norm1(x), layout)
        else:
            set_window(attention.encoding, self.window_size)
            windows = to_windows(block.norm1(x), self.window_size)
            windows = attention(windows, Grid(*self.window_size), attn_mask=layout.windows)
            out = from_windows(windows, self.window_size, (x.shape[1], x.shape[2]))
        x = x + block.drop_path1(block.ls1(out))
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def _reported(self, left_out: list[str]) -> list[str]:
        of_windows = [index for index in range(len(self.body.blocks)) if index not in self.global_blocks]
        lines = [f"left out, for they take no part: {', '.join(left_out)}"] if left_out else []
        if of_windows:
            lines.append(f"windows of {_by(self.window_size)} patches: blocks {_some(of_windows)}")
        if self.global_blocks:
            lines.append(f"whole images: blocks {_some(self.global_blocks)}")
        of_images = "those of each image" if self.image_grid is None else _by(self.image_grid)
        if self.body.pos_embed is not None:
            lines.append(f"pos_embed: {_by(self.body.patch_embed.grid_size)} -> {of_images}, resampled as timm does")
        found = []
        if self.body.encoding is not None:
            found += _rules(self.body.encoding, self.image_grid, "images")
        for index, block in enumerate(self.body.blocks):
            where = "images" if index in self.global_blocks else "windows"
            found += _rules(block.attn.encoding, self._reading(index, None), where)
        return lines + [text + (f" ({count} times)" if count > 1 else "") for text, count in Counter(found).items()]

    def extra_repr(self) -> str:
        return f"window_size={self.window_size}, global_blocks={self.global_blocks}, image_grid={self.image_grid}"


class Level(nn.Module):
    """From the last map to the map of one stride: up by transposed convolutions or down by the largest of 2x2, then to its
    channels by a 1x1 and a 3x3 convolution, each with a norm."""

    def __init__(
        self, dim: int, out_channels: int, patch_size: int, stride: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.patch_size, self.stride = patch_size, stride
        up: list[nn.Module] = []
        while patch_size > stride:
            if up:
                up += [LayerNorm2d(dim, **dd), nn.GELU()]
            up.append(nn.ConvTranspose2d(dim, max(dim // 2, 1), kernel_size=2, stride=2, **dd))
            dim, patch_size = max(dim // 2, 1), patch_size // 2
        self.up = nn.Sequential(*up)
        self.project = nn.Conv2d(dim, out_channels, kernel_size=1, bias=False, **dd)
        self.norm = LayerNorm2d(out_channels, **dd)
        self.mix = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False, **dd)
        self.mixed_norm = LayerNorm2d(out_channels, **dd)

    def forward(self, x: Float[Tensor, "batch channels rows columns"], layout: Layout) -> Tensor:
        x = torch.where(layout.inside(x, self.patch_size), x, 0)
        stride = self.patch_size
        while stride < self.stride:
            # the padding beside an image must not be its largest
            x = F.max_pool2d(x.masked_fill(~layout.inside(x, stride), float("-inf")), kernel_size=2)
            stride *= 2
            x = torch.where(layout.inside(x, stride), x, 0)
        x = self.up(x)
        inside = layout.inside(x, self.stride)
        x = torch.where(inside, self.norm(self.project(x)), 0)
        return torch.where(inside, self.mixed_norm(self.mix(x)), 0)


def per_image(
    function: Callable[[Tensor, Shape], Tensor], x: Float[Tensor, "batch rows columns channels"], layout: Layout
) -> Float[Tensor, "batch rows columns channels"]:
    """A function of the tokens (b, tokens, channels) of images of one size, for each size; 0 where there is no image."""
    if [shape for shape, _ in layout.groups] == [tuple(x.shape[1:3])]:
        shape = layout.groups[0][0]
        return function(x.flatten(1, 2), shape).unflatten(1, shape)
    out: Tensor | None = None
    for (rows, columns), index in layout.groups:
        part = function(x[index, :rows, :columns].flatten(1, 2), (rows, columns)).unflatten(1, (rows, columns))
        if out is None:
            out = part.new_zeros(x.shape)
        out[index, :rows, :columns] = part
    assert out is not None
    return out


def to_windows(
    x: Shaped[Tensor, "batch rows columns channels"], window_size: Shape
) -> Shaped[Tensor, "windows tokens channels"]:
    """Windows of all images, one image after the other, row-major; 0 where the last ones reach beyond the map."""
    height, width = window_size
    x = F.pad(x, (0, 0, 0, -x.shape[2] % width, 0, -x.shape[1] % height))
    x = x.unflatten(2, (-1, width)).unflatten(1, (-1, height)).transpose(2, 3)
    return x.flatten(0, 2).flatten(1, 2)


def from_windows(
    windows: Float[Tensor, "windows tokens channels"], window_size: Shape, shape: Shape
) -> Float[Tensor, "batch rows columns channels"]:
    """The map that `to_windows` cut."""
    (height, width), (rows, columns) = window_size, shape
    x = windows.unflatten(1, window_size).unflatten(0, (-1, -(-rows // height), -(-columns // width)))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :rows, :columns]


def set_window(encoding: Encoding, shape: Shape | None) -> None:
    """Let an encoding be read at this size, if it is not yet; None: leave it."""
    parts = [part for part in encoding.modules() if isinstance(part, Encoding)]
    if shape is not None and any(tuple(getattr(part, "window_size", shape)) != shape for part in parts):
        encoding.set_window_size(shape)


def _checked_model(model: Any) -> Any:
    who = "SimpleFeaturePyramid"
    if not isinstance(model, PositionHost):
        raise ValueError(
            f"{who}: model is a {type(model).__name__}, allowed is a VisionTransformer of timm after swap(model, encoding); "
            "'none' leaves it as it is"
        )
    if not isinstance(model.patch_embed, PatchEmbed):
        raise ValueError(f"{who}: the model cuts images by {type(model.patch_embed).__name__}, allowed is PatchEmbed")
    height, width = model.patch_embed.patch_size
    if height != width or height not in STRIDES:
        raise ValueError(
            f"{who}: the model has patches of {height}x{width} pixels, allowed are squares of {', '.join(map(str, STRIDES))}"
        )
    if model.drop_patches is not None:
        raise ValueError(
            f"{who}: the model drops patches, of which no map can be made; build it with patch_drop_rate=0"
        )
    return model


def _checked_pair(name: str, value: int | Sequence[int]) -> Shape:
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"SimpleFeaturePyramid: {name}={value!r} must be (rows, columns)")
    check_sizes(f"SimpleFeaturePyramid: {name}", pair)
    return pair[0], pair[1]


def _checked_blocks(blocks: int | Sequence[int], depth: int) -> tuple[int, ...]:
    who = f"SimpleFeaturePyramid: global_blocks={blocks!r}"
    if isinstance(blocks, int):
        if isinstance(blocks, bool) or not 0 <= blocks <= depth:
            raise ValueError(f"{who} must be between 0 and the {depth} blocks of the model, or a list of blocks")
        return tuple((part + 1) * depth // blocks - 1 for part in range(blocks))
    if len(set(blocks)) < len(blocks) or any(index not in range(depth) for index in blocks):
        raise ValueError(f"{who} must be different blocks from 0 to {depth - 1}")
    return tuple(sorted(blocks))


def _leave_out(body: Any) -> list[str]:
    """Take away what only a classifier needs; the names of what held parameters."""
    names = {name for name in TOKENS if getattr(body, name, None) is not None}
    heads = {name: getattr(body, name, None) for name in HEADS}
    names |= {name for name, head in heads.items() if head is not None and list(head.parameters())}
    for name in TOKENS:
        if hasattr(body, name):
            setattr(body, name, None)
    for name in HEADS:
        if getattr(body, name, None) is not None:
            setattr(body, name, nn.Identity())
    for module in body.modules():
        if isinstance(module, Encoding) and getattr(module, "prefix_bias", None) is not None:
            module.prefix_bias = None
            names.add("prefix_bias")
    body.register_load_state_dict_pre_hook(_pass_over)
    return [name for name in (*TOKENS, *HEADS, "prefix_bias") if name in names]


def _pass_over(body: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before weights load: what was left out need not, also where it is part of a checkpoint."""
    for key in list(state_dict):
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and (name.split(".")[0] in (*TOKENS, *HEADS) or name.endswith(".prefix_bias")):
            del state_dict[key]


def _num_prefix_rows(body: Any) -> int:
    return 0 if body.no_embed_class else body.num_prefix_tokens


def _rules(encoding: Encoding, window: Shape | None, where: str) -> list[str]:
    """One line for each part: from what size to what, and by which rule."""
    parts: list[Any] = [part for part in encoding.modules() if isinstance(part, Encoding)]
    lines = []
    for part in parts:
        if isinstance(part, Combined) or part.family == "none":
            continue
        if not hasattr(part, "window_size"):
            lines.append(f"{part.name} in {where}: a formula, evaluated at the places")
            continue
        name, before, after = part.name, part.positions.shape, window
        if hasattr(part, "table_shape"):
            name, before = f"{name} of offsets", part.table_shape
            after = None if window is None else (2 * window[0] - 1, 2 * window[1] - 1)
            rule = f"resize={part.resize}"
            if part.max_distance is not None:
                after = before
        elif part.family == "absolute":
            rule = "resampled as timm does"
        else:
            rule = "a formula of offsets over this size"
            if part.pretrained_window_size[0]:
                before = after = part.pretrained_window_size
        to = "those of each image" if after is None else _by(after)
        lines.append(f"{name} in {where}: {_by(before)} " + ("as before" if after == before else f"-> {to}, {rule}"))
    return lines


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _some(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks))
