"""timm's VisionTransformer family: vit_*, deit*, deit3_*, with Block and Attention (arXiv:2010.11929, 2012.12877, 2204.07118)."""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.layers import Attention, PatchDropout, PatchDropoutWithIndices, PatchEmbed
from timm.models import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
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
from relpos2d.positions import Grid, Points, Positions

ABSOLUTE = ("keep", "fade", "remove")


class RelPosAttention(Host, Attention):
    """timm's Attention with an encoding between its queries and keys."""

    encoding: Encoding

    def forward(  # type: ignore[override]
        self, x: Tensor, positions: Positions, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        B, N, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if is_causal:  # timm means the order of the tokens, not of their places
            attn_mask = torch.ones(N, N, dtype=torch.bool, device=x.device).tril()
        dropout_p = self.attn_drop.p if self.training else 0.0
        x = attend(q, k, v, self.encoding, positions, mask=attn_mask, dropout_p=dropout_p, scale=self.scale)
        x = self.norm(x.transpose(1, 2).reshape(B, N, self.attn_dim))
        x = x if gate is None else x * gate
        return self.proj_drop(self.proj(x))


class RelPosBlock(Block):
    """timm's Block with places.

    The model writes them on the block; the block reads them outside its own checkpoint() and passes them in, so that a
    recomputation in the backward pass sees the places of its own forward pass.
    """

    positions: Positions
    grad_checkpointing: bool

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._forward, x, self.positions, attn_mask, is_causal)
        return self._forward(x, self.positions, attn_mask, is_causal)

    def _forward(self, x: Tensor, positions: Positions, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        attended = self.attn(self.norm1(x), positions, attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PositionHost(Host, HostModel):
    """What a swapped VisionTransformer of any kind does differently: it knows where its tokens stand."""

    native_encoding = "learned"
    native_parameters = ("pos_embed",)

    encoding: Encoding | None  # an absolute one, beside or in place of pos_embed
    absolute_strength: Tensor | None  # scales pos_embed where it is to fade
    drop_patches: nn.Module | None

    # timm's
    blocks: Any
    patch_embed: PatchEmbed
    pos_embed: nn.Parameter | None
    num_prefix_tokens: int

    def _pos_embed(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3] if x.ndim == 4 else self.patch_embed.grid_size
        grid = Grid(height, width, num_prefix_tokens=self.num_prefix_tokens)
        # timm's distilled model cannot do without an embedding
        tokens = self._without_positions(x) if self.pos_embed is None else super()._pos_embed(x)  # type: ignore[misc]
        if self.absolute_strength is not None:
            tokens = torch.lerp(self._without_positions(x), tokens, self.absolute_strength.to(tokens.dtype))
        if self.encoding is not None:
            tokens = self.encoding.embed(tokens, grid)
        positions: Positions = grid
        if self.drop_patches is not None:
            tokens, kept = self.drop_patches(tokens)
            if kept is not None:
                places = grid.coords(device=x.device).expand(x.shape[0], -1, -1)
                kept = kept.unsqueeze(-1).expand(-1, -1, places.shape[-1])
                positions = Points(places.gather(1, kept), num_prefix_tokens=grid.num_prefix_tokens)
        self._set_positions(positions)
        return tokens

    def _without_positions(self, x: Tensor) -> Tensor:
        """Prefix and patch tokens of (B, H, W, C) or (B, N, C), with nothing added."""
        prefix = (getattr(self, name, None) for name in ("cls_token", "dist_token", "reg_token"))
        tokens = [token.expand(x.shape[0], -1, -1) for token in prefix if token is not None]
        return torch.cat([*tokens, x.reshape(x.shape[0], -1, x.shape[-1])], dim=1)

    def _set_positions(self, positions: Positions) -> None:
        for block in self.blocks:
            if block.positions is not positions and block.positions != positions:
                block.positions = positions

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """As timm's; the encodings learn the new grid."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)  # type: ignore[misc]
        grid = Grid(*self.patch_embed.grid_size, num_prefix_tokens=self.num_prefix_tokens)
        self._set_positions(grid)
        for module in self.modules():
            if isinstance(module, Encoding):
                module.set_window_size(grid.shape)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As timm's, block by block; each block checkpoints itself (see RelPosBlock)."""
        super().set_grad_checkpointing(enable)  # type: ignore[misc]
        self.grad_checkpointing = False
        for block in self.blocks:
            block.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """As timm's; an absolute encoding belongs to the stem."""
        matcher = super().group_matcher(coarse)  # type: ignore[misc]
        return {**matcher, "stem": rf"{matcher['stem']}|^encoding\."}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.absolute_strength is not None:
            state_dict.setdefault(prefix + "absolute_strength", self.absolute_strength)
        if self.pos_embed is None and self.encoding is None:
            state_dict.pop(prefix + "pos_embed", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class RelPosVisionTransformer(PositionHost, VisionTransformer):
    """A swapped VisionTransformer."""


class RelPosVisionTransformerDistilled(PositionHost, VisionTransformerDistilled):
    """A swapped VisionTransformerDistilled (DeiT with a distillation token)."""


SWAPPED: dict[type, type] = {
    VisionTransformer: RelPosVisionTransformer,
    VisionTransformerDistilled: RelPosVisionTransformerDistilled,
}


class VitFamily:
    """How to swap a VisionTransformer."""

    name = "vit"
    description = "vit_*, deit*, deit3_* (VisionTransformer with Block and Attention)"

    @staticmethod
    def matches(model: nn.Module) -> bool:
        return type(model) in (*SWAPPED, *SWAPPED.values()) and all(
            type(block) in (Block, RelPosBlock) and type(block.attn) in (Attention, RelPosAttention)
            for block in cast(Any, model).blocks
        )

    @staticmethod
    def swap(model: Any, spec: Spec, *, absolute: str | None, mask_padding: bool) -> SwapReport:
        if mask_padding:
            raise ValueError("swap: mask_padding is for windows; a VisionTransformer has none")
        absolute_spec, relative_spec = split(spec)
        absolute = absolute or ("keep" if absolute_spec is None else "remove")
        if absolute not in ABSOLUTE:
            raise ValueError(f"swap: absolute={absolute!r} must be one of {', '.join(ABSOLUTE)}")
        if absolute == "fade" and model.pos_embed is None:
            raise ValueError("swap: absolute='fade', but the model has no absolute position embedding")
        if absolute == "fade" and model.pos_drop.p > 0:
            raise ValueError(f"swap: absolute='fade' needs pos_drop_rate=0, the model has {model.pos_drop.p}")

        grid = Grid(*model.patch_embed.grid_size, num_prefix_tokens=model.num_prefix_tokens)
        weight = model.patch_embed.proj.weight
        relative = [
            make(relative_spec or "none", b.attn.num_heads, b.attn.head_dim, grid, b.attn.qkv.weight)
            for b in model.blocks
        ]
        embedding = None
        taken_over = moves = False
        if absolute_spec is not None:
            embedded = Grid(*grid.shape) if model.no_embed_class else grid
            embedded = grid_of_native(model, "learned", absolute_spec, embedded)
            embedding = make(absolute_spec, 1, model.embed_dim, embedded, weight)
            embedding.set_window_size(grid.shape)
            if absolute == "remove":
                native = native_source(model, "learned", ("pos_embed",))
                if not native and model.pos_embed is not None:
                    native = {"pos_embed": model.pos_embed}
                moves = native.get("pos_embed") is model.pos_embed
                taken_over = take_over(embedding, "learned", native)
        same_function = VitFamily._same_function(model, relative, embedding, absolute, taken_over, moves)

        # nothing is touched before this line, so a refused swap leaves the model as it was
        had_embedding = model.pos_embed is not None
        if absolute == "remove":
            model.pos_embed = None
        if isinstance(model.patch_drop, PatchDropout):
            dropout = model.patch_drop
            with_indices = PatchDropoutWithIndices(dropout.prob, dropout.num_prefix_tokens, dropout.ordered)
            model.drop_patches = with_indices.train(dropout.training)
            model.patch_drop = nn.Identity().train(dropout.training)
        elif not hasattr(model, "drop_patches"):
            model.drop_patches = None
        for block, encoding in zip(model.blocks, relative, strict=True):
            exchange_class(block, RelPosBlock)
            exchange_class(block.attn, RelPosAttention)
            block.attn.encoding = encoding.train(block.attn.training)
            block.positions = grid
            block.grad_checkpointing = getattr(block, "grad_checkpointing", model.grad_checkpointing)
        model.grad_checkpointing = False
        if isinstance(model, HostModel):
            del model.encoding, model.absolute_strength
        model.encoding = None if embedding is None else embedding.train(model.training)
        strength = torch.ones((), device=weight.device, dtype=weight.dtype) if absolute == "fade" else None
        model.register_buffer("absolute_strength", strength)
        exchange_class(model, SWAPPED.get(type(model), type(model)))

        return SwapReport(
            family=VitFamily.name,
            encoding=spec,
            absolute=absolute if had_embedding else "none to keep",
            num_attentions=len(relative),
            taken_over=["pos_embed"] if taken_over else [],
            same_function=same_function,
        )

    @staticmethod
    def _same_function(
        model: Any,
        relative: list[Encoding],
        embedding: Encoding | None,
        absolute: str,
        taken_over: bool,
        moves: bool,
    ) -> bool:
        """Whether the model, not yet touched, will compute what it computes now. moves: taken over from pos_embed itself."""
        own = 0.0
        if model.pos_embed is not None:
            faded = getattr(model, "absolute_strength", None)
            own = 1.0 if faded is None else float(faded)
        learned, other = felt(getattr(model, "encoding", None), "learned")
        new_learned, new_other = felt(embedding, "learned")
        new_own = 0.0 if model.pos_embed is None or absolute == "remove" else 1.0
        if taken_over and moves:
            new_own, new_learned = new_learned, new_own
        same_learned = learned == new_learned and (taken_over or learned == 0)
        old_relative = [getattr(block.attn, "encoding", None) for block in model.blocks]
        silent = not any(felt(encoding, "")[1] for encoding in (*old_relative, *relative))
        return own == new_own and same_learned and silent and not other and not new_other
