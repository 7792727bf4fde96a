"""What a model is called with: a tensor, a tuple of positional arguments or a dict of keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["as_arguments", "call"]


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as `(args, kwargs)`.

    >>> as_arguments({"x": 1}), as_arguments((1, 2))
    (((), {'x': 1}), ((1, 2), {}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def call(model: nn.Module, inputs: Any) -> Any:
    """What the model makes of its inputs.

    >>> logits = call(model, {"input_ids": tokens})
    """
    args, kwargs = as_arguments(inputs)
    return model(*args, **kwargs)
