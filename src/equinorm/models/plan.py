"""What is to be done to a model. A `Plan` collects it; nothing changes before all of it is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .graph import LAYER_OPS, NORM_OPS, Call, ModuleGraph, Step, channels_meet, has_own_forward
from .kinds import OTHER_NORMS, is_channel_norm, is_method_layer, is_norm
from .layers import LAYERS, tied_weights
from .parametrized import originals
from .patterns import Keep
from .reports import ModuleRow
from .surgery import (
    attach_norm_,
    bias_of,
    describe,
    describe_parametrizations,
    gain_and_offset,
    has_gain,
    has_hooks,
    inherit_affine_,
    is_parametrized,
    norm_and_tail,
    replace_module,
    torch_layer,
    with_tail,
)

__all__ = ["Norm", "Plan"]

_TORCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_NOT_CALLED = "the forward pass does not call it on these inputs"


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the channels in axis 1 that a method may replace."""

    path: str
    module: nn.Module
    channels: int
    ndim: int
    """Axes of its input."""
    positions: int
    """Spatial positions of its input in the example; 1 for inputs of shape (batch, channels)."""
    calls: tuple[Call, ...]
    output: Step
    """What the norm itself puts out (in its first call)."""
    tail: dict[str, nn.Module]
    """Modules that the norm calls on what it puts out, like the activation of timm's `BatchNormAct2d`."""
    layer: Call | None
    """The call of the layer whose output it reads and nobody else does."""
    alone: str
    """Why there is no such layer."""

    @property
    def place(self) -> dict[str, Any]:
        """Device and dtype for what takes its place."""
        tensors = [*self.module.parameters(), *self.module.buffers(), self.output.value]
        like = next(t for t in tensors if t.is_floating_point())
        return {"device": like.device, "dtype": like.dtype}


class Plan:
    """What is to be done to a model: rows for the report, and steps that run once all is noted."""

    def __init__(
        self,
        model: nn.Module,
        graph: ModuleGraph,
        *,
        keep: Iterable[str] = (),
        final_batchnorm: bool = False,
        remove_rest: bool = False,
        fold: bool = False,
    ) -> None:
        self.model = model
        self.graph = graph
        self._fold = fold
        self.remove_rest = remove_rest
        """Whether norms that a method cannot take the place of are removed instead of kept."""
        self.converted: dict[str, ModuleRow] = {}
        self.kept: dict[str, ModuleRow] = {}
        self.already = 0
        """How many modules are what the method would make of them."""
        self._steps: list[Callable[[], object]] = []
        self.norms_behind: list[tuple[nn.Module, nn.Module]] = []
        """Layers, and the norms that are to go behind them."""
        self._keep = Keep(model, keep)
        self._tied = tied_weights(model)
        self._layers = self._called_layers()
        self.last = self._layers[-1] if self._layers else None
        """The layer that is called last."""
        self._final = self.last if final_batchnorm else None
        self.final_norm: str | None = None
        """The batch norm that stands behind it and is to stay."""
        self.norms = self._find_norms()
        """The norms that may be replaced, in the order of the forward pass."""

    # -- noting ------------------------------------------------------------------------------------------------

    def change(self, path: str, now: str, why: str = "", step: Callable[[], object] | None = None) -> None:
        """Note that the module at `path` becomes `now`, and the step that makes it so."""
        self.kept.pop(path, None)
        self.converted[path] = ModuleRow(path, describe(self.graph.modules[path]), now, why)
        if step is not None:
            self.later(step)

    def swap(self, path: str, new: nn.Module, why: str = "") -> None:
        """Note that `new` takes the place of the module at `path`."""
        old = self.graph.modules[path]
        self.change(path, describe(new), why, lambda: replace_module(self.model, old, new))

    def remove(self, norm: Norm, why: str = "") -> None:
        """Note that a norm goes; what it called on its own output stays."""
        self.swap(norm.path, with_tail(None, norm.tail), why)

    def leave(self, norm: Norm, why: str) -> None:
        """Note that a method cannot take the place of a norm: it is kept, or removed if that was asked for."""
        if self.remove_rest:
            self.hand_over(norm, f"removed as asked; {why}")
        else:
            self.keep(norm.path, why)

    def hand_over(self, norm: Norm, why: str = "", *, offset: bool = True) -> None:
        """Note that a norm goes, and that the layer before it takes its gain (and its offset) if it can."""
        remark = self.why_not_hand_over(norm)
        if norm.layer is not None and not remark and gain_and_offset(norm.module) != (None, None):
            self.later(partial(inherit_affine_, norm.layer.module, norm.module, offset))
            remark = f"{norm.layer.path} has its gain{' and offset' if offset else ''}"
        self.remove(norm, "; ".join(filter(None, (why, remark))))

    def why_not_hand_over(self, norm: Norm) -> str:
        """Why no layer can take the gain and offset of a norm; empty if one can."""
        gain, offset = gain_and_offset(norm.module)
        if gain is None and offset is None:
            return ""
        if norm.layer is None:
            return "its gain and offset go with it"
        why = self.refused(norm.layer.path, norm.layer.module, replace=False)
        if not why and is_method_layer(norm.layer.module):
            why = "it has its own"
        if not why and gain is not None and not bool((gain == 1).all()):
            why = self.why_not_change_weight(norm.layer)
        if not why and offset is not None:
            why = self.why_no_bias(norm.layer)
        return f"{norm.layer.path} cannot take its gain and offset: {why}" if why else ""

    def keep(self, path: str, why: str, *, already: bool = False) -> None:
        """Note that a module stays as it is; `already`: because it is what the method would make of it."""
        if path not in self.converted and path not in self.kept:
            self.kept[path] = ModuleRow(path, describe(self.graph.modules[path]), "", why)
            self.already += already

    def remark(self, path: str, text: str) -> None:
        """Add a remark to a change that was noted."""
        row = self.converted[path]
        self.converted[path] = replace(row, why="; ".join(filter(None, (row.why, text))))

    def later(self, step: Callable[[], object]) -> None:
        """Note a step that is part of a change, to be run after those before it."""
        self._steps.append(step)

    def run(self) -> None:
        """Make the changes, all but the norms that go behind layers."""
        for step in self._steps:
            step()

    def attach_norms(self) -> None:
        """Put the norms behind layers: last, because data-dependent initialization looks at the bare layers."""
        for layer, norm in self.norms_behind:
            attach_norm_(layer, norm)

    def ordered(self, rows: Mapping[str, ModuleRow]) -> tuple[ModuleRow, ...]:
        """Rows in the order in which the model registers its modules."""
        return tuple(rows[path] for path in self.graph.modules if path in rows)

    # -- asking ------------------------------------------------------------------------------------------------

    @property
    def has_no_norms(self) -> bool:
        """Whether the model has no norm of any kind, nor a layer that a method of this package made."""
        if self.graph.functions(NORM_OPS, is_norm):
            return False
        return not any(is_norm(m) or is_method_layer(m) or is_parametrized(m) for m in self.model.modules())

    def layers(self) -> list[Call]:
        """The first call of every layer, in the order of the forward pass; what else has weights is noted as kept."""
        called = {call.module for call in self._layers}
        for path, module in self.graph.modules.items():
            if isinstance(module, LAYERS) and module not in called:
                read = not self.graph.calls.get(path) and self.graph.is_read(module)
                self.keep(path, "its weight is read without it being called" if read else _NOT_CALLED)
        for path, op in self.graph.functions(LAYER_OPS, lambda module: isinstance(module, LAYERS)).items():
            self.keep(path, f"it calls {op} as a function, which cannot be replaced; layers that are modules can")
        return self._layers

    def _called_layers(self) -> list[Call]:
        first: dict[nn.Module, Call] = {}
        for call in self.graph.layer_calls():
            first.setdefault(call.module, call)
        return list(first.values())

    def ends(self) -> set[str]:
        """Paths of the layers that no norm belongs behind: the last one, and those that make an output."""
        found = set() if self.last is None else {self.last.path}
        for call in self._layers:
            step = self.graph.layer_step(call)
            if step is not None and any(reader.op == "output" for reader in step.users):
                found.add(call.path)
        return found

    def why_not(self, call: Call, *, replace: bool = False) -> str:
        """Why a method must not touch the weight of a layer (or not replace the layer); empty if it may."""
        path, layer = call.path, call.module
        if refused := self.refused(path, layer, replace=replace):
            return refused
        if is_parametrized(layer):
            return f"its weight is parametrized already ({describe_parametrizations(layer)})"
        if replace and has_own_forward(layer, torch_layer(layer)):
            return f"{type(layer).__name__} has a forward of its own"
        return self.why_not_change_weight(call)

    def why_not_change_weight(self, call: Call, *, baked: bool = False) -> str:
        """Why a layer's weight cannot be scaled; empty if it can. `baked`: a parametrization is gone by then."""
        layer = call.module
        if len(calls := self.graph.calls[call.path]) > 1:
            return f"it is called {len(calls)} times"
        if not self.graph.weight_is_used_as_it_is(call):
            return "its forward changes the weight before it is used"
        if is_parametrized(layer):
            if not baked and not has_gain(originals(layer)[0]):
                return f"its weight is made by {describe_parametrizations(layer)}, which has no gain"
        elif (weight := layer._parameters.get("weight")) is None:
            return "its weight is not a parameter of its own"
        elif id(weight) in self._tied:
            return f"its weight is shared: {' = '.join(self._tied[id(weight)])}"
        return self.graph.read_elsewhere(call)

    def why_no_bias(self, call: Call) -> str:
        """Why a bias that the layer does not have could not be given to it; empty if it could."""
        layer = call.module
        if bias_of(layer) is None and has_own_forward(layer, torch_layer(layer)):
            return f"{call.path} has no bias, and a forward of its own that may not use one"
        return ""

    def why_no_norm_behind(self, call: Call) -> str:
        """Why no norm can be put behind a layer; empty if one can."""
        if refused := self.refused(call.path, call.module, replace=False):
            return refused
        if len(calls := self.graph.calls[call.path]) > 1:
            return f"it is called {len(calls)} times"
        step = self.graph.layer_step(call)
        if step is None or not channels_meet(call.module, step):
            return "its output does not have its channels in axis 1"
        if hasattr(call.module, "norm"):
            return "it has an attribute called norm already"
        return ""

    def refused(self, path: str, module: nn.Module, *, replace: bool = True) -> str:
        """Why a module must not be touched (or not be replaced), whatever the method; empty if it may."""
        if path in self._keep or any(f"{path}.{name}" in self._keep for name in module._parameters):
            return "kept as asked"
        if replace and path == "":
            return "it is the model itself"
        if replace and has_hooks(module):
            return "it has hooks, which would be lost: convert the model before they are registered"
        return ""

    def _find_norms(self) -> list[Norm]:
        found = []
        for path, module in self.graph.modules.items():
            if isinstance(module, OTHER_NORMS):
                self.keep(path, "it normalizes each position by itself, not channels over positions")
            elif is_channel_norm(module):
                norm = self._norm(path, module)
                if isinstance(norm, str):
                    self.keep(path, norm)
                else:
                    found.append(norm)
        for path, op in self.graph.functions(NORM_OPS, is_norm).items():
            self.keep(path, f"it calls {op} as a function, which cannot be replaced; norms that are modules can")
        return sorted(found, key=lambda n: n.calls[0].steps[0].position)

    def _norm(self, path: str, module: nn.Module) -> Norm | str:
        """Describe a norm, or say why it cannot be replaced."""
        calls = tuple(self.graph.calls.get(path, ()))
        if refused := self.refused(path, module):
            return refused
        if not calls:
            return _NOT_CALLED
        if elsewhere := self.graph.read_elsewhere(calls[0]):
            return elsewhere
        shapes = [call.inputs[0].value.shape for call in calls if len(call.inputs) == 1]
        if len(shapes) < len(calls) or len({len(shape) for shape in shapes}) > 1 or not calls[0].outputs:
            return "its calls do not all read one tensor of the same kind"
        output, tail = calls[0].outputs[0], dict[str, nn.Module]()
        base = next((kind for kind in _TORCH_NORMS if isinstance(module, kind)), type(module))
        if has_own_forward(module, base):
            parts = norm_and_tail(calls[0]) if len(calls) == 1 else None
            if parts is None:
                return f"{type(module).__name__} has a forward of its own that does more than normalize"
            output, tail = parts
        feeder = self.graph.feeder(path)
        layer, alone = (feeder, "") if isinstance(feeder, Call) else (None, feeder)
        if layer is not None and layer is self._final and isinstance(module, _BatchNorm):
            self.already += 1
            self.final_norm = path
            return "the batch norm behind the last layer, as asked"
        if layer is not None and not self._fold and (after := _norm_after(calls[0])):
            # with this one gone the next one would be behind the layer, and converting again would take that too
            layer, alone = None, f"{after} normalizes its output once more"
        channels = getattr(module, "num_features", None) or module.num_channels
        positions = min(shape[2:].numel() for shape in shapes)
        return Norm(path, module, int(channels), len(shapes[0]), positions, calls, output, tail, layer, alone)  # type: ignore[arg-type]


def _norm_after(call: Call) -> str:
    """The path of a norm that reads the output of a norm directly; empty if there is none."""
    readers = [reader for step in call.outputs for reader in step.users]
    return next((c.path for reader in readers for c in reader.calls if is_channel_norm(c.module)), "")
