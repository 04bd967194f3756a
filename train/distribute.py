"""One model on several processes: copies of it (DDP, through accelerate) or shared out among them (torch's FSDP2)."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

T = TypeVar("T")


def share_out(model: nn.Module, accelerator: Accelerator) -> None:
    """FSDP2 in place: each process keeps a part of every parameter and gathers a block's while it works.

    accelerate's own way does nothing on CPUs, where it must be testable, so this calls torch directly.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for block in attention_blocks(model):
        fully_shard(block, mesh=mesh)
    # what is left over too, or it would lie about whole after an evaluation, which has no backward that takes it apart
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def attention_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model: what holds an attention."""
    names = ("attn", "attention")  # timm's and ours
    return [m for m in model.modules() if any(isinstance(getattr(m, name, None), nn.Module) for name in names)]


def wrap(model: nn.Module, accelerator: Accelerator, parallel: Literal["ddp", "fsdp2"]) -> nn.Module:
    """What is called in training in place of the model."""
    if parallel == "fsdp2" and accelerator.num_processes > 1:
        share_out(model, accelerator)
        return model
    return accelerator.prepare_model(model)


def gradients_stay(model: nn.Module, accelerator: Accelerator, stay: bool) -> contextlib.AbstractContextManager[Any]:
    """With `stay`, what backward adds up is not yet exchanged between the processes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not stay)
        return contextlib.nullcontext()
    return accelerator.no_sync(model) if stay else contextlib.nullcontext()


def clip_gradients(model: nn.Module, accelerator: Accelerator, max_norm: float | None) -> float:
    """The norm of all gradients, which are scaled down to at most `max_norm`."""
    parameters, limit = model.parameters(), math.inf if max_norm is None else max_norm
    if isinstance(model, FSDPModule):
        norm = nn.utils.clip_grad_norm_(parameters, limit)
    else:
        norm = accelerator.clip_grad_norm_(parameters, limit)  # type: ignore[assignment]
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model that may be shared out. All processes must take part."""
    return get_model_state_dict(model, options=WHOLE)  # type: ignore[return-value]


def whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer, by parameter names: the same for any number of processes. All must take part."""
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)  # type: ignore[return-value]


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: tuple[str, ...] = ()
) -> None:
    """Loads what `whole_optimizer` returned; of the options in `keep` each group stays with its own."""
    options = [{key: group[key] for key in keep if key in group} for group in optimizer.param_groups]
    values = [parameter.detach().clone() for parameter in model.parameters()]
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    with (
        torch.no_grad()
    ):  # torch takes a step to have something to load into, which some optimizers do not take as nothing
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def mean_over_processes(accelerator: Accelerator, *values: float | Tensor) -> list[float]:
    """Each value as the mean over all processes, in one exchange."""
    gathered = torch.stack([torch.as_tensor(value).detach().cpu().double() for value in values])
    if accelerator.num_processes > 1:
        gathered = accelerator.reduce(gathered.to(accelerator.device), reduction="mean")  # type: ignore[assignment]
    return gathered.tolist()


def on_main_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Does something on the main process alone; all get its result, or raise its error."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
    result, failure = broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    return result
