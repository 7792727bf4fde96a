"""The user's own model and optimizer inside what other programs put around them: known here, and nowhere else.

Wrappers are recognized by the names of their classes, so nothing is imported. Whatever is not known is taken for the
user's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["as_written", "unwrap", "unwrap_optimizer", "unwrap_optimizers"]

MODELS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",  # torch.optim.swa_utils
    "ModelEma": "ema",  # timm's, oldest first
    "ModelEmaV2": "module",
    "ModelEmaV3": "module",
    "WeightAveraging": "_average_model",  # Lightning's callbacks, EMAWeightAveraging among them
    "AbstractGradSampleModule": "_module",  # Opacus
    "GradSampleModule": "_module",
    "_FabricModule": "_original_module",
}
"""Class of a wrapper -> where the model is inside it."""

OPTIMIZERS = (
    "optimizer",  # accelerate's AcceleratedOptimizer, Lightning's and Fabric's
    "original_optimizer",  # Opacus' DPOptimizer
    "_optimizer",
)
"""Where an optimizer is inside a wrapper."""


def unwrap(model: Any) -> nn.Module:
    """The user's own module inside compiled, parallel, averaged, private and adapted models.

    `torch.compile`, DDP, AveragedModel, timm's ModelEmaV3, Lightning's EMAWeightAveraging, Opacus' GradSampleModule,
    PEFT's PeftModel, Fabric's module, one in another as well.

    >>> unwrap(torch.compile(model)) is model
    True
    """
    while (inner := _model_inside(model)) is not None:
        model = inner
    found: nn.Module = model
    return found


def _model_inside(model: Any) -> nn.Module | None:
    inner = getattr(model, "_orig_mod", None)  # torch.compile
    if isinstance(inner, nn.Module):
        return inner
    names = [kind.__name__ for kind in type(model).__mro__]
    if "WeightAveraging" in names and getattr(model, "_average_model", None) is None:
        raise ValueError(f"{type(model).__name__} has no averaged model before training starts: give it then")
    for name in names:
        inner = getattr(model, MODELS[name], None) if name in MODELS else None
        if isinstance(inner, nn.Module):
            return inner
    if "PeftModel" in names and not _adds_a_prompt(model):
        inner = model.get_base_model()
        return inner if isinstance(inner, nn.Module) and inner is not model else None
    return None


def _adds_a_prompt(model: Any) -> bool:
    """Whether PEFT puts learned vectors before the inputs, so that the model inside does not say all."""
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer that steps, inside accelerate's, Opacus' and Lightning's.

    A wrapper is known by having the parameter groups of what it holds, so that an optimizer that keeps another one
    besides its own state stays what it is.

    >>> unwrap_optimizer(accelerator.prepare(optimizer)) is optimizer
    True
    """
    while (inner := _optimizer_inside(optimizer)) is not None:
        optimizer = inner
    return optimizer


def _optimizer_inside(optimizer: Any) -> Any | None:
    for name in OPTIMIZERS:
        inner: Any = getattr(optimizer, name, None)
        if inner is optimizer or not hasattr(inner, "param_groups"):
            continue
        if getattr(optimizer, "param_groups", inner.param_groups) is inner.param_groups:
            return inner
    return None


def unwrap_optimizers(optimizer: Any) -> tuple[Optimizer, ...]:
    """One optimizer, or several in a list or tuple, without what is around them; each once, in order.

    >>> unwrap_optimizers([muon, accelerator.prepare(adamw)])
    (muon, adamw)
    """
    given: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    found = [unwrap_optimizer(each) for each in given]
    if not found:
        raise ValueError("expected an optimizer, got an empty list")
    for each in found:
        if not hasattr(each, "param_groups"):
            raise TypeError(
                f"expected the optimizer that trains the model, got {type(each).__name__}; without training there "
                "is equinorm.balance_(model, example_inputs)"
            )
    return tuple({id(each): each for each in found}.values())


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run a model as its author wrote it, without what other programs hang on it for training.

    Off for that time are Opacus' hooks, which would keep what they see, and the forward that accelerate puts in the
    place of a model's own (autocast, outputs in float32).
    """
    hooks = {id(owner): owner for module in model.modules() for owner in _private_hooks(module)}
    enabled = [owner for owner in hooks.values() if owner.hooks_enabled]
    replaced = {module: vars(module)["forward"] for module in model.modules() if _is_replaced(module)}
    try:
        for owner in enabled:
            owner.hooks_enabled = False
        for module in replaced:
            del module.forward
            original = vars(module)["_original_forward"]
            if getattr(original, "__func__", None) is not type(module).forward:
                module.forward = original
        yield
    finally:
        for owner in enabled:
            owner.hooks_enabled = True
        for module, forward in replaced.items():
            module.forward = forward


def _private_hooks(module: nn.Module) -> Iterator[Any]:
    for hook in module._forward_hooks.values():
        owner = getattr(hook, "__self__", None)
        if hasattr(owner, "hooks_enabled"):
            yield owner


def _is_replaced(module: nn.Module) -> bool:
    return "forward" in vars(module) and "_original_forward" in vars(module)
