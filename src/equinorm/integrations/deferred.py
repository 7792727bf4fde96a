"""What callbacks of training programs share: a method that begins when training does, and goes on after a resume."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ..models.unwrapping import unwrap

__all__ = ["Deferred", "check_options", "inputs_from_batch"]


class Deferred:
    """A method (`ENorm`, `MeanShiftRejection`) that is made at the start of training, with the state of a checkpoint.

    Programs load the state of callbacks before there is an optimizer: the state waits here until `begin`. After `end`
    the state of the method is still there, for a checkpoint that is written last.

    >>> deferred = Deferred()
    >>> deferred.load_state_dict(checkpoint["enorm"])
    >>> deferred.begin(ENorm(model, optimizer, inputs))
    """

    def __init__(self) -> None:
        self.method: Any = None
        self._handle: Any = None
        self._waiting: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        """Whether the method acts in the steps of its optimizer now."""
        return self._handle is not None

    def begin(self, method: Any) -> None:
        """Attach a method, after it has taken over the state that waits for it."""
        self.end()
        if self._waiting:
            method.load_state_dict(self._waiting)
        self._waiting = {}
        self.method, self._handle = method, method.attach()

    def end(self) -> None:
        """Detach; a second time does nothing."""
        if self._handle is None:
            return
        self._handle.remove()
        self._last = self.method.state_dict()
        self.method = self._handle = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the method, or the one that waits; empty if there was none yet."""
        if self.method is not None:
            state: dict[str, Any] = self.method.state_dict()
            return state
        return dict(self._waiting or self._last)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have `begin` load this state."""
        self._waiting = dict(state)


def check_options(method: type, options: Mapping[str, Any], given: tuple[str, ...]) -> None:
    """Raise TypeError now for options that the method would refuse when training starts.

    `given` are the arguments that the callback passes itself.
    """
    known = [name for name in inspect.signature(method).parameters if name not in given]
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"{method.__name__} has no option {', '.join(map(repr, unknown))} here; it has {', '.join(known)}"
        )


def inputs_from_batch(model: nn.Module, batch: Any) -> Any:
    """The part of a training batch that a model's `forward` takes, as example inputs.

    Of a dict the entries that are named as parameters of `forward`; of a tuple or list as many leading entries as it
    has parameters without defaults; anything else as it is.

    >>> inputs_from_batch(model, (images, labels))
    (images,)
    """
    # a wrapper passes on whatever it gets, so what is taken stands in the model inside
    parameters = inspect.signature(unwrap(model).forward).parameters.values()
    if isinstance(batch, Mapping):
        named = {p.name for p in parameters}
        kept = {key: value for key, value in batch.items() if key in named and key not in LABELS}
        if not kept:
            raise ValueError(
                f"forward of {type(model).__name__} takes none of {', '.join(map(repr, batch))}, which a batch has: "
                "give example_inputs=..."
            )
        return _detached(kept)
    if not isinstance(batch, tuple | list):
        return _detached((batch,))
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    count = max(len(required), 1)
    if len(batch) < count:
        raise ValueError(
            f"forward of {type(model).__name__} takes {count} arguments and a batch has {len(batch)} entries: "
            "give example_inputs=..."
        )
    return _detached(tuple(batch[:count]))


LABELS = ("label", "labels", "label_ids", "return_loss", "num_items_in_batch")
"""What transformers' models take besides their inputs, to make a loss."""


def _detached(inputs: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if hasattr(x, "detach") else x, inputs)
