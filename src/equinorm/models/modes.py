"""The modes a model is run in: training or evaluation, module by module, and without its surroundings' autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

__all__ = ["autocast_off", "evaluating", "modes_kept"]


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Every module is in its mode again afterwards, those too that are no longer in the model; yields the modes.

    >>> with modes_kept(model):
    ...     model.eval()
    """
    modes = {module: module.training for module in model.modules()}
    try:
        yield modes
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode in here.

    >>> with evaluating(model), torch.no_grad():
    ...     logits = model(x)
    """
    with modes_kept(model) as modes:
        for module in modes:  # not `model.eval()`, which a module may have overridden
            module.training = False
        yield


@contextmanager
def autocast_off() -> Iterator[None]:
    """No autocast but a model's own: what surrounds a call is no part of the model.

    >>> with torch.autocast("cuda", torch.bfloat16), autocast_off():
    ...     model(x)  # in float32
    """
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
