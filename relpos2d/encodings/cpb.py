"""Log-spaced continuous position bias of Swin V2 (arXiv:2111.09883): a small MLP makes the number from the offset."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import NumberEncoding
from relpos2d.positions import Grid


class ContinuousBias(NumberEncoding):
    """16 * sigmoid(MLP(c)) with c = sign(d) log2(1 + 8 |d| / (w - 1)) / log2(8) on each axis, w the window.

    Args:
        hidden_dim: width of the MLP.
        pretrained_window_size: the window w that the MLP was trained on, one number or one per axis; 0: the current window.

    Raises:
        ValueError: sizes out of range, or not one window size per axis.
    """

    name = "cpb"
    formula = "16 sigmoid(MLP_h(sign(d) log2(1 + 8 |d| / (w - 1)) / 3))"
    paper = "arXiv:2111.09883"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        hidden_dim: int = 512,
        pretrained_window_size: int | tuple[int, ...] = 0,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        if hidden_dim < 1:
            raise ValueError(f"ContinuousBias: hidden_dim={hidden_dim} must be at least 1")
        num_axes = positions.num_axes
        windows = (
            (pretrained_window_size,) * num_axes if isinstance(pretrained_window_size, int) else pretrained_window_size
        )
        if len(windows) != num_axes or min(windows) < 0:
            raise ValueError(
                f"ContinuousBias: pretrained_window_size={pretrained_window_size} must be one number of at least 0 for "
                f"each of the {num_axes} axes, or one for all"
            )
        self.pretrained_window_size = tuple(windows)
        self.set_window_size(positions.shape)
        self.cpb_mlp = nn.Sequential(
            nn.Linear(num_axes, hidden_dim, device=device, dtype=dtype),
            nn.ReLU(),
            nn.Linear(hidden_dim, num_heads, bias=False, device=device, dtype=dtype),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in self.cpb_mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def set_window_size(self, window_size: tuple[int, ...]) -> None:
        self.window_size = self._checked_window(window_size).shape

    def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
        # the reference makes its coordinates in float32 whatever the dtype of the model, and weights are trained on those
        offsets = offsets.float()
        # as in timm: the first axis decides whether there was a pretrained window
        windows = self.pretrained_window_size if self.pretrained_window_size[0] > 0 else self.window_size
        # a window of one token has no offset but 0
        reach = torch.tensor([max(w - 1, 1) for w in windows], device=offsets.device, dtype=offsets.dtype)
        scaled = offsets / reach * 8
        coords = scaled.sign() * torch.log2(scaled.abs() + 1.0) / math.log2(8)
        numbers = self.cpb_mlp(coords.to(next(self.cpb_mlp.parameters()).dtype))
        return 16 * torch.sigmoid(numbers.to(torch.promote_types(numbers.dtype, torch.float32)))
