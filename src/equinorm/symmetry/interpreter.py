"""Walk an exported graph once and find out how every tensor may be rescaled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from . import labels as lb
from .capture import Captured, Memory, is_inplace, keeps_labels, memory_of, written_by
from .groups import Groups
from .invariances import Norms
from .scales import FROZEN, ZERO, Scales
from .shapes import is_symbol, leaves, size_of, symbolic_axes
from .traceless import is_plain
from .values import Form, Role, Value, activation, axes_of, frozen, known

# More fresh labels than this for one tensor are not worth their memory: the tensor is frozen instead.
MOST_LABELS = 1 << 22
# Constants up to this many elements are computed, so that index arithmetic in the graph keeps its values.
MOST_CONSTANT = 1 << 24

# What may be done with a symbol (see `shapes`) that is an argument: give a result its size, add it, multiply by it.
_TAKES_SIZES = frozenset(
    (
        "view",
        "reshape",
        "expand",
        "unflatten",
        "_unsafe_view",
        "view_copy",
        "expand_copy",
        "broadcast_to",
        "new_zeros",
        "new_ones",
        "new_empty",
        "zeros",
        "ones",
        "empty",
    )
)
_TAKES_NUMBERS = frozenset(["add", "sub", "mul", "div"])
# Looks at the shape of what it is given, or hands out parts of it, as it is: nothing to be read from it, none lost.
_MAY_BE_EMPTY = frozenset(
    (
        "cat",
        "stack",
        "slice",
        "narrow",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unsafe_chunk",
        "unsafe_split",
        "view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "detach",
        "alias",
        "clone",
        "contiguous",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "empty_like",
        "_assert_tensor_metadata",
    )
)


class Arguments:
    """An op's arguments by name, defaults filled in; remembers which ones its rule has looked at."""

    def __init__(self, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._values: dict[str, Any] = {}
        self._seen: set[str] = set()
        for position, declared in enumerate(target._schema.arguments):
            if position < len(args):
                self._values[declared.name] = args[position]
            elif declared.name in kwargs:
                self._values[declared.name] = kwargs[declared.name]
            else:
                self._values[declared.name] = declared.default_value if declared.has_default_value() else None

    def __getitem__(self, name: str) -> Any:
        self._seen.add(name)
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """An argument that not every overload of the rule has."""
        self._seen.add(name)
        return self._values.get(name)

    def unseen(self) -> list[Any]:
        return [value for name, value in self._values.items() if name not in self._seen]

    def everything(self) -> dict[str, Any]:
        self._seen.update(self._values)
        return self._values


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _holds_less(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether numbers of one floating dtype lose digits or range in another."""
    if not _is_float(dtype) or not _is_float(than):
        return False
    a, b = torch.finfo(dtype), torch.finfo(than)
    return a.eps > b.eps or a.max < b.max


def _without_symbols(name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Arguments with the symbols among them replaced by numbers or frozen values, if the op is one that allows it."""

    def replaced(leaf: Any) -> Any:
        if not is_symbol(leaf):
            return leaf
        return size_of(leaf) if name in _TAKES_SIZES else frozen(())

    if name not in _TAKES_SIZES and name not in _TAKES_NUMBERS:
        return None
    found: tuple[Any, Any] = pytree.tree_map(replaced, (args, kwargs))
    return found


class Interpreter:
    """Runs the graph on labels. Rules (see `rules/`) are called with it and an op's arguments."""

    def __init__(self, captured: Captured, batchnorm: str = "preserve", norms: Norms | None = None) -> None:
        self.captured = captured
        self.batchnorm = batchnorm
        self.norms = norms  # where norms absorb scales: their ε, which follow
        self.scales = Scales()
        self.forms: dict[str, Form] = {}
        self.nodes: list[fx.Node] = []  # every node met, in order; scales and roles refer to them by index
        self.now = -1  # index of the node being interpreted
        self.unknown_ops: dict[str, int] = {}  # ops without a rule, and the first node that used each
        self.failed_rules: dict[str, str] = {}  # ops whose rule could not cope with its arguments, and why
        self.depends: list[list[int]] = []  # for each node, the nodes it reads
        parameters = (n for n in captured.module.graph.nodes if n.name in captured.parameters)
        dtypes = {n.meta["val"].dtype for n in parameters if isinstance(n.meta.get("val"), Tensor)}
        self._own_dtypes = {dtype for dtype in dtypes if _is_float(dtype)} or {torch.float32}
        self._index: dict[fx.Node, int] = {}
        self._outer: list[int] = []  # what the region being interpreted depends on
        self._scopes: list[tuple[dict[fx.Node, Any], Memory]] = []  # the graphs being interpreted, the outermost first

    # -- the walk --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        program = self.captured
        inputs = [self._placeholder(name) for name in program.placeholders]
        outputs = self.graph(program.module, inputs)
        self.freeze(*self._tensors(outputs))  # what leaves the model keeps its scale
        if self.norms is not None:
            self.norms.finish(self)

    def graph(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Interpret one graph; called again for the sub-graphs of `no_grad` and autocast regions."""
        env: dict[fx.Node, Any] = {}
        memory = Memory(module)
        self._scopes.append((env, memory))
        feed = iter(inputs)
        result: Any = ()
        for node in module.graph.nodes:
            if node.op == "output":
                self._enter(node)
                result = self._load(node.args[0], env)
                continue
            self._enter(node)
            if node.op == "placeholder":
                env[node] = next(feed)
            elif node.op == "get_attr":
                env[node] = self._attribute(module, node)
            else:
                env[node] = self._call(node, env)
                if written := written_by(node):
                    self._write(node, written, env, memory)
        self._scopes.pop()
        return result

    def _write(self, node: fx.Node, written: list[fx.Node], env: dict[fx.Node, Any], memory: Memory) -> None:
        """Later readers see the new content of what a node has written to, and of all that lies in its memory.

        Of an in-place op on its first argument the result is the new content, as its rule says. Whatever else shares
        that memory, or is written in another way, is neither known nor free from here on.
        """
        plain = is_inplace(node) and written == [node.args[0]]
        if plain:
            env[written[0]] = env[node]
            self._index[written[0]] = self.now
        shared = dict.fromkeys(member for each in written for member in memory.sharing(each))
        others = [member for member in shared if member in env and member is not node]
        if plain:
            others = [member for member in others if member is not written[0]]
        outer = [
            (scope, member)
            for scope, around in self._scopes[:-1]
            for member in around.order
            if member in scope and any(memory_of(member) & memory_of(each) for each in written)
        ]
        touched = [(env, member) for member in others if memory.is_read_after(member, node)] + outer
        if any(member.op == "placeholder" for member in shared):  # a buffer outlives this call
            self.freeze(*self._tensors(env[node]))
        for scope, member in touched:
            if plain and keeps_labels(node):
                scope[member] = pytree.tree_map(self._forgotten, scope[member])
                continue
            self.freeze(*self._tensors((scope[member], env[node])))
            scope[member] = pytree.tree_map(self._frozen_like, scope[member])
            self._index[member] = self.now

    def _forgotten(self, leaf: Any) -> Any:
        """A value of which only the labels are known."""
        if not isinstance(leaf, Value) or leaf.parameter is not None:
            return leaf
        return activation(leaf.labels, static=False)

    def _frozen_like(self, leaf: Any) -> Any:
        return activation(self.frozen_labels(leaf.shape)) if isinstance(leaf, Value) else leaf

    def _enter(self, node: fx.Node) -> None:
        self.now = len(self.nodes)
        self.nodes.append(node)
        self._index[node] = self.now
        inside = node.op == "placeholder"
        self.depends.append(list(self._outer) if inside else [self._index[n] for n in node.all_input_nodes])

    def _load(self, tree: Any, env: dict[fx.Node, Any]) -> Any:
        return fx.map_arg(tree, lambda node: env[node])

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> Any:
        found = operator.attrgetter(str(node.target))(module)
        if not isinstance(found, Tensor):
            return found
        return known(found) if is_plain(found) else frozen(found.shape, static=True)

    def _placeholder(self, name: str) -> Any:
        """The value of a graph input: a parameter, a constant, a buffer or one of the user's inputs."""
        program = self.captured
        if name in program.parameters:
            parameter = program.parameters[name]
            if parameter.frozen_because is not None:
                return frozen(parameter.shape, static=True)
            axes = range(len(parameter.shape))
            coordinates = tuple(
                torch.arange(n).view([-1 if a == axis else 1 for a in axes]).expand(parameter.shape)
                for axis, n in enumerate(parameter.shape)
            )
            self.forms.setdefault(parameter.name, Form(parameter.shape))
            return Value(parameter.shape, parameter=parameter.name, coordinates=coordinates, static=True)
        if name in program.constants:
            return known(program.constants[name])
        if name in program.buffers:
            return frozen(program.buffers[name], static=True)
        shape = program.inputs.get(name)
        return None if shape is None else frozen(shape)

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args, kwargs = self._load(node.args, env), self._load(node.kwargs, env)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._region(node, args, kwargs)
        if str(node.target).startswith("aten.sym_"):
            return node.meta.get("val")  # a size is the same at every scale
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._barrier(args, kwargs)
        return self._guarded(node, self._by_rule(node, args, kwargs))

    def _guarded(self, node: fx.Node, result: Any) -> Any:
        """What no rule has to know: a result that holds less than what it is made of does not scale, a constant has
        the dtype that the graph says, and along an axis whose size depends on values there is one scale."""
        made = leaves(result)
        tensors = leaves(node.meta.get("val"))
        if len(made) != len(tensors):
            return result
        given = [
            t.dtype for source in node.all_input_nodes for t in leaves(source.meta.get("val")) if isinstance(t, Tensor)
        ]
        symbolic = symbolic_axes(node) or [[] for t in tensors if isinstance(t, Tensor)]
        axes = iter(symbolic)
        loses = self.rounds if self.op_name in ("to", "_to_copy", "type_as") else _holds_less
        for i, (value, tensor) in enumerate(zip(made, tensors, strict=True)):
            if not isinstance(tensor, Tensor):
                continue
            unknown = next(axes)
            if not isinstance(value, Value):
                continue
            if unknown:
                made[i] = value = self._one_scale(value, unknown)
            if value.known is not None:
                if value.known.dtype != tensor.dtype:
                    made[i] = activation(self.frozen_labels(value.shape), static=True)
            elif any(loses(tensor.dtype, dtype) for dtype in given) or not _is_float(tensor.dtype):
                self.freeze(value)
        if all(a is b for a, b in zip(made, leaves(result), strict=True)):
            return result
        return pytree.tree_unflatten(made, pytree.tree_structure(result))

    def _one_scale(self, value: Value, axes: list[int]) -> Value:
        """A value with one scale along axes of unknown size, and no values that would depend on that size."""
        if value.parameter is None:
            labels = self.collapse(value.labels, axes).expand(value.shape)
            return activation(labels, static=value.static, fan_in=value.fan_in if value.known is None else None)
        if any(lb.varies(c, axis) for c in value.coordinates if c is not None for axis in axes):
            self.freeze(value)
            return activation(self.frozen_labels(value.shape), static=value.static)
        return value

    def _by_rule(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """What an op makes of its arguments: computed if they are known, else by its rule, else a barrier."""
        name = self.op_name.rstrip("_")
        if any(is_symbol(leaf) for leaf in leaves((args, kwargs))):
            replaced = _without_symbols(name, args, kwargs)
            if replaced is None:
                return self._barrier(args, kwargs)
            args, kwargs = replaced
        elif symbolic_axes(node) is None:
            folded = self._fold(node, args, kwargs)
            if folded is not None:
                return folded
        if name not in _MAY_BE_EMPTY and any(0 in value.shape for value in self._tensors((args, kwargs))):
            return self._barrier(args, kwargs)  # what it does to elements that are not there cannot be seen
        from .rules import find_rule

        args, kwargs, groups = self._grouped(args, kwargs)
        rule = find_rule(self.op)
        if rule is None:
            self.unknown_ops.setdefault(str(node.target), self.now)
            return self._barrier(args, kwargs)
        arguments = Arguments(self.op, args, kwargs)
        try:
            result = rule(self, arguments)
            self._check_shapes(result)
        except Exception as error:  # a case that its author has not thought of costs freedom, and is reported
            self.failed_rules.setdefault(str(node.target), f"{type(error).__name__}: {error}".splitlines()[0])
            return self._barrier(args, kwargs)
        self.freeze(*self._tensors(arguments.unseen()))  # whatever a rule does not mention is frozen
        result = self._barrier(args, kwargs) if result is NotImplemented else result
        if groups is not None:
            result = pytree.tree_map(lambda v: replace(v, groups=groups) if isinstance(v, Value) else v, result)
        return result

    def _check_shapes(self, result: Any) -> None:
        """A rule gives each result the shape that the graph says."""
        if result is NotImplemented or result is None:
            return
        made = leaves(result)
        tensors = leaves(self.node.meta.get("val"))
        if len(made) != len(tensors):
            raise ValueError(f"{len(made)} results for {len(tensors)}")
        for value, tensor in zip(made, tensors, strict=True):
            if isinstance(value, Value) and isinstance(tensor, Tensor) and value.shape != tensor.shape:
                raise ValueError(f"a result of shape {tuple(value.shape)} for one of {tuple(tensor.shape)}")

    def _barrier(self, args: Any, kwargs: Any) -> Any:
        """An op without a rule (for these arguments) freezes all it touches; it costs freedom, never correctness."""
        values = self._tensors((args, kwargs))
        self.freeze(*values)
        return self.frozen_result(static=all(v.static for v in values))

    def _region(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """`no_grad` and autocast regions are sub-graphs; they compute what they would compute inline."""
        inlined = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
        skip = inlined.get(str(node.target))
        if skip is None or not isinstance(args[skip], fx.GraphModule):
            return self._barrier(args, kwargs)
        here, outer = self.now, self._outer
        self._outer = self.depends[here]
        result = self.graph(args[skip], args[skip + 1 :])
        self._outer = outer
        self._enter(node)  # after its content, so that nodes stay in the order of their dependence
        self.depends[self.now] += range(here, self.now)
        return result

    def rounds(self, dtype: torch.dtype, before: torch.dtype) -> bool:
        """Whether a cast loses digits that matter: to less than float32, and to less than the parameters have."""
        if not _holds_less(dtype, before):
            return False
        return _holds_less(dtype, torch.float32) and all(_holds_less(dtype, own) for own in self._own_dtypes)

    def _grouped(self, args: Any, kwargs: Any) -> tuple[Any, Any, Groups | None]:
        """The arguments of an op, and the groups of rows that its result has too.

        Which rows belong to which expert is not known, so their labels stand at representative places. Ops that treat
        every row by itself may use them; for any other the rows have one scale.
        """
        values = [v for v in self._tensors((args, kwargs)) if v.groups is not None]
        if not values:
            return args, kwargs, None
        groups = values[0].groups
        assert groups is not None
        if all(v.groups == groups for v in values) and groups.passes(self.node, self._tensors((args, kwargs))):
            return args, kwargs, groups

        def without(leaf: Any) -> Any:
            if not isinstance(leaf, Value) or leaf.groups is None:
                return leaf
            return activation(self.collapse(leaf.labels, [0]), static=leaf.static)

        args, kwargs = pytree.tree_map(without, (args, kwargs))
        return args, kwargs, None

    def _fold(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute an op whose inputs are all known, so that constant indices keep their values."""
        values = self._tensors((args, kwargs))
        target = self.op
        if any(v.known is None for v in values) or torch.Tag.nondeterministic_seeded in target.tags:
            return None
        shapes = [t.shape for t in leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        if not shapes or any(prod(s) > MOST_CONSTANT for s in shapes) or "empty" in str(target):
            return None
        unwrap = lambda leaf: leaf.known if isinstance(leaf, Value) else leaf  # noqa: E731
        real_args, real_kwargs = pytree.tree_map(unwrap, (args, dict(kwargs)))
        if is_inplace(node):
            real_args = (real_args[0].clone(), *real_args[1:])
        if "device" in real_kwargs:
            real_kwargs["device"] = "cpu"
        try:
            with torch.no_grad():
                result = target(*real_args, **real_kwargs)
        except Exception:
            return None  # an op that cannot run here is simply not folded
        if not all(is_plain(leaf) for leaf in leaves(result) if isinstance(leaf, Tensor)):
            return None
        return pytree.tree_map(lambda leaf: known(leaf) if isinstance(leaf, Tensor) else leaf, result)

    # -- what rules use --------------------------------------------------------------------------------------------

    @property
    def node(self) -> fx.Node:
        return self.nodes[self.now]

    @property
    def op(self) -> torch._ops.OpOverload:
        """The ATen overload being interpreted."""
        target = self.node.target
        assert isinstance(target, torch._ops.OpOverload)
        return target

    @property
    def op_name(self) -> str:
        """Its name without namespace and overload: `relu_` for `aten.relu_.default`."""
        return str(self.op).split(".")[1]

    def result_shape(self, which: int | None = None) -> torch.Size:
        """Shape of the present node's result (of one of its results)."""
        val = self.node.meta["val"]
        return torch.Size((val if which is None else val[which]).shape)

    def dtype_of(self, argument: int) -> torch.dtype | None:
        """The dtype of a positional argument of the present node."""
        source = self.node.args[argument]
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        return value.dtype if isinstance(value, Tensor) else None

    def frozen_result(self, static: bool = False) -> Any:
        """The present node's result with every element frozen, for the reason that this node made it."""
        label = self.frozen_labels(())

        def result(leaf: Any) -> Any:
            return activation(label.expand(leaf.shape), static=static) if isinstance(leaf, Tensor) else leaf

        return pytree.tree_map(result, self.node.meta.get("val"))

    def frozen_labels(self, shape: Sequence[int]) -> Tensor:
        """Labels that are frozen, for the reason that the present node made what they stand for."""
        label = self.scales.fresh(1, self.now)
        self.scales.freeze(label, self.now)
        return label.view(()).expand(tuple(shape))

    def fresh(self, shape: Sequence[int]) -> Tensor:
        """One new scale per element of `shape`."""
        return self.scales.fresh(prod(shape), self.now).view(tuple(shape))

    def freeze(self, *values: Value) -> None:
        for value in values:
            if value.parameter is not None:
                role = Role(self.now, multiplies=False, freezes=True)
                self.assign(value, plus=lb.constant(FROZEN, value.shape), minus=None, role=role)
            else:
                self.scales.freeze(lb.narrowed(value.labels), self.now)

    def merge(self, a: Tensor, b: Tensor, exponent: float = 1.0) -> None:
        """Demand s_a = s_b ** exponent for label tensors that broadcast together."""
        (a, b), _ = lb.together([a, b])
        self.scales.merge(a, b, self.now, exponent)

    def collapse(self, labels: Tensor, axes: Any) -> Tensor:
        return lb.collapse(self.scales, labels, axes, self.now)

    def power(self, labels: Tensor, exponent: float) -> Tensor:
        return lb.elementwise(lambda t: self.scales.power(t, exponent), labels)

    def all_frozen(self, labels: Tensor) -> bool:
        short = lb.narrowed(labels)
        return bool((self.scales.is_frozen(short) | (short == ZERO)).all())

    def labels(self, value: Value) -> Tensor:
        """An activation's labels. A parameter met here is used like an activation: it gets labels of its own."""
        if value.parameter is None:
            return value.labels
        opened = self.open(value)
        if opened is None:
            self.freeze(value)
            return lb.constant(FROZEN, value.shape)
        self.assign(value, plus=opened, minus=None, role=Role(self.now, multiplies=True))
        return opened

    def open(self, value: Value) -> Tensor | None:
        """Fresh labels for a parameter's elements, one for all that are the same element; None if they are too many."""
        axes = set().union(*(lb.varying_axes(c) for c in value.coordinates if c is not None))
        shape = [n if a in axes else 1 for a, n in enumerate(value.shape)]
        return self.fresh(shape).expand(value.shape) if prod(shape) <= MOST_LABELS else None

    def assign(self, value: Value, plus: Tensor, minus: Tensor | None, role: Role) -> None:
        """Demand that the elements of a parameter scale by s[plus] / s[minus] (label tensors of the value's shape)."""
        assert value.parameter is not None
        form = self.forms[value.parameter]
        if form.shift != value.shift and not role.freezes:
            if any(not other.freezes for other in form.roles):  # w and 1 + w cannot both scale
                for labels in (plus, minus):
                    if labels is not None:
                        self.scales.freeze(lb.narrowed(labels), self.now)
                role = Role(self.now, multiplies=False, freezes=True)
                plus, minus, value = lb.constant(FROZEN, value.shape), None, replace(value, shift=form.shift)
            form.shift = value.shift
        form.roles.append(role)
        new_plus = self._to_parameter(value, form.shape, plus)
        new_minus = None if minus is None else self._to_parameter(value, form.shape, minus)
        if form.plus is None and form.minus is None:
            form.plus, form.minus = new_plus, new_minus
        else:
            self._unify(form, new_plus, new_minus)

    # -- parameters in several roles -------------------------------------------------------------------------------

    def _to_parameter(self, value: Value, shape: torch.Size, labels: Tensor) -> Tensor:
        """Labels given in a view's coordinates, in the parameter's own; elements read twice are merged."""
        target, flat, source = _place(value, shape, labels)
        self.scales.merge(source, target.view(-1)[flat], self.now)
        return target

    def owner(self, value: Value, fan_in: Tensor) -> Tensor:
        """For each element of a parameter the input labels of its layer, which are given for each element of a view."""
        short = lb.narrowed(fan_in, keep=[fan_in.ndim - 1])
        rows = torch.arange(prod(short.shape[:-1])).view(short.shape[:-1]).expand(value.shape)
        assert value.parameter is not None
        target, _, _ = _place(value, self.forms[value.parameter].shape, rows)
        return short.reshape(-1, fan_in.shape[-1])[target.clamp_min(0)]

    def _unify(self, form: Form, plus: Tensor, minus: Tensor | None) -> None:
        """Demand that a second role scales a parameter as the first did.

        plus1 - minus1 = plus2 - minus2 holds if the terms agree one by one, or crosswise up to the sign (a tied
        embedding: its output axis is the input axis of the language-model head). Where neither fits, nothing is free.
        """

        def fits(a: Tensor | None, b: Tensor | None, exact: bool) -> bool:
            one, two = axes_of(a), axes_of(b)
            return one == two or (not exact and (not one or not two))

        for exact in (True, False):
            if fits(form.plus, plus, exact) and fits(form.minus, minus, exact):
                form.plus, form.minus = self._agree(form.plus, plus, 1.0), self._agree(form.minus, minus, 1.0)
                return
            if fits(form.plus, minus, exact) and fits(form.minus, plus, exact):
                form.plus, form.minus = self._agree(form.plus, minus, -1.0), self._agree(form.minus, plus, -1.0)
                return
        for term in (form.plus, form.minus, plus, minus):
            if term is not None:
                self.scales.freeze(term.reshape(-1), self.now)
        form.plus, form.minus = torch.full([1] * len(form.shape), FROZEN), None

    def _agree(self, old: Tensor | None, new: Tensor | None, exponent: float) -> Tensor | None:
        """Demand old = new ** exponent; a missing term is the scale 1."""
        if old is None and new is None:
            return None
        if old is None or new is None:
            term = old if new is None else new
            assert term is not None
            self.scales.freeze(term.reshape(-1), self.now)
            return old
        self.scales.merge(old, new, self.now, exponent)
        if (old == ZERO).any():
            fill = self.scales.power(new, exponent)
            return torch.where(old == ZERO, fill, old)
        return old

    def _tensors(self, tree: Any) -> list[Value]:
        return [leaf for leaf in leaves(tree) if isinstance(leaf, Value)]


def _place(value: Value, shape: torch.Size, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write what is given for each element of a view at the places of the parameter it was read from.

    Returns the result over the parameter's axes (of length one where nothing depends on them), and for each element of
    the view its place there and what was written.
    """
    moving = lb.varying_axes(labels)
    used, places = [], []
    for axis, where in enumerate(value.coordinates):
        if where is None or shape[axis] == 1:
            continue
        depends = lb.varying_axes(where) & moving
        if depends or len(lb.narrowed(where).unique()) < shape[axis]:  # a part of an axis is a role of its own
            used.append(axis)
            places.append(where)
    (labels, *places), _ = lb.together([labels, *places])
    flat = torch.zeros((), dtype=torch.int64)
    for axis, where in zip(used, places, strict=True):
        flat = flat * shape[axis] + where
    flat, source = (t.reshape(-1) for t in torch.broadcast_tensors(flat, labels))
    sizes = [n if a in used else 1 for a, n in enumerate(shape)]
    target = torch.full((prod(sizes),), ZERO).scatter_reduce_(0, flat, source, "amax")
    return target.view(sizes), flat, source


Rule = Callable[[Interpreter, Arguments], Any]
__all__ = ["Arguments", "Interpreter", "Rule", "activation", "frozen", "known", "replace"]
