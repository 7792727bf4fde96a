"""What norms absorb (arpit2019: BN(c W x) = BN(W x)): a norm does not see the size of what it reads, if ε follows.

RMSNorm and LayerNorm read x / sqrt(mean x² + ε). With x' = s x and ε' = s² ε nothing changes, so a stream that is read
by norms alone has a scale of its own. ε is one number for all channels and groups, hence one s for a module; a module
that reads two streams merges them. Statistics of BatchNorm go along: μ' = s μ, v' = s² v. In evaluation they could
carry one scale per channel, v' = s² (v + ε) - ε, which must stay positive and spoils later training.

ε is no parameter but a number on a module. It is found there by its value in the graph, and followed by the
interpreter like a parameter with one element: if several uses of it disagree, it is frozen, and what it is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from . import labels as lb
from .values import Form, Role, Value, activation

if TYPE_CHECKING:
    from .interpreter import Interpreter
    from .symmetry import Term

__all__ = ["MODES", "Carried", "Norms"]

MODES = (False, True, "inference")

# What a parameter may go through before 1 is added to it and the sum is still a gain of it: other names, other dtypes.
_SAME = ("to.", "_to_copy.", "detach.", "alias.", "view.", "reshape.", "expand.", "unsqueeze.", "type_as.", "clone.")


@dataclass(frozen=True, eq=False)
class Carried:
    """A number or a buffer of a norm that follows the scale of what the norm reads: v + shift -> (v + shift) · s^k."""

    module: str
    attribute: str
    term: Term
    shift: float = 0.0
    default: float | None = None
    """What the module takes where the attribute is None."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}" if self.module else self.attribute

    def value(self, model: nn.Module) -> float | Tensor:
        """What the model has there now."""
        try:
            found = getattr(model.get_submodule(self.module), self.attribute)
        except AttributeError as error:
            raise ValueError(f"{type(model).__name__} has no {self.name!r}; trace this model anew") from error
        if found is None:
            assert self.default is not None
            return self.default
        return found if isinstance(found, Tensor) else float(found)

    def moved(self, model: nn.Module, padded: Tensor) -> float | Tensor:
        """What it is after the move, or an error that says why it cannot be; `padded` as for a `Term`."""
        before, factor = self.value(model), self.term.log_scale(padded).exp()
        if not isinstance(before, Tensor):
            after = before * float(factor)
            limit = torch.finfo(torch.float32)
            if not limit.tiny <= after <= limit.max:
                raise OverflowError(f"{self.name} would go from {before:.3g} to {after:.3g}; use smaller log_scales")
            return after
        if before.is_meta:
            raise ValueError(f"buffer {self.name!r} is on the meta device and has no values to rescale")
        moved = ((before.double() + self.shift) * factor.to(before.device) - self.shift).to(before.dtype)
        if self.attribute == "running_var" and bool((moved < 0).any()):
            raise OverflowError(
                f"{self.name} would be negative ({float(moved.min()):.3g}): (variance + ε) · s² must stay above ε. Use "
                "log-scales that are not so far below 0 there, or trace with invariances=True"
            )
        if not bool(torch.isfinite(moved).all()):
            raise OverflowError(f"{self.name} would leave the range of {before.dtype}; use smaller log_scales")
        return moved


class Norms:
    """The ε and statistics of a model's norms, as the interpreter meets them."""

    def __init__(self, model: nn.Module, mode: bool | str) -> None:
        self.mode = mode
        self.modules: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.carried: dict[str, Callable[[Term], Carried]] = {}
        """By the name of the form that follows it: makes it what the symmetry keeps."""
        self._names: dict[tuple[int, str], str] = {}
        self._numbers: dict[str, tuple[int, float]] = {}  # of each ε its module and its value
        self._handled: set[fx.Node] = set()

    # -- rules ask for --------------------------------------------------------------------------------------------

    def absorb(self, t: Interpreter, x: Value, epsilon: float | None, axes: Any) -> bool:
        """Let a norm over `axes` take the scale of what it reads; whether it can."""
        labels = t.labels(x)
        if epsilon == 0:
            t.collapse(labels, axes)
            return True
        name = self._find(t, epsilon, x)
        if name is None:
            return False
        one = t.collapse(labels, range(x.ndim))
        self._follow(t, name, t.power(lb.narrowed(one).reshape(-1)[:1].view(()), 2.0))
        return True

    def absorb_batch(self, t: Interpreter, x: Value, epsilon: float, training: bool, statistics: bool) -> bool:
        """The same for a norm over axis 1 with running statistics, which go along."""
        module = self._module(t)
        if not statistics:
            return self.absorb(t, x, epsilon, [axis for axis in range(x.ndim) if axis != 1])
        if not isinstance(module, _NormBase) or module.running_mean is None or module.running_var is None:
            return False
        if self.mode == "inference" and not training:
            labels = t.collapse(t.labels(x), [axis for axis in range(x.ndim) if axis != 1])
            each = labels.select(0, 0)
            while each.ndim > 1:
                each = each.select(-1, 0)
            self._follow_buffer(t, module, "running_mean", each)
            self._follow_buffer(t, module, "running_var", t.power(each, 2.0), shift=epsilon)
            return True
        if not self.absorb(t, x, epsilon, range(x.ndim)):
            return False
        one = lb.narrowed(t.collapse(t.labels(x), range(x.ndim))).reshape(-1)[:1]
        self._follow_buffer(t, module, "running_mean", one.expand(len(module.running_mean)))
        self._follow_buffer(t, module, "running_var", t.power(one, 2.0).expand(len(module.running_var)))
        return True

    def added(self, t: Interpreter, x: Value, number: Any) -> Value | None:
        """A variance (or a deviation) plus ε, in norms that are written out; None if this is nothing of the kind."""
        if not isinstance(number, float) or x.parameter is not None or x.known is not None:
            return None
        if t.all_frozen(x.labels) or (name := self._find(t, number, x)) is None:
            return None
        one = t.collapse(x.labels, range(x.ndim)).expand(x.shape)
        self._follow(t, name, lb.narrowed(one).reshape(-1)[:1].view(()))
        return activation(one)

    def shifted(self, t: Interpreter, x: Value, number: Any) -> Value | None:
        """A gain that is stored minus a number: 1 + w. None if this is nothing of the kind."""
        if x.parameter is None or x.shift or not isinstance(number, int | float) or not number:
            return None
        source = t.node.args[0]
        while isinstance(source, fx.Node) and source.op == "call_function":
            if not str(source.target).removeprefix("aten.").startswith(_SAME):
                return None
            source = source.args[0]
        if not isinstance(source, fx.Node) or source.op != "placeholder":
            return None
        return x.plus(float(number))

    def finish(self, t: Interpreter) -> None:
        """Freeze every ε whose value its module uses in another way too."""
        for node in t.nodes:
            if node in self._handled or node.op != "call_function":
                continue
            module, numbers = self._module(t, node), set(_numbers_in(node))
            for name, (owner, value) in self._numbers.items():
                if owner == id(module) and value in numbers:
                    t.freeze(Value(torch.Size([]), parameter=name))

    # -- following ------------------------------------------------------------------------------------------------

    def _module(self, t: Interpreter, node: fx.Node | None = None) -> nn.Module | None:
        """The module in whose code a node stands."""
        stack = (node or t.node).meta.get("nn_module_stack") or {}
        return self.modules.get(str(list(stack.values())[-1][0])) if stack else self.modules.get("")

    def _find(self, t: Interpreter, epsilon: float | None, x: Value) -> str | None:
        """The form of the ε of the module whose code is running, if it has one attribute of that name and value."""
        module = self._module(t)
        if module is None:
            return None
        found = [
            attribute
            for attribute, value in vars(module).items()
            if "eps" in attribute.lower()
            and (value is None if epsilon is None else isinstance(value, float) and value == epsilon)
        ]
        if len(found) != 1:
            return None
        attribute = found[0]
        value = epsilon
        if value is None:
            tensor = t.node.args[0]
            assert isinstance(tensor, fx.Node)
            value = torch.finfo(tensor.meta["val"].dtype).eps
        path = next(path for path, other in self.modules.items() if other is module)
        default = value if epsilon is None else None
        name = self._open(t, module, attribute, torch.Size([]), lambda term: Carried(path, attribute, term, 0, default))
        self._numbers[name] = id(module), value
        self._handled.add(t.node)
        return name

    def _open(
        self, t: Interpreter, module: nn.Module, attribute: str, shape: torch.Size, make: Callable[[Term], Carried]
    ) -> str:
        key = id(module), attribute
        if key not in self._names:
            path = next(path for path, other in self.modules.items() if other is module)
            self._names[key] = name = f"number {path}.{attribute}"
            t.forms[name] = Form(shape)
            self.carried[name] = make
        return self._names[key]

    def _follow(self, t: Interpreter, name: str, labels: Tensor) -> None:
        t.assign(Value(torch.Size([]), parameter=name), labels, None, Role(t.now, multiplies=False))

    def _follow_buffer(
        self, t: Interpreter, module: nn.Module, attribute: str, labels: Tensor, shift: float = 0.0
    ) -> None:
        shape = torch.Size(labels.shape)
        path = next(path for path, other in self.modules.items() if other is module)
        name = self._open(t, module, attribute, shape, lambda term: Carried(path, attribute, term, shift))
        value = Value(shape, parameter=name, coordinates=(torch.arange(shape[0]),))
        t.assign(value, labels, None, Role(t.now, multiplies=False))


def _numbers_in(node: fx.Node) -> list[float]:
    leaves = torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, float)]
