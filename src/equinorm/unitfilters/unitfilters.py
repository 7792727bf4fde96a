"""Filters that stay on the unit sphere while an optimizer moves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..errors import counted, meant
from ..models.flat import refuse_flat_model, refuse_flat_optimizer
from ..models.handle import Handle
from ..models.layers import LAYERS, TRANSPOSED
from ..models.parametrized import originals, parametrized_layers
from ..models.unwrapping import unwrap, unwrap_optimizers
from .functional import Filters, Over, mean_over, project_all_, tangent_all_
from .parametrization import UnitFilter, has_unit_filters

__all__ = ["UnitFilters"]

Project = Literal["after_step", "before_step"]


class UnitFilters:
    """Every filter back to length 1 after every step of an optimizer.

    >>> equinorm.unit_filters_(model)
    >>> handle = equinorm.UnitFilters(model, optimizer).attach()
    >>> loss.backward(); optimizer.step()          # as ever; closures, GradScaler, foreach and fused included

    Nothing happens before `attach()`, and nothing in it: filters that do not have length 1 get it with the first step
    or with `project_()`. What the optimizer remembers is left as it is.

    Parameters may be sharded (DTensor: FSDP2), with `unit_filters_` on the model before; along the axis of the filters
    nothing is communicated.

    Args:
        model: whose layers `unit_filters_` was put on; or any other, with `layers` or `parameters`.
        optimizer: one, or several. A filter goes back after the step of the last one in this list that has it.
        zero_mean: filters lose their means too: True for those over inputs and window, "window" for those over the
            window of each input channel. Layers of `unit_filters_` know by themselves whether they do.
        project: "after_step", or "before_step": then what is trained with is at length 1 as the step begins and the
            step's own length is still in it (as in airbench94_muon).
        tangent: the gradient loses its part along the filter first, so that momentum gathers no length.
        layers: names or patterns of layers whose weights are held, instead of all that have unit filters.
        parameters: weights that are held, filters along the first axis, instead of all that have unit filters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        zero_mean: bool | Over = False,
        project: Project = "after_step",
        tangent: bool = False,
        layers: Iterable[str] = (),
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self.optimizers = unwrap_optimizers(optimizer)
        given: tuple[Any, ...] = self.optimizers
        for one in given:
            refuse_flat_optimizer(one)
            if not isinstance(one, Optimizer):
                raise TypeError(
                    f"expected a torch.optim.Optimizer, got {type(one).__name__}; of a wrapper, pass what it wraps"
                )
        refuse_flat_model(model)
        _check_project(project)
        self.model = model
        self.zero_mean, self.project, self.tangent = zero_mean, project, tangent
        self._filters = _find_filters(unwrap(model), mean_over(zero_mean), layers, parameters)
        self._holder = self._find_holders()
        self._handle: Handle | None = None
        self.steps = 0

    def _find_holders(self) -> dict[str, int]:
        """Weight -> the number of the last optimizer that has it; those that none has, and need none, are let go."""
        holder: dict[str, int] = {}
        groups = [
            {id(p): group for group in optimizer.param_groups for p in group["params"]} for optimizer in self.optimizers
        ]
        for name, filters in self._filters.items():
            holders = [number for number, of in enumerate(groups) if id(filters.weight) in of]
            if not holders and filters.weight.requires_grad:
                raise ValueError(
                    f"the optimizer does not have {name}, whose filters are to be held at length 1: make it after "
                    "unit_filters_(model), and name all optimizers of the model"
                )
            for number in holders:
                if groups[number][id(filters.weight)].get("weight_decay", 0.0) != 0.0:
                    raise ValueError(
                        f"the optimizer decays {name}, whose filters are held at length 1 and cannot decay: give it "
                        "a group with weight_decay=0, as unitfilters.parameter_groups(model, weight_decay) does"
                    )
                holder[name] = number
        if not holder:
            raise ValueError("all weights with unit filters are frozen: there is nothing to be held")
        return holder

    # -- a step --------------------------------------------------------------------------------------------------------

    def attach(self) -> Handle:
        """Act in every step of the optimizers from now on; `remove()` what is returned to stop."""
        if self._handle is not None:
            raise RuntimeError("already attached to this optimizer; remove() the first handle before attaching again")
        hooks: list[Any] = []
        for number, optimizer in enumerate(self.optimizers):
            if number in self._holder.values():
                hooks.append(optimizer.register_step_pre_hook(partial(self._before_step, number)))
                hooks.append(optimizer.register_step_post_hook(partial(self._after_step, number)))
        self._handle = Handle(repr(self), hooks, then=self._detach)
        return self._handle

    def _detach(self) -> None:
        self._handle = None

    def project_(self) -> None:
        """Every filter to length 1 now, for a start or a loop that does without hooks."""
        project_all_([self._filters[name] for name in self._holder])

    def _held_by(self, number: int) -> list[Filters]:
        return [self._filters[name] for name, holder in self._holder.items() if holder == number]

    def _before_step(
        self, number: int, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        filters = self._held_by(number)
        if self.project == "before_step":
            project_all_(filters)
            self._count(number)
        if not self.tangent:
            return None
        # `args` begins with the optimizer itself
        closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            tangent_all_(filters)
            return None

        def along_the_sphere() -> Any:  # the gradients come into being in the closure, after this hook
            loss = closure()
            tangent_all_(filters)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": along_the_sphere}
        return (args[0], along_the_sphere, *args[2:]), kwargs

    def _after_step(self, number: int, *_: Any) -> None:
        if self.project == "after_step":
            project_all_(self._held_by(number))
            self._count(number)

    def _count(self, number: int) -> None:
        self.steps += number == max(self._holder.values())

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The settings, and how many steps there were."""
        return {"zero_mean": self.zero_mean, "project": self.project, "tangent": self.tangent, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; `zero_mean` must be what it was."""
        _check_project(state["project"])
        if state["zero_mean"] != self.zero_mean:
            raise ValueError(
                f"the state is of UnitFilters(zero_mean={state['zero_mean']!r}), this one has {self.zero_mean!r}: make "
                "it with the same"
            )
        self.project, self.tangent, self.steps = state["project"], state["tangent"], state["steps"]

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitFilters:
        """With its model and optimizers, attached if this one is: `copy.deepcopy((model, optimizer, unit_filters))`."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        for name in ("model", "optimizers", "zero_mean", "project", "tangent", "_filters", "_holder", "steps"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin._handle = None
        if self._handle is not None:
            twin.attach()
        return twin

    def __repr__(self) -> str:
        held = [self._filters[name] for name in self._holder]
        filters = sum(one.weight.shape[one.dim] for one in held)
        mean = f", zero_mean={self.zero_mean!r}" if self.zero_mean else ""
        return (
            f"UnitFilters({counted(filters, 'filter')} of {counted(len(held), 'weight')}{mean}, "
            f"project={self.project!r}{', tangent' if self.tangent else ''})"
        )


def _check_project(project: str) -> None:
    if project not in ("after_step", "before_step"):
        raise ValueError(f'project is "after_step" or "before_step", got {project!r}')


# -- which weights -----------------------------------------------------------------------------------------------------


def _find_filters(
    model: nn.Module, over: Over | None, patterns: Iterable[str], parameters: Iterable[Tensor]
) -> dict[str, Filters]:
    """Name -> filters: of the layers and parameters that are named, or of all layers with unit filters."""
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    parameters = tuple(parameters)
    found: dict[str, Filters] = {}
    if not patterns and not parameters:
        for name, layer in parametrized_layers(model, UnitFilter):
            found |= _filters_of(name, layer, over)
        if not found:
            raise ValueError(
                "the model has no unit filters: call unit_filters_(model) before making the optimizer, or name plain "
                "weights with layers= or parameters="
            )
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LAYERS)}
    for pattern in patterns:
        named = [name for name in layers if fnmatchcase(name, pattern)]
        if not named:
            raise ValueError(f"layers={pattern!r} matches no linear or convolutional layer{meant(pattern, layers)}")
        for name in named:
            found |= _filters_of(name, layers[name], over)
    names = {id(p): name for name, p in model.named_parameters()}
    for number, p in enumerate(parameters):
        name = names.get(id(p), f"parameters[{number}]")
        if p.ndim < 2:
            raise ValueError(f"{name} of shape {tuple(p.shape)} has no filters: leave it out of parameters=")
        found[name] = Filters(p, 0, over)
    for name, filters in found.items():
        if filters.mean_axes and filters.weight[0].numel() == 1:
            raise ValueError(f"{name} has filters of one weight, of which nothing is left without their mean")
    return found


def _filters_of(name: str, layer: nn.Module, over: Over | None) -> dict[str, Filters]:
    """The weight of a layer by its name; v of its parametrization, if that is `UnitFilter`."""
    path = f"{name}." if name else ""
    if has_unit_filters(layer):
        v = originals(layer).original
        own: Filters = originals(layer)[0].filters(v)
        return {f"{path}parametrizations.weight.original": own._replace(over=own.over or over)}
    if parametrize.is_parametrized(layer, "weight"):
        raise ValueError(f"the weight of {name} is parametrized by another method; its filters cannot be held")
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return {f"{path}weight": Filters(weight, 1 if isinstance(layer, TRANSPOSED) else 0, over)}
