"""Does a model still compute what it did? Compare its outputs on random inputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UserError
from .checkpoints import first_line

# Rounding every weight once more changes the outputs a little: what is accepted for weights of each dtype.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def outputs(model: nn.Module, examples: Sequence[Any]) -> tuple[list[Tensor], torch.dtype]:
    """All output tensors on each example, and the precision they were computed in.

    In float64, so that what differs comes from the weights; models that insist on another dtype run in their own.
    """
    try:
        return outputs_in(copy.deepcopy(model).double(), examples, torch.float64), torch.float64
    except Exception:  # tried again below, where it is told
        single = copy.deepcopy(model).float()
    try:
        return outputs_in(single, examples, torch.float32), torch.float32
    except Exception as error:
        raise UserError(f"the model cannot run on its example inputs: {first_line(error)}") from error


@torch.no_grad()
def outputs_in(model: nn.Module, examples: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """All output tensors of a model of this dtype on each example."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    found: list[Tensor] = []
    for example in examples:
        example = pytree.tree_map(cast, example)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a model that draws numbers must draw the same ones
            result = model(**example) if isinstance(example, dict) else model(*example)
        found += [leaf.double() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return found


def relative_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest change of any output element, relative to the largest element of its tensor."""
    change = 0.0
    for old, new in zip(before, after, strict=True):
        if not bool(torch.isfinite(old).all()):
            raise UserError("the model's outputs are not finite on random inputs, so there is nothing to compare with")
        if old.numel():
            size = float(old.abs().max())
            difference = float((new - old).abs().max())
            ratio = difference / size if size else float(difference > 0)
            change = max(change, ratio if ratio == ratio else float("inf"))
    return change


def tolerance(model: nn.Module) -> float:
    """What is accepted for the least precise floating-point parameter of a model."""
    return max((TOLERANCE.get(p.dtype, 1e-6) for p in model.parameters() if p.is_floating_point()), default=1e-6)
