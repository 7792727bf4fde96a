"""What the interpreter knows about a tensor of the graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import labels as lb
from .groups import Groups
from .scales import FROZEN


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph, seen through its scales. It is one of three things.

    * An **activation**: `labels` holds a scale label for each element.
    * A **known constant**: `known` holds its values, from which the labels follow.
    * A **parameter**, perhaps viewed, cast or multiplied by constants: `parameter` names it and `coordinates` hold, for
      each axis of the parameter, the index at which each element was read (`None`: at an index we do not know). It has
      no labels until an op treats it like an activation: a weight's scale is a *difference* of two labels.
    """

    shape: torch.Size
    given: Tensor | None = None
    known: Tensor | None = None
    parameter: str | None = None
    coordinates: tuple[Tensor | None, ...] = ()
    static: bool = False  # does not depend on the model's inputs
    shift: float = 0.0  # a parameter plus this number is what this is: a gain that is stored minus 1
    groups: Groups | None = None  # its rows belong to experts, which does not say to which: see `groups`
    table: bool = False  # a parameter read row by row: an embedding, so a weight although nothing multiplies it
    fan_in: Tensor | None = (
        None  # per element, labels of the inputs of the linear layer that made it (a last axis more)
    )

    @cached_property
    def labels(self) -> Tensor:
        if self.given is not None:
            return self.given
        if self.known is not None:
            return lb.from_values(self.known)
        raise AssertionError("a parameter has no labels of its own")  # Interpreter.labels opens them

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def plus(self, number: float) -> Value:
        """A parameter to which a number was added, as a gain of its own."""
        return replace(self, shift=number)

    def mapped(self, function: Any, shape: torch.Size) -> Value:
        """The value after an op that only moves elements, given as a function on index-like tensors."""
        if self.parameter is not None:
            moved = tuple(None if c is None else function(c) for c in self.coordinates)
            return replace(self, shape=shape, coordinates=moved, fan_in=None)
        return Value(shape, given=function(self.labels), static=self.static)

    def expanded(self, shape: Any) -> Value:
        shape = torch.Size(shape)
        return self if shape == self.shape else self.mapped(lambda t: t.expand(shape), shape)


def activation(labels: Tensor, **more: Any) -> Value:
    return Value(labels.shape, given=labels, **more)


def frozen(shape: Any, static: bool = False) -> Value:
    return activation(lb.constant(FROZEN, tuple(shape)), static=static)


def known(values: Tensor) -> Value:
    return Value(values.shape, known=values, static=True)


@dataclass(eq=False)
class Form:
    """How the elements of one parameter scale:  w[e] -> w[e] · s[plus[e]] / s[minus[e]].

    `plus` and `minus` are label tensors over the parameter's own axes, of length one where the label does not depend on
    the axis; a structural-zero label says that nothing depends on that element. `None` stands for "no such term".
    """

    shape: torch.Size
    plus: Tensor | None = None
    minus: Tensor | None = None
    roles: list[Role] = field(default_factory=list)
    shift: float = 0.0  # it is the parameter plus this number that scales

    @property
    def multiplicative(self) -> bool:
        """Weights and gains count in the norm, offsets do not."""
        return any(role.multiplies for role in self.roles)


@dataclass(frozen=True, eq=False)
class Role:
    """One use of a parameter: by which node, as a factor or as an offset, and for an offset the inputs of its layer."""

    node: int
    multiplies: bool
    layer: bool = False  # sums over inputs, so it counts in the depth of the network; a gain does not
    freezes: bool = False
    fan_in: Tensor | None = None


def axes_of(labels: Tensor | None) -> frozenset[int] | None:
    """The axes a term of a form depends on."""
    return None if labels is None else frozenset(a for a, n in enumerate(labels.shape) if n > 1)
