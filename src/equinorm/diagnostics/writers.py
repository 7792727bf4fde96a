"""Where a recorder's numbers go: TensorBoard, wandb, MLflow, accelerate, Lightning's loggers, or any function.

Which one it is shows in what it offers, so none of them is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

__all__ = ["Write", "writing_to"]

Write = Callable[[Mapping[str, float], int], None]
"""`write(numbers by tag, step)`."""


def writing_to(writer: Any) -> Write:
    """A function that gives numbers to `writer` in the way it takes them.

    =============================================  =======================================
    a writer with                                  as
    =============================================  =======================================
    `add_scalar(tag, number, step)`                TensorBoard's SummaryWriter
    `log_metrics(numbers, step=step)`              the module `mlflow`, Lightning's loggers
    `log_dict(numbers, step=step)`                 Lightning's Fabric
    `log(numbers, step=step)`                      a run of wandb, accelerate's Accelerator
    none of these                                  any function, called `(numbers, step)`
    =============================================  =======================================

    >>> write = writing_to(SummaryWriter("runs"))
    >>> write({"energy/0.weight": 1.0}, 100)
    """
    if isinstance(writer, nn.Module | type):
        raise TypeError(f"cannot write to {_name(writer)}: give a logger or a function (of a LightningModule, .logger)")
    if hasattr(writer, "add_scalar"):
        return lambda numbers, step: _one_by_one(writer.add_scalar, numbers, step)
    for name in ("log_metrics", "log_dict", "log"):
        if hasattr(writer, name):
            log = getattr(writer, name)
            return lambda numbers, step: log(dict(numbers), step=step)
    if callable(writer):
        return lambda numbers, step: writer(dict(numbers), step)
    raise TypeError(
        f"cannot write to a {type(writer).__name__}: give something with add_scalar, log_metrics, log_dict or log, or "
        "a function of (numbers, step)"
    )


def _one_by_one(add: Callable[[str, float, int], Any], numbers: Mapping[str, float], step: int) -> None:
    for tag, number in numbers.items():
        add(tag, number, step)


def _name(writer: Any) -> str:
    return writer.__name__ if isinstance(writer, type) else f"a {type(writer).__name__}"
