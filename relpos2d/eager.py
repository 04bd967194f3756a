"""Whether code runs as it is written, or something follows what it does."""

import torch


def runs_eagerly() -> bool:
    """Whether operations only do what they say, followed by no compiler, exporter, torch.func or forward-mode derivative."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed())


def is_transformed() -> bool:
    """Whether torch.func or a forward-mode derivative goes along."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
