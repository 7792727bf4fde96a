"""Which module feeds which: a model's forward pass as a graph of module calls, for `convert` and `fold`.

The model is captured with `torch.export`, whose nodes say in which call of which module they were made. Regions
of `no_grad` and autocast are read as if they stood in line. Nothing goes by the names of modules.

>>> graph = ModuleGraph(model, torch.rand(2, 3, 64, 64))
>>> graph.feeder("bn1").path     # the layer whose output goes into this norm and nowhere else
'conv1'
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ..symmetry.capture import TraceError, describe_parameters, example_arguments, export, is_inplace
from .layers import LAYERS
from .modes import modes_kept

__all__ = ["Call", "ModuleGraph", "Step", "has_own_forward"]

# How many arguments of a region come before the graph it runs.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
# Ops that rectify, so that about half of the signal's energy goes (arpit2019, section 5, has ReLU only).
RECTIFIERS = frozenset(
    {"relu", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish"}
    | {"hardswish", "hardtanh", "relu6", "softplus", "threshold"}
)
# Ops between a layer and the rectifier it feeds that do not mix channels.
_PASSING = frozenset(
    {"dropout", "feature_dropout", "alpha_dropout", "batch_norm", "alias", "contiguous", "to", "flatten", "view"}
    | {f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)}
)

_NOT_NEGATIVE = frozenset({"relu", "relu6", "sigmoid", "hardsigmoid", "softmax", "softplus", "abs", "exp", "square"})
# Ops whose result is not negative if what they read is not.
_KEEPING_SIGNS = frozenset(
    {"cat", "stack", "mean", "sum", "amax", "dropout", "feature_dropout", "flatten", "view", "reshape", "permute"}
    | {"transpose", "contiguous", "alias", "to", "squeeze", "unsqueeze", "slice", "select", "getitem", "chunk", "split"}
    | {f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)}
)


NORM_OPS = frozenset({"batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm"})
LAYER_OPS = frozenset({"linear", *(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3))})


@dataclass(eq=False)
class Step:
    """One op of the forward pass, or an input of the graph."""

    op: str  # the op's name without namespace, overload and the underscore of in-place ops
    node: fx.Node
    sources: list[Step] = field(default_factory=list, repr=False)
    calls: tuple[Call, ...] = field(default=(), repr=False)  # outermost first
    parameter: str | None = None  # the name of the parameter or buffer it is
    users: list[Step] = field(default_factory=list, repr=False)
    position: int = 0

    @property
    def is_state(self) -> bool:
        """Whether it is a parameter, a buffer or a constant, not an activation."""
        return self.parameter is not None

    @property
    def value(self) -> Any:
        return self.node.meta.get("val")

    @property
    def ndim(self) -> int:
        return self.value.ndim if isinstance(self.value, Tensor) else -1

    @property
    def home(self) -> str:
        """The path of the module in whose own code the op stands."""
        return self.calls[-1].path if self.calls else ""


@dataclass(eq=False)
class Call:
    """One call of one module."""

    path: str
    module: nn.Module
    steps: list[Step] = field(default_factory=list, repr=False)

    @cached_property
    def inputs(self) -> list[Step]:
        """The activations it reads that were made outside."""
        found = {s: None for step in self.steps for s in step.sources if not s.is_state and self not in s.calls}
        return list(found)

    @cached_property
    def outputs(self) -> list[Step]:
        """What it makes that is read outside."""
        made = [step for step in self.steps if not step.is_state]
        return [step for step in made if any(self not in user.calls for user in step.users)]

    @property
    def own_steps(self) -> list[Step]:
        """The ops in the module's own code, not in that of its children."""
        return [step for step in self.steps if step.calls[-1] is self]


class ModuleGraph:
    """The calls that a model's forward pass makes on example inputs, and what flows between them."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        describe_parameters(model)  # refuses what is not initialized yet, with a message of its own
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        exported = _exported(model, example_inputs)
        self.steps: list[Step] = []
        self.calls: dict[str, list[Call]] = {}
        self._calls_by_key: dict[str, Call] = {}
        state = _state_names(exported)
        inputs = {}
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                inputs[node] = self._add(Step("input", node, parameter=state.get(node.name)))
        self._walk(exported.graph_module, inputs)

    # -- reading the exported graph ----------------------------------------------------------------------------

    def _add(self, step: Step) -> Step:
        step.position = len(self.steps)
        self.steps.append(step)
        for source in step.sources:
            source.users.append(step)
        for call in step.calls:
            call.steps.append(step)
        return step

    def _walk(self, module: fx.GraphModule, inputs: Mapping[fx.Node, Any], inner: bool = False) -> Any:
        """Read one graph; values are steps, or tuples of them where a region has several results."""
        values: dict[fx.Node, Any] = dict(inputs)
        for node in module.graph.nodes:
            if node in values or node.op == "get_attr":
                continue
            if node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: values[n])
                if not inner:
                    self._add(Step("output", node, _leaves(results)))
                return results
            region = self._region(module, node)
            if region is not None:
                graph, arguments = region
                places = [n for n in graph.graph.nodes if n.op == "placeholder"]
                feed = dict(zip(places, (values[a] if isinstance(a, fx.Node) else a for a in arguments), strict=True))
                values[node] = self._walk(graph, feed, inner=True)
            elif node.target is operator.getitem and isinstance(values.get(node.args[0]), tuple | list):
                values[node] = values[node.args[0]][node.args[1]]
            else:
                sources = _leaves([values[n] for n in node.all_input_nodes if n in values])
                # what is written into a buffer, a count of batches for instance, is that buffer
                buffer = sources[0].parameter if sources and is_inplace(node) else None
                values[node] = self._add(Step(_op_name(node), node, sources, self._calls_of(node), buffer))
        return ()

    @staticmethod
    def _region(module: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
        skip = _REGIONS.get(str(node.target)) if isinstance(node.target, torch._ops.HigherOrderOperator) else None
        if skip is None or not isinstance(node.args[skip], fx.Node):
            return None
        graph = getattr(module, str(node.args[skip].target))  # type: ignore[union-attr]
        return (graph, tuple(node.args[skip + 1 :])) if isinstance(graph, fx.GraphModule) else None

    def _calls_of(self, node: fx.Node) -> tuple[Call, ...]:
        found = []
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            module = self.modules.get(str(path))
            if module is None:
                continue
            call = self._calls_by_key.get(key)
            if call is None:
                call = self._calls_by_key[key] = Call(str(path), module)
                self.calls.setdefault(str(path), []).append(call)
            found.append(call)
        return tuple(found)

    # -- asking it ---------------------------------------------------------------------------------------------

    def only_call(self, path: str) -> Call | None:
        """The call of a module that is called exactly once."""
        calls = self.calls.get(path, [])
        return calls[0] if len(calls) == 1 else None

    def layer_step(self, call: Call) -> Step | None:
        """The op by which a linear or convolutional layer computes its output; None if it does something else too."""
        step = call.outputs[0] if len(call.outputs) == 1 else None
        while step is not None and step.calls[-1] is not call:
            # a norm attached to the layer (see `attach_norm_`) makes the output; the layer's own op comes before
            before = [s for s in step.calls[-1].inputs if call in s.calls]
            step = before[0] if len(before) == 1 else None
        return step if step is not None and step.op in LAYER_OPS else None

    def weight_is_used_as_it_is(self, call: Call) -> bool:
        """Whether the layer's op reads the weight itself (or what its parametrization makes of it)."""
        step = self.layer_step(call)
        if step is None or len(step.sources) < 2:
            return False
        weight = step.sources[1]  # conv and linear ops take (input, weight, ...)
        if parametrize.is_parametrized(call.module, "weight"):
            return f".{call.path}.parametrizations.weight." in f".{weight.home}."
        return weight.is_state and _found(self.model, weight.parameter) is call.module.weight

    def read_elsewhere(self, call: Call) -> str:
        """Which parameter of a module code outside of it reads too; empty if it does not."""
        own = {id(parameter) for parameter in call.module.parameters()}
        for source in dict.fromkeys(source for step in call.steps for source in step.sources):
            if source.op == "input" and source.is_state and id(_found(self.model, source.parameter)) in own:
                for user in source.users:
                    if all(other.module is not call.module for other in user.calls):
                        return f"{source.parameter} is also read by {self.describe(user)}"
        return ""

    def is_read(self, module: nn.Module) -> bool:
        """Whether any code reads a parameter of a module, be it called or not."""
        own = {id(parameter) for parameter in module.parameters()}
        state = (step for step in self.steps if step.op == "input" and step.is_state and step.users)
        return any(id(_found(self.model, step.parameter)) in own for step in state)

    def functions(self, ops: Collection[str], is_own: Callable[[nn.Module], bool]) -> dict[str, str]:
        """Ops that the code of other modules calls itself: the path of the module in whose code, and the op.

        Only what is done to activations; and linear maps and convolutions only if the weight is a parameter.
        """
        found: dict[str, str] = {}
        for step in self.steps:
            if step.op not in ops or any(is_own(call.module) for call in step.calls):
                continue
            weighted = all(source.op == "input" and source.is_state for source in step.sources[1:2])
            if step.sources[0] in self._activations and (weighted or step.op in NORM_OPS):
                found.setdefault(step.home, step.op)
        return found

    @cached_property
    def _activations(self) -> set[Step]:
        """The steps that depend on an input of the model."""
        found: set[Step] = set()
        for step in self.steps:
            if any(s in found for s in step.sources) or (step.op == "input" and not step.is_state):
                found.add(step)
        return found

    def consumer(self, step: Step) -> Call | str:
        """The call of the layer that reads a step's result as it is, and nobody else does; or why that is not so.

        Empty if there is nothing to say: other code reads it.
        """
        inside = [[c for c in reader.calls if isinstance(c.module, LAYERS)][-1:] for reader in self.readers(step)]
        if not inside or inside[0] == [] or any(calls != inside[0] for calls in inside):
            return ""
        (layer,) = inside[0]
        own = self.layer_step(layer)
        read = own.sources[0] if own is not None else None
        if read is not None and read.op == "pad" and getattr(layer.module, "padding_mode", "zeros") != "zeros":
            read = read.sources[0]
        kind = next(kind for kind in LAYERS if isinstance(layer.module, kind))
        if read is not step or layer.inputs != [step] or has_own_forward(layer.module, kind):
            return f"{layer.path}, which reads it, does more than one convolution or linear map"
        if not channels_meet(layer.module, step):
            return f"it does not normalize the input channels of {layer.path}"
        return layer

    def readers(self, step: Step) -> list[Step]:
        """The steps that read a step's result, each once."""
        return list(dict.fromkeys(step.users))

    def feeder(self, norm: str) -> Call | str:
        """The one call of the layer whose output the norm reads and nobody else does; or why there is none."""
        call = self.only_call(norm)
        if call is None:
            return _called(len(self.calls.get(norm, ())))
        if len(call.inputs) != 1:
            return "it reads more than one tensor"
        source = call.inputs[0]
        for layer in reversed(source.calls):
            if isinstance(layer.module, LAYERS):
                return self._exclusive(layer, call, source)
        if source.op == "input":
            return "it reads the model's input, not the output of a layer"
        return f"its input comes from {self.describe(source)}, not from a layer"

    def _exclusive(self, layer: Call, norm: Call, source: Step) -> Call | str:
        if self.layer_step(layer) is not source:
            return f"{layer.path} does more than one convolution or linear map"
        if len(calls := self.calls[layer.path]) > 1:
            return f"{layer.path}, which feeds it, is called {len(calls)} times"
        others = [step for step in self.readers(source) if norm not in step.calls]
        if others:
            return f"the output of {layer.path} also goes to {self.describe(others[0])}"
        if not channels_meet(layer.module, source):
            return f"it does not normalize the output channels of {layer.path}"
        return layer

    def describe(self, step: Step) -> str:
        if step.op == "output":
            return "the model's output"
        return f"{step.op} in {step.home}" if step.home else step.op

    def layer_calls(self) -> Iterator[Call]:
        """Calls of linear and convolutional layers, in the order of the forward pass."""
        found = [call for calls in self.calls.values() for call in calls if isinstance(call.module, LAYERS)]
        yield from sorted((c for c in found if self.layer_step(c)), key=lambda c: c.steps[0].position)

    def rectified(self, call: Call) -> bool:
        """Whether everything that reads a layer's output rectifies it, after norms, dropout or pooling at most."""
        step = self.layer_step(call)
        if step is None:
            return False
        open_, seen = [step], set()
        while open_:
            for reader in self.readers(open_.pop()):
                if reader in seen or reader.op in RECTIFIERS:
                    continue
                if reader.op not in _PASSING:
                    return False
                seen.add(reader)
                open_.append(reader)
        return True

    @cached_property
    def not_negative(self) -> set[Step]:
        """The steps whose results are known not to be negative, the model's inputs being taken not to be."""
        found: set[Step] = set()
        for step in self.steps:
            sources = [s for s in step.sources if not s.is_state]
            if step.op == "hardtanh":
                bounds = step.node.args[1:2]
                known = bool(bounds) and isinstance(bounds[0], int | float) and bounds[0] >= 0
            elif step.op in ("add", "mul"):  # with a number or a parameter nothing is known
                known = len(sources) == 2 and all(s in found for s in sources)
            elif step.op in _KEEPING_SIGNS:
                known = all(s in found for s in sources)
            else:
                known = step.op in _NOT_NEGATIVE or (step.op == "input" and not step.is_state)
            if known:
                found.add(step)
        return found

    @cached_property
    def residual_sums(self) -> list[ResidualSum]:
        """Sums of a branch and a skip that start at the same tensor, in the order of the forward pass."""
        before: dict[Step, int] = {}  # the activations a step depends on, itself included; bit i: step i
        depth: dict[Step, int] = {}  # layers on the longest path to it
        layers = {self.layer_step(call) for call in self.layer_calls()}
        found = []
        for step in self.steps:
            sources = [s for s in dict.fromkeys(step.sources) if not s.is_state]
            before[step] = 1 << step.position
            for source in sources:
                before[step] |= before[source]
            depth[step] = max((depth[s] for s in sources), default=0) + (step in layers)
            if step.op != "add" or len(sources) != 2 or not _same_shape(*sources):
                continue
            skip, branch = sorted(sources, key=lambda s: depth[s])
            common = before[skip] & before[branch]
            if common and depth[skip] < depth[branch]:
                found.append(ResidualSum(step, self.steps[common.bit_length() - 1], skip, branch))
        return found


@dataclass(frozen=True, eq=False)
class ResidualSum:
    """x + f(x): the sum, the tensor x (before a projection, if there is one), and the two terms."""

    sum: Step
    start: Step
    skip: Step
    branch: Step


def has_own_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a module's class computes something else than the torch class it extends."""
    kind = type(module)
    same = kind.forward is base.forward
    conv_forward = getattr(base, "_conv_forward", None)
    return not same or getattr(kind, "_conv_forward", None) is not conv_forward


def channels_meet(layer: nn.Module, step: Step) -> bool:
    """Whether axis 1 of a layer's input or output, which norms look at, holds the layer's channels."""
    expected = 2 if isinstance(layer, nn.Linear) else len(layer.kernel_size) + 2  # type: ignore[arg-type]
    return step.ndim == expected


def _exported(model: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    args, kwargs = example_arguments(model, example_inputs)
    with _without_stack_traces():
        try:
            return export(model, args, kwargs)[0]
        except TraceError:
            if not model.training:
                raise
            # A batch of one has no statistics to train with, but the modules are called all the same.
            with modes_kept(model), suppress(TraceError):  # the first error is about the model as it was given
                return export(model.eval(), args, kwargs)[0]
            raise


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Nobody reads where in Python the nodes of this graph were made; noting it is a tenth of the time of `convert`."""
    config: Any = sys.modules.get("torch.fx.config")
    if not hasattr(config, "do_not_emit_stack_traces"):  # an older torch always notes it
        yield
        return
    before, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _state_names(exported: torch.export.ExportedProgram) -> dict[str, str]:
    signature = exported.graph_signature
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def _found(model: nn.Module, name: str | None) -> Tensor | None:
    """The parameter or buffer of this name."""
    path, _, leaf = (name or "").rpartition(".")
    found = getattr(model.get_submodule(path), leaf, None) if leaf else None
    return found if isinstance(found, Tensor) else None


def _op_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).split(".")[1].rstrip("_")
    return getattr(node.target, "__name__", str(node.target))


def _leaves(tree: Any) -> list[Step]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Step)]


def _same_shape(a: Step, b: Step) -> bool:
    return isinstance(a.value, Tensor) and isinstance(b.value, Tensor) and a.value.shape == b.value.shape


def _called(times: int) -> str:
    if times == 0:
        return "the forward pass does not call it on these inputs"
    return f"it is called {times} times"
