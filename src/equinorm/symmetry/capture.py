"""Capture a model as a flat ATen graph with `torch.export`, and say what each of its inputs is."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..models.flat import refuse_flat_model, refuse_shards
from ..models.modes import autocast_off
from ..models.patterns import Keep
from ..models.unwrapping import unwrap
from .shapes import leaves, settle, storages_of
from .traceless import forgotten, is_plain, undisturbed

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__).parent.parent
PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class TraceError(RuntimeError):
    """The model could not be captured; the message says why and what to do. Nothing was changed."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model under its first name; other names of the same tensor are listed in `aliases`."""

    name: str
    shape: torch.Size
    aliases: tuple[str, ...] = ()
    frozen_because: str | None = None


@dataclass(frozen=True)
class Captured:
    """An exported graph and what its placeholders are."""

    module: fx.GraphModule
    placeholders: tuple[str, ...]
    parameters: dict[str, Parameter]  # by placeholder
    constants: dict[str, Tensor]  # tensors whose values are fixed: lifted constants and index buffers
    buffers: dict[str, torch.Size]
    inputs: dict[str, torch.Size]
    every_parameter: tuple[Parameter, ...]  # also those the graph does not use
    call_sites: dict[str, str]  # for each module, the line of the user's code that called it


def capture(model: nn.Module, example_inputs: Any, keep: Iterable[str] = ()) -> Captured:
    """Export `model` on `example_inputs`; parameters that `keep` names, or their modules, count as constants."""
    model = unwrap(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    refuse_flat_model(model)
    refuse_shards(
        model,
        "equinorm.trace",
        "trace the model before it is sharded, or a copy on the meta device, and give symmetry= afterwards",
    )
    parameters = describe_parameters(model, keep)
    args, kwargs = example_arguments(model, example_inputs)
    exported, call_sites = export(model, args, kwargs)
    _refuse_batched(exported.graph_module, model)
    if _must_functionalise(exported.graph_module, writable=set(exported.graph_signature.inputs_to_buffers)):
        exported = _functional(exported)
    settle(exported.graph_module)
    return _described(model, exported, parameters, call_sites)


def _refuse_batched(module: fx.GraphModule, model: nn.Module) -> None:
    """`torch.func.vmap` may leave tensors in the graph that show one example and stand for many."""
    for node in module.graph.nodes:
        for leaf in leaves(node.meta.get("val")):
            if isinstance(leaf, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf):
                raise TraceError(
                    f"could not capture {type(model).__name__}: its forward uses torch.func ({node.target}) in a way "
                    "that torch.export does not follow. Write what it maps over as a batch"
                )


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without writes; as it is where torch cannot do that (a write to a constant): then the interpreter
    freezes whatever shares memory with what is written to."""
    with warnings.catch_warnings(), redirect_stderr(StringIO()):  # torch 2.6 warns of its own doings here
        warnings.simplefilter("ignore")
        try:
            return exported.run_decompositions({})
        except Exception:
            return exported


def example_arguments(model: nn.Module, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple of positional arguments or a dict of keyword arguments, as `(args, kwargs)`.

    Only shapes and dtypes matter, so a meta tensor serves as well as a real one.
    """
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, tuple | list):
        args, kwargs = tuple(example_inputs), {}
    else:
        args, kwargs = (example_inputs,), {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def place(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_meta and device.type != "meta":
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        return leaf

    args, kwargs = pytree.tree_map(place, (args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise TypeError(
            "example_inputs must hold at least one tensor: pass a tensor, a tuple of positional arguments or a dict of "
            f"keyword arguments for {type(model).__name__}.forward, got {type(example_inputs).__name__}"
        )
    return args, kwargs


def describe_parameters(model: nn.Module, keep: Iterable[str] = ()) -> dict[str, Parameter]:
    """Every name of every parameter; names of one tensor share a description, unusable tensors say why."""
    named: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    for name, tensor in named:
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise TraceError(f"parameter {name!r} is not initialized yet: run the model once on real data first")
    kept = Keep(model, keep)
    groups: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        groups.setdefault(_place(tensor), []).append((name, tensor))
    others = [("buffer " + name, tensor) for name, tensor in model.named_buffers()]
    overlapping = _overlaps([members[0] for members in groups.values()] + others)
    described: dict[str, Parameter] = {}
    for members in groups.values():
        (first, tensor), names = members[0], [name for name, _ in members]
        because = _unusable(tensor)
        if because is None and first in overlapping:
            because = f"shares storage with {overlapping[first]}"
        if because is None and any(name in kept for name in names):
            because = "kept as asked"
        parameter = Parameter(first, tensor.shape, tuple(names[1:]), because)
        described.update(dict.fromkeys(names, parameter))
    return described


def _unusable(tensor: Tensor) -> str | None:
    if type(tensor) not in (nn.Parameter, Tensor):
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout})"
    if tensor.is_quantized or tensor.dtype not in PLAIN_DTYPES:
        return f"has dtype {tensor.dtype}"
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is an expanded view of itself"
    return None


def _place(tensor: Tensor) -> Any:
    """Where a tensor lives: two names with the same place are one parameter."""
    if tensor.layout != torch.strided or type(tensor) not in (nn.Parameter, Tensor):
        return id(tensor)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _overlaps(tensors: list[tuple[str, Tensor]]) -> dict[str, str]:
    """Names of tensors that share memory with another one, and that other's name."""
    spans: dict[Any, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors:
        if tensor.layout == torch.strided and type(tensor) in (nn.Parameter, Tensor) and tensor.numel():
            start = int(tensor.storage_offset())
            last = start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            spans.setdefault(tensor.untyped_storage()._cdata, []).append((start, last, name))
    found: dict[str, str] = {}
    for members in spans.values():
        for start, last, name in members:
            for other_start, other_last, other in members:
                if other != name and start <= other_last and other_start <= last:
                    found.setdefault(name, other)
    return found


# -- exporting ---------------------------------------------------------------------------------------------------------


def source_line(file: str, line: int | str) -> str:
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"


@lru_cache(maxsize=1024)
def is_torch_file(file: str) -> bool:
    return Path(file).is_relative_to(_TORCH)


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[dict[str, str]]:
    """For each module, the innermost line outside torch that called it (exported nodes know the module only)."""
    names = {id(module): name for name, module in model.named_modules()}
    sites: dict[str, str] = {}

    def record(module: nn.Module, _: Any) -> None:
        name = names.get(id(module))
        frame = sys._getframe(1) if name else None
        while frame is not None and is_torch_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename != __file__ and name:
            sites[name] = source_line(frame.f_code.co_filename, frame.f_lineno)

    handle = nn.modules.module.register_module_forward_pre_hook(record)
    try:
        yield sites
    finally:
        handle.remove()


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """`torch.export` without its traces in settings, logs and random state; and by module path who called the module.

    An autocast region that the call stands in is left: its roundings are no part of the model.

    >>> exported, call_sites = export(model, (images,), {})
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be traced: give the torch.nn.Module that it was made of")
    with forgotten(model), undisturbed(model), autocast_off(), _recorded_calls(model) as call_sites:
        try:
            return torch.export.export(model, args, kwargs, strict=False), call_sites
        except Exception as error:
            raise TraceError(_why_not(model, args, kwargs, error)) from error


def _why_not(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__

    def describe(leaf: Any) -> str:
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)

    given = pytree.tree_map(describe, (args, kwargs))
    shapes = ", ".join([*map(str, given[0]), *(f"{k}={v}" for k, v in given[1].items())])
    takes_values = "fake tensor in the exported program constant" in text or "tensor subclasses" in text
    line = _user_line(error) or (_line_that_takes_values(model, args, kwargs) if takes_values else "")
    head = f"could not capture {type(model).__name__} on example inputs ({shapes}){line}: {first}"
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__:
        return (
            f"{head}\nIts forward decides something by the values of a tensor. Replace that branch (torch.where, "
            "torch.cond), or trace the part of the model that does not have it."
        )
    if takes_values:
        return (
            f"{head}\nIts forward takes values out of tensors (.data, .numpy(), torch.tensor(...), autograd.grad), "
            "which torch.export does not follow: use .detach() and torch's own operations there."
        )
    return f"{head}\nCheck that `model(*example_inputs)` runs with inputs of these shapes and dtypes."


class _DataWatcher(TorchFunctionMode):
    """Notes the line of the user's code that last asked for the `.data` of a tensor."""

    line = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            mine = [f for f in traceback.extract_stack() if _is_users(f.filename)]
            self.line = f", at {source_line(mine[-1].filename, mine[-1].lineno or 0)}" if mine else ""
        return func(*args, **(kwargs or {}))


def _line_that_takes_values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The export noticed too late where values were taken out of a tensor: the model is run once more to see it."""
    copies = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    with forgotten(model), undisturbed(model), torch.no_grad(), _DataWatcher() as watcher:
        try:
            torch.func.functional_call(model, copies, args, kwargs)
        except Exception:
            return watcher.line
    return watcher.line


def _is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor made by it, nor ours."""
    made = file.startswith(("<string>", "<eval_with_key>", "<frozen"))
    return not made and not is_torch_file(file) and not Path(file).is_relative_to(_HERE)


def _user_line(error: BaseException) -> str:
    """The innermost line of the user's code in which an error arose, or one that led to it."""
    link: BaseException | None = error
    while link is not None:
        frames = [(f.filename, f.lineno) for f in traceback.extract_tb(link.__traceback__)]
        mine = [f for f in frames if _is_users(f[0])]
        if mine:
            return f", at {source_line(mine[-1][0], mine[-1][1] or 0)}"
        link = link.__cause__ or link.__context__
    return ""


# -- writes and aliases ------------------------------------------------------------------------------------------------

# These hand out their input itself in some modes, although their schemas do not say so.
_MAY_ALIAS = ("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.type_as", "aten.einsum")
# In-place ops that leave every label as it was: who else sees the tensor loses what was known of its values, no more.
_KEEPS_LABELS = (
    "aten.relu_.",
    "aten.leaky_relu_.",
    "aten.dropout_.",
    "aten.feature_dropout_.",
    "aten.abs_.",
    "aten.neg_.",
)


def keeps_labels(node: fx.Node) -> bool:
    return str(node.target).startswith(_KEEPS_LABELS)


def is_inplace(node: fx.Node) -> bool:
    """Whether a node writes to its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.arguments:
        return False
    alias = node.target._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node writes to, by the schema of its op: of all arguments, in lists and by keyword."""
    if not isinstance(node.target, torch._ops.OpOverload) or str(node.target) == "aten.detach_.default":
        return []  # which writes no number
    written: list[fx.Node] = []
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        argument = node.args[position] if position < len(node.args) else node.kwargs.get(declared.name)
        written += [leaf for leaf in leaves(argument) if isinstance(leaf, fx.Node)]
    return written


def memory_of(node: fx.Node) -> frozenset[int]:
    """Which storages a node's tensors lie in, as they did when the model ran for the export.

    What schemas do not say is seen here too: that einsum gave a view of its operand, or dropout its input itself.
    """
    return storages_of(node)


def _is_view(node: fx.Node) -> bool:
    if callable(node.target) and getattr(node.target, "__name__", "") == "getitem":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return _says_alias(node) or _may_alias(node)


def _may_alias(node: fx.Node) -> bool:
    return str(node.target).startswith(_MAY_ALIAS)


def _says_alias(node: fx.Node) -> bool:
    """Whether the schema of a node's op says that a result may be a view of an argument."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return any(result.alias_info is not None for result in node.target._schema.returns)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views shows."""
    while (
        node.op == "call_function"
        and node.args
        and isinstance(node.args[0], fx.Node)
        and (_is_view(node) or is_inplace(node))
    ):
        node = node.args[0]
    return node


class Memory:
    """Which nodes of a graph lie in the same memory: by the schemas of the ops, and by where their tensors lay."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.order = {node: i for i, node in enumerate(module.graph.nodes)}
        self.base = {node: base_of(node) for node in self.order}
        self._by_base: dict[fx.Node, list[fx.Node]] = {}
        self._by_storage: dict[int, list[fx.Node]] = {}
        for node, root in self.base.items():
            self._by_base.setdefault(root, []).append(node)
            for storage in memory_of(node):
                self._by_storage.setdefault(storage, []).append(node)

    def sharing(self, node: fx.Node) -> list[fx.Node]:
        """Every node that may lie in the memory of this one, itself among them."""
        members = dict.fromkeys(self._by_base[self.base[node]])
        for storage in memory_of(node):
            members.update(dict.fromkeys(self._by_storage[storage]))
        return list(members)

    def is_read_after(self, node: fx.Node, now: fx.Node) -> bool:
        return any(self.order[user] > self.order[now] for user in node.users if user in self.order)

    def is_hidden(self, node: fx.Node) -> bool:
        """Whether a node is a view that the schema of its op says nothing of: torch's own functionalisation, which
        goes by schemas, loses what is written to it."""
        if not isinstance(node.target, torch._ops.OpOverload) or _says_alias(node):
            return False
        own = memory_of(node)
        return bool(own) and any(own & memory_of(source) for source in node.all_input_nodes)


def _must_functionalise(module: fx.GraphModule, writable: set[str]) -> bool:
    """Whether a write changes labels of a tensor that something else still looks at, so that the graph is needed in
    a form without writes.

    `writable` names the placeholders one may write to: buffers, whose content is frozen anyway.
    """
    memory = Memory(module)
    needed = False
    nested = (m for m in module.children() if isinstance(m, fx.GraphModule))
    if any(_must_functionalise(m, writable=set()) for m in nested):
        needed = True
    for node in memory.order:
        for written in written_by(node):
            if any(memory.is_hidden(relative) for relative in memory.sharing(written)):
                return False  # it would be lost: the interpreter freezes all that shares this memory
            others = [member for member in memory.sharing(written) if member not in (written, node)]
            read_after = any(memory.is_read_after(member, node) for member in others)
            if read_after and any(map(_may_alias, (written, *others))):
                return False  # and so where an op may have handed out its input itself
            if not is_inplace(node) or written is not node.args[0]:
                needed = True  # no rule is asked about such a write
                continue
            if keeps_labels(node) or memory.base[written].name in writable:
                continue
            if memory.base[written].op == "placeholder":
                needed = True
            for relative in memory.sharing(written):
                # an older view of the same memory that is read after the write
                before = memory.order[relative] < memory.order[node]
                needed |= relative is not written and before and memory.is_read_after(relative, node)
    return needed


# -- describing the result ---------------------------------------------------------------------------------------------


def _described(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    parameters: dict[str, Parameter],
    call_sites: dict[str, str],
) -> Captured:
    signature = exported.graph_signature
    # properties that are computed anew at each access
    of_parameter, of_buffer = signature.inputs_to_parameters, signature.inputs_to_buffers
    of_constant, mutated = signature.inputs_to_lifted_tensor_constants, set(signature.buffers_to_mutate.values())
    written = _written(exported.graph_module) | {name for name, target in of_buffer.items() if target in mutated}
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    found: dict[str, Parameter] = {}
    constants: dict[str, Tensor] = {}
    buffers: dict[str, torch.Size] = {}
    inputs: dict[str, torch.Size] = {}
    for node in nodes:
        name, value = node.name, node.meta.get("val")
        if name in of_parameter:
            found[name] = parameters[of_parameter[name]]
        elif name in of_buffer or name in of_constant:
            fixed = model.get_buffer(of_buffer[name]) if name in of_buffer else exported.constants[of_constant[name]]
            # what may be loaded or learned later has no values: numbers in buffers, and whatever is written to
            numbers = name in of_buffer and (fixed.dtype.is_floating_point or fixed.dtype.is_complex)
            if numbers or name in written or not is_plain(fixed):
                buffers[name] = fixed.shape
            else:
                constants[name] = fixed.detach().cpu()
        elif isinstance(value, Tensor):
            inputs[name] = value.shape
    every = tuple({id(p): p for p in parameters.values()}.values())
    names = tuple(n.name for n in nodes)
    return Captured(exported.graph_module, names, found, constants, buffers, inputs, every, call_sites)


def _written(module: fx.GraphModule) -> set[str]:
    """Names of placeholders that the graph, or a region inside it, writes to."""
    found = set()
    memory = Memory(module)
    for node in module.graph.nodes:
        for written in written_by(node):
            found |= {member.name for member in memory.sharing(written) if member.op == "placeholder"}
        regions = [n for n in node.all_input_nodes if n.op == "get_attr"]
        inner = [m for n in regions if isinstance(m := getattr(module, str(n.target), None), fx.GraphModule)]
        if any(_written(m) for m in inner):
            found |= {base_of(n).name for n in node.all_input_nodes}
    return found
