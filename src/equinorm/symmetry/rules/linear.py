"""Linear layers however they are spelled: products of matrices, einsum, convolutions.

A weight w[o, i] between inputs of scale s_in[i] and outputs of scale s_out[o] scales by s_out[o] / s_in[i]. Every op
here opens one new scale per output channel and hands the weight that form.
"""

from __future__ import annotations

import string
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from .. import labels as lb
from ..groups import Groups
from ..interpreter import Arguments, Interpreter
from ..scales import FROZEN, ZERO
from ..values import Role, Value, activation
from .elementwise import add
from .registry import register_rule, rule

# -- contractions ------------------------------------------------------------------------------------------------------


def contract(t: Interpreter, x: Value, x_axes: str, y: Value, y_axes: str, out_axes: str) -> Value:
    """A product of two tensors, written as an einsum: each letter names an axis."""
    if x.parameter is not None and y.parameter is not None:
        # two parameters multiply each other: the left one acts like an activation
        x = activation(t.labels(x))
    if x.parameter is not None:
        x, x_axes, y, y_axes = y, y_axes, x, x_axes
    if y.parameter is not None:
        return _with_weight(t, x, x_axes, y, y_axes, out_axes)
    return _of_activations(t, x, x_axes, y, y_axes, out_axes)


def _arranged(labels: Tensor, axes: str, target: str, shape: list[int]) -> Tensor:
    """A label tensor with named axes, laid out along `target` and spread to `shape`."""
    present = [letter for letter in target if letter in axes]
    labels = labels.permute([axes.index(letter) for letter in present])
    for position, letter in enumerate(target):
        if letter not in axes:
            labels = labels.unsqueeze(position)
    return labels.expand(shape)


def _sizes(axes: str, x: Value, x_axes: str, y: Value, y_axes: str) -> list[int]:
    """Lengths of named axes; an axis of length one broadcasts."""
    lengths = [*zip(x_axes, x.shape, strict=True), *zip(y_axes, y.shape, strict=True)]
    return [max(n for name, n in lengths if name == letter) for letter in axes]


def _kept(t: Interpreter, labels: Tensor, axes: str, keep: str) -> tuple[Tensor, str]:
    """Merge the labels along all axes that are not kept, and drop those axes."""
    labels = t.collapse(labels, [i for i, letter in enumerate(axes) if letter not in keep])
    for i in reversed(range(len(axes))):
        if axes[i] not in keep:
            labels = labels.select(i, 0)
    return labels, "".join(letter for letter in axes if letter in keep)


def _with_weight(t: Interpreter, x: Value, x_axes: str, weight: Value, w_axes: str, out_axes: str) -> Value:
    shape = _sizes(out_axes, x, x_axes, weight, w_axes)
    # the weight is the same for every sample, pixel and token: along those axes the input has one scale
    inputs, inputs_axes = _kept(t, t.labels(x), x_axes, keep=w_axes)
    minus = _arranged(inputs, inputs_axes, w_axes, list(weight.shape))
    moving = set().union(*(lb.varying_axes(c) for c in weight.coordinates if c is not None))
    free = [letter for i, letter in enumerate(w_axes) if letter in out_axes and i in moving]
    sizes = [weight.shape[w_axes.index(letter)] for letter in free]
    out = t.fresh(sizes)
    plus = _arranged(out, "".join(free), w_axes, list(weight.shape))
    summed = [letter for letter in w_axes if letter in x_axes and letter not in out_axes]
    t.assign(weight, plus=plus, minus=minus, role=Role(t.now, multiplies=True, layer=bool(summed)))
    fan_in = None
    if summed:  # a layer with inputs of its own, not a gain: a bias added next belongs to it
        kept = [letter for letter in out_axes if letter in w_axes]
        rows, rows_axes = _kept(t, minus, w_axes, keep="".join([*kept, *summed]))
        rows = rows.permute([rows_axes.index(letter) for letter in (*kept, *summed)])
        rows = lb.reshape(rows, [*rows.shape[: len(kept)], prod(rows.shape[len(kept) :])])
        fan_in = _arranged(rows, "".join(kept) + "*", out_axes + "*", [*shape, rows.shape[-1]])
    return activation(_arranged(out, "".join(free), out_axes, shape), fan_in=fan_in)


def _of_activations(t: Interpreter, x: Value, x_axes: str, y: Value, y_axes: str, out_axes: str) -> Value:
    shape = _sizes(out_axes, x, x_axes, y, y_axes)
    shared = [letter for letter in x_axes if letter in y_axes]
    left, left_axes = _kept(t, t.labels(x), x_axes, keep="".join(shared) + out_axes)
    right, right_axes = _kept(t, t.labels(y), y_axes, keep="".join(shared) + out_axes)
    for one, one_axes, other, other_axes in ((x, x_axes, y, y_axes), (y, y_axes, x, x_axes)):
        if other.known is not None and (moved := _by_constant(t, one, one_axes, other.known, other_axes, out_axes)):
            return activation(_arranged(*moved, out_axes, shape), static=one.static)
    if (still := t.all_frozen(right)) or t.all_frozen(left):
        # averaging with fixed weights (attention over values): what is summed has one scale
        free, axes = (left, left_axes) if still else (right, right_axes)
        free, axes = _kept(t, free, axes, keep=out_axes)
        return activation(_arranged(free, axes, out_axes, shape), static=x.static and y.static)

    summed = [letter for letter in shared if letter not in out_axes]
    both = ((left, left_axes), (right, right_axes))
    if all(any(lb.varies(v, axes.index(c)) for c in summed) for v, axes in both) and _ends_in_softmax(t.node):
        # scores: each pair of features has a scale, and since a softmax follows nothing else could be free
        left, left_axes = _kept(t, left, left_axes, keep="".join(shared))
        right, right_axes = _kept(t, right, right_axes, keep="".join(shared))

    def outside(labels: Tensor, axes: str) -> bool:
        """Whether labels change along an axis of their own tensor alone."""
        return any(lb.varies(labels, i) for i, letter in enumerate(axes) if letter not in shared)

    if not outside(left, left_axes) and not outside(right, right_axes):
        # scores q·k: the scales of each pair of features cancel, k = 1/q
        keep = "".join(shared)
        left, left_axes = _kept(t, left, left_axes, keep)
        right, right_axes = _kept(t, right, right_axes, keep)
        sizes = _sizes(keep, x, x_axes, y, y_axes)
        t.merge(_arranged(left, left_axes, keep, sizes), _arranged(right, right_axes, keep, sizes), exponent=-1.0)
        return activation(lb.constant(FROZEN, shape))
    t.scales.freeze(lb.narrowed(left), t.now)
    right, right_axes = _kept(t, right, right_axes, keep=out_axes)
    return activation(_arranged(right, right_axes, out_axes, shape))


# What may stand between scores and their softmax.
_BETWEEN = frozenset(
    {
        "mul",
        "div",
        "add",
        "sub",
        "masked_fill",
        "where",
        "to",
        "_to_copy",
        "view",
        "reshape",
        "_unsafe_view",
        "clone",
        "contiguous",
        "expand",
        "unsqueeze",
        "squeeze",
        "permute",
        "transpose",
        "type_as",
        "dropout",
        "slice",
        "detach",
        "alias",
        "cat",
        "getitem",
        "tanh",
    }
)


def _ends_in_softmax(node: fx.Node, steps: int = 16) -> bool:
    """Whether all that is made of a result is a softmax of it."""
    users = list(node.users)
    names = [str(getattr(user.target, "__name__", user.target)).removeprefix("aten.").split(".")[0] for user in users]
    if not users or not steps:
        return False
    return all(
        "softmax" in name or (name.rstrip("_") in _BETWEEN and _ends_in_softmax(user, steps - 1))
        for user, name in zip(users, names, strict=True)
    )


def _by_constant(
    t: Interpreter, x: Value, x_axes: str, matrix: Tensor, matrix_axes: str, out_axes: str
) -> tuple[Tensor, str] | None:
    """The labels of x · P for a known P with zeros: an output has the scale of the inputs that it is made of.

    A permutation moves scales; a matrix of blocks keeps those of its blocks apart.
    """
    summed = [c for c in matrix_axes if c in x_axes and c not in out_axes]
    kept = [c for c in matrix_axes if c in out_axes and c not in x_axes]
    if len(matrix_axes) != 2 or len(summed) != 1 or len(kept) != 1 or not bool((matrix == 0).any()):
        return None
    axis = x_axes.index(summed[0])
    used = (matrix != 0).transpose(0, 1) if matrix_axes[0] == summed[0] else matrix != 0  # [outputs, inputs]
    first = used.int().argmax(1)
    labels = lb.narrowed(t.labels(x), keep=[axis]).movedim(axis, -1)
    outputs, inputs = used.nonzero(as_tuple=True)
    t.merge(labels[..., inputs], labels[..., first[outputs]])
    made = torch.where(used.any(1), labels[..., first], ZERO)
    left = [c for c in x_axes if c != summed[0]]
    full = made.expand([*(x.shape[x_axes.index(c)] for c in left), made.shape[-1]])
    return _kept(t, full, "".join([*left, kept[0]]), keep=out_axes)


@rule("linear.default")
def linear(t: Interpreter, a: Arguments) -> Any:
    return layer(t, a["input"], a["weight"], a["bias"])


def layer(t: Interpreter, x: Value, weight: Value, bias: Value | None) -> Value:
    """x · weightᵀ + bias over the last axis."""
    batch = string.ascii_lowercase[: x.ndim - 1]
    if weight.ndim == 1:  # F.linear(x, vector)
        return contract(t, x, batch + "I", weight, "I", batch)
    out = contract(t, x, batch + "I", weight, "OI", batch + "O")
    return out if bias is None else add(t, out, bias)


def matrix_product(t: Interpreter, x: Value, y: Value) -> Value:
    """`matmul` with its broadcasting over leading axes."""
    batch = max(x.ndim, y.ndim, 2) - 2
    letters = string.ascii_lowercase[:batch]
    x_axes = letters[batch - max(x.ndim - 2, 0) :] + ("K" if x.ndim == 1 else "MK")
    y_axes = letters[batch - max(y.ndim - 2, 0) :] + ("K" if y.ndim == 1 else "KN")
    lead = [letter for letter in letters if letter in x_axes and letter in y_axes]
    for letter in lead:  # leading axes of length one broadcast
        i, j = x_axes.index(letter), y_axes.index(letter)
        size = max(x.shape[i], y.shape[j])
        x = x.expanded([size if k == i else n for k, n in enumerate(x.shape)])
        y = y.expanded([size if k == j else n for k, n in enumerate(y.shape)])
    out = letters + ("" if x.ndim == 1 else "M") + ("" if y.ndim == 1 else "N")
    return contract(t, x, x_axes, y, y_axes, out)


@rule("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default", "inner.default")
def matmul(t: Interpreter, a: Arguments) -> Any:
    x: Value = a["self"]
    y: Value = next(a[name] for name in ("other", "mat2", "vec", "tensor") if name in a)
    if t.op_name == "inner" and (x.ndim > 1 or y.ndim > 1):
        return NotImplemented
    return matrix_product(t, x, y)


@rule("addmm.default", "baddbmm.default", "addmv.default")
def add_matmul(t: Interpreter, a: Arguments) -> Any:
    a["beta"], a["alpha"]
    names = ("mat1", "mat2") if "mat1" in a else ("batch1", "batch2") if "batch1" in a else ("mat", "vec")
    product = matrix_product(t, a[names[0]], a[names[1]])
    return product if a["beta"] == 0 else add(t, product, a["self"])


@rule("einsum.default")
def einsum(t: Interpreter, a: Arguments) -> Any:
    """Any einsum of two or more operands, from left to right; repeated letters in one operand are a barrier."""
    operands: list[Value] = list(a["tensors"])
    inputs, arrow, output = a["equation"].replace(" ", "").partition("->")
    axes = inputs.split(",")
    dots = [v.ndim - len(term.replace("...", "")) for v, term in zip(operands, axes, strict=True)]
    spare = [c for c in string.ascii_letters if c not in a["equation"]][: max(dots, default=0)]
    axes = [term.replace("...", "".join(spare[len(spare) - n :])) for term, n in zip(axes, dots, strict=True)]
    if not arrow:
        every = "".join(axes)
        output = "".join(spare) + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in spare))
    output = output.replace("...", "".join(spare))
    broadcast = any(
        v.shape[term.index(c)] == 1 for v, term in zip(operands, axes, strict=True) for c in spare if c in term
    )
    if len(operands) < 2 or broadcast or any(len(set(term)) < len(term) for term in axes):
        return NotImplemented
    made, made_axes = operands[0], axes[0]
    for i in range(1, len(operands)):
        later = output if i == len(operands) - 1 else "".join([output, *axes[i + 1 :]])
        needed = [c for c in dict.fromkeys(made_axes + axes[i]) if c in later]
        target = output if i == len(operands) - 1 else "".join(needed)
        made, made_axes = contract(t, made, made_axes, operands[i], axes[i], target), target
    return made


@register_rule("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_product(t: Interpreter, a: Arguments) -> Any:
    """Rows that are sorted by expert times the matrix [in, out] of their expert: one family of scales per expert."""
    names = list(a.everything())
    x: Value = a[names[0]]
    weight: Value = a[names[1]]
    source = t.node.args[2] if len(t.node.args) > 2 else t.node.kwargs.get("offs")
    if weight.parameter is None or x.ndim != 2 or weight.ndim != 3 or not isinstance(source, fx.Node):
        return NotImplemented
    if any(
        v is not None and v is not x and v is not weight and v is not a[names[2]]
        for v in (a[n] for n in names)
        if isinstance(v, Value)
    ):
        return NotImplemented  # a bias
    groups = Groups(source, x.shape[0], weight.shape[0])
    if groups.rows < groups.experts:  # not every expert has a row that could stand for it
        return _of_any_expert(t, x, weight)
    inputs = t.labels(x)
    if x.groups == groups:
        each = inputs[groups.first]
        t.merge(inputs, each[groups.expert])
    else:
        each = t.collapse(inputs, [0]).expand(inputs.shape)[:1].expand(groups.experts, -1)
    opened = t.fresh([groups.experts, weight.shape[2]])
    plus, minus = opened[:, None].expand(weight.shape), each[:, :, None].expand(weight.shape)
    t.assign(weight, plus=plus, minus=minus, role=Role(t.now, multiplies=True, layer=True))
    return replace(activation(opened[groups.expert]), groups=groups)


def _of_any_expert(t: Interpreter, x: Value, weight: Value) -> Value:
    inputs = t.collapse(t.labels(x), [0]).expand(x.shape)[:1]
    opened = t.fresh([1, weight.shape[2]])
    plus, minus = opened[:, None].expand(weight.shape), inputs[:, :, None].expand(weight.shape)
    t.assign(weight, plus=plus, minus=minus, role=Role(t.now, multiplies=True, layer=True))
    return activation(opened.expand(x.shape[0], -1))


@rule("tensordot.default")
def tensordot(t: Interpreter, a: Arguments) -> Any:
    x, y = a["self"], a["other"]
    letters = string.ascii_lowercase
    x_axes = list(letters[: x.ndim])
    y_axes = list(letters[x.ndim : x.ndim + y.ndim].upper())
    for i, j in zip(a["dims_self"], a["dims_other"], strict=True):
        y_axes[j % y.ndim] = x_axes[i % x.ndim]
    output = [c for c in x_axes if c not in y_axes] + [c for c in y_axes if c not in x_axes]
    return contract(t, x, "".join(x_axes), y, "".join(y_axes), "".join(output))


@rule("bilinear.default")
def bilinear(t: Interpreter, a: Arguments) -> Any:
    """x1 · W · x2: freeze the left input, the right one is a layer's input."""
    t.freeze(a["input1"])
    x: Value = a["input2"]
    batch = string.ascii_lowercase[: x.ndim - 1]
    out = contract(t, x, batch + "J", a["weight"], "OIJ", batch + "O")
    return out if a["bias"] is None else add(t, out, a["bias"])


# -- convolutions ------------------------------------------------------------------------------------------------------


@rule(
    "conv1d.default",
    "conv2d.default",
    "conv3d.default",
    "conv1d.padding",
    "conv2d.padding",
    "conv3d.padding",
    "convolution.default",
    "_convolution.default",
    "conv_transpose1d.default",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
)
def convolution(t: Interpreter, a: Arguments) -> Any:
    """Stride, padding with zeros and dilation choose which pixels meet; only channels carry scales."""
    settings = "stride padding dilation output_padding benchmark deterministic cudnn_enabled allow_tf32"
    for name in settings.split():
        a.get(name)
    transposed = "transpose" in t.op_name or bool(a.get("transposed"))
    x: Value = a["input"]
    weight: Value = a["weight"]
    groups = int(a["groups"])
    channel = x.ndim - weight.ndim + 1  # 0 for an input without a batch axis
    inputs = t.collapse(t.labels(x), [i for i in range(x.ndim) if i != channel]).reshape(-1)
    inputs = inputs.expand(x.shape[channel]).view(groups, -1) if inputs.numel() == 1 else inputs.view(groups, -1)
    outputs = t.result_shape()[channel]
    if weight.parameter is None:
        out = _with_made_kernel(t, inputs, weight, groups, outputs, transposed)
        value = _channels(t, out, channel)
    else:
        opened = t.fresh([groups, outputs // groups])
        kernel = [1] * (weight.ndim - 2)
        if transposed:  # weight[in, out / groups, ...]
            per_input = opened if groups == 1 else opened.repeat_interleave(inputs.shape[1], 0)
            plus, minus = per_input.view(-1, outputs // groups, *kernel), inputs.reshape(-1, 1, *kernel)
        else:  # weight[out, in / groups, ...]
            per_output = inputs if groups == 1 else inputs.repeat_interleave(outputs // groups, 0)
            plus, minus = opened.view(-1, 1, *kernel), per_output.reshape(-1, inputs.shape[1], *kernel)
        role = Role(t.now, multiplies=True, layer=True)
        t.assign(weight, plus=plus.expand(weight.shape), minus=minus.expand(weight.shape), role=role)
        owner = inputs.repeat_interleave(outputs // groups, 0) if groups > 1 else inputs
        value = _channels(t, opened.view(-1), channel, fan_in=owner)
    if a["bias"] is None:
        return value
    bias: Value = a["bias"]
    shape = torch.Size([outputs] + [1] * (x.ndim - channel - 1))
    return add(t, value, bias.mapped(lambda s: lb.reshape(s, shape), shape))


def _channels(t: Interpreter, labels: Tensor, channel: int, fan_in: Tensor | None = None) -> Value:
    shape = t.result_shape()
    layout = [-1 if i == channel else 1 for i in range(len(shape))]
    if fan_in is not None:
        fan_in = fan_in.reshape(*layout, fan_in.shape[1]).expand(*shape, -1)
    return activation(labels.view(layout).expand(shape), fan_in=fan_in)


def _with_made_kernel(
    t: Interpreter, inputs: Tensor, weight: Value, groups: int, outputs: int, transposed: bool
) -> Tensor:
    """A kernel that is computed or constant (blur pooling, dynamic filters): labels of the output channels."""
    kernel = t.labels(weight)
    if t.all_frozen(kernel):  # each output mixes the channels of its group with fixed numbers
        mixed = t.collapse(inputs, [1])
        return mixed.expand(groups, outputs // groups).reshape(-1)
    t.scales.freeze(inputs.reshape(-1), t.now)
    axis = 1 if transposed else 0
    kept = t.collapse(kernel, [i for i in range(kernel.ndim) if i != axis]).reshape(-1)
    kept = kept.expand(weight.shape[axis])
    if not transposed or groups == 1:
        return kept
    t.scales.freeze(kept, t.now)
    return torch.full((outputs,), FROZEN)
