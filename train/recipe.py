"""How a config's recipe acts on a model, through timm: what is trained, optimizer, schedule, average of the weights, handover."""

import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from relpos2d import Combined, Encoding
from train.config import Config, Trainer


def choose_trainable(model: nn.Module, trainer: Trainer) -> None:
    """Freezes what `trainable` and `frozen_stages` leave out.

    Raises:
        ValueError: nothing would be left to train, or the model has no such stages.
    """
    if trainer.trainable == "positions":
        positions = position_names(model)
        if not positions:
            raise ValueError("trainer.trainable = 'positions': the encodings of this model have no parameters")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in positions)
    if trainer.frozen_stages:
        groups = group_parameters(model, model.group_matcher(coarse=True))  # type: ignore[operator]
        num_stages = max(groups) - 1  # the stem before them, the head behind them
        if trainer.frozen_stages > num_stages:
            raise ValueError(
                f"trainer.frozen_stages = {trainer.frozen_stages}: must be at most {num_stages}, the stages of this model"
            )
        parameters = dict(model.named_parameters())
        for group in range(trainer.frozen_stages + 1):
            for name in groups[group]:
                parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("trainer: trainable and frozen_stages together leave nothing to train")


def position_names(model: nn.Module) -> set[str]:
    """Names of the parameters of all encodings."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Encoding)
        for name, _ in module.named_parameters()
    }


def create_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """No weight decay on biases, norms and what model.no_weight_decay() names.

    Raises:
        ValueError: the optimizer cannot be made here, with what it said.
    """
    options = config.optimizer.given()
    scale = options.pop("position_lr_scale", 1.0)
    try:
        optimizer = create_optimizer_v2(model, opt=config.optimizer.name, **options)
    except (AssertionError, ImportError, RuntimeError, TypeError) as error:
        raise ValueError(f"optimizer {config.optimizer.name}: {error or type(error).__name__}") from error
    if scale != 1.0:
        scale_positions(optimizer, model, scale)
    return optimizer


def scale_positions(optimizer: torch.optim.Optimizer, model: nn.Module, scale: float) -> None:
    """Gives the parameters of encodings groups of their own that learn `scale` times as fast, by what timm's schedules look at."""
    names = position_names(model)
    positions = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in positions]
        if not own:
            continue
        faster = {**group, "params": own, "lr_scale": group.get("lr_scale", 1.0) * scale}
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in positions]
        if group["params"]:
            optimizer.add_param_group(faster)
        else:
            group.update(faster)


def create_schedule(optimizer: torch.optim.Optimizer, config: Config) -> Scheduler:
    """The learning rate as a function of the number of steps taken: `step_update(step)` sets it, nothing is remembered."""
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=config.schedule.name,
        num_epochs=config.trainer.max_steps,
        warmup_epochs=config.schedule.warmup_steps,
        warmup_lr=config.schedule.warmup_lr,
        min_lr=config.schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,  # so that timm's epochs are our steps
    )
    return schedule


def create_average(model: nn.Module, trainer: Trainer) -> ModelEmaV3 | None:
    """The moving average of the parameters. Buffers (strengths, statistics) are copied, as are integers."""
    if trainer.ema_decay is None:
        return None
    return ModelEmaV3(model, decay=trainer.ema_decay, use_warmup=True, exclude_buffers=True)


class Strengths:
    """What a handover moves in a model: the strengths of relative encodings rise, those of absolute positions fall."""

    def __init__(self, model: nn.Module, config: Config):
        self.handover, self.value = config.handover, None if config.handover is None else 0.0
        moving = {encoding.name for encoding in config.encodings if "strength" not in encoding.given()}
        self.rising: list[Encoding] = []
        self.falling: list[Encoding] = []
        self.embeddings: list[Tensor] = []
        inside: set[nn.Module] = set()  # parts of a sum that moves as a whole, with the terms of its prefix tokens
        for module in model.modules() if config.handover else ():
            if isinstance(module, Combined) and all(part.name in moving for part in module.parts):
                self.rising.append(module)
                inside |= set(module.parts)
            elif isinstance(module, Encoding) and module.name in moving and module not in inside:
                (self.falling if module.family == "absolute" else self.rising).append(module)
            if isinstance(faded := getattr(module, "absolute_strength", None), Tensor):
                self.embeddings.append(faded)

    def before_step(self, step: int) -> None:
        """Sets the strengths for the step that comes after `step` steps."""
        if self.handover is None:
            return
        self.value = self.handover.strength(step)
        for encoding in self.rising:
            encoding.set_strength(self.value)
        for encoding in self.falling:
            encoding.set_strength(1.0 - self.value)
        for faded in self.embeddings:
            faded.fill_(1.0 - self.value)
