"""Ops that act on each element alone: activations, sums, products, powers, comparisons, casts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import labels as lb
from ..interpreter import Arguments, Interpreter
from ..scales import FROZEN, ZERO
from ..values import Role, Value, activation, frozen, known
from .registry import rule

# -- helpers that other families use too -------------------------------------------------------------------------------


def as_value(operand: Any) -> Value:
    """A tensor argument as it is, a number as a known constant."""
    return operand if isinstance(operand, Value) else known(torch.tensor(operand))


def common_shape(*values: Value) -> torch.Size:
    shape, *others = (v.shape for v in values)
    if all(other == shape for other in others):
        return shape
    return torch.broadcast_shapes(shape, *others)


def joined(t: Interpreter, *values: Value) -> Value:
    """x + y, max(x, y), where(., x, y): all operands must have one scale. Structural zeros join any."""
    shape = common_shape(*values)
    total, *others = (t.labels(v).expand(shape) for v in values)
    for other in others:
        t.merge(total, other)
        total = lb.elementwise(torch.maximum, total, other)  # a real label wins over a structural zero
    return activation(total, static=all(v.static for v in values))


def add(t: Interpreter, x: Value, y: Value) -> Value:
    """x + y. A parameter added to an activation is an offset: it takes the activation's scale."""
    if x.parameter is not None:
        x, y = y, x
    if y.parameter is None or x.parameter is not None:
        return joined(t, x, y)
    shape = common_shape(x, y)
    labels = t.labels(x).expand(shape)
    if bool((lb.narrowed(labels) == ZERO).any()):
        return joined(t, x, y)  # where the activation is zero the sum has the parameter's own scale
    offset = y.expanded(shape)
    fan_in = x.fan_in if x.shape == shape else None
    owner = None if fan_in is None else t.owner(offset, fan_in)
    t.assign(offset, plus=labels, minus=None, role=Role(t.now, multiplies=y.table, fan_in=owner))
    return activation(labels, fan_in=fan_in)


def multiply(t: Interpreter, x: Value, y: Value, inverse: bool = False) -> Value:
    """x · y, or x / y. A parameter times an activation is a gain; a parameter times a constant is still a parameter."""
    shape = common_shape(x, y)
    if x.parameter is not None and y.parameter is not None:
        x = activation(t.labels(x))
    if x.parameter is not None and not inverse:
        x, y = y, x
    if y.table and y.parameter is not None and any(not role.freezes for role in t.forms[y.parameter].roles):
        y = activation(t.labels(y))  # a norm multiplies what was read from an embedding by what it made of it
    if y.parameter is not None:
        if x.static and not inverse and t.all_frozen(t.labels(x)):
            return y.expanded(shape)
        return gain(t, x.expanded(shape), y.expanded(shape), inverse)
    if x.parameter is not None:  # a parameter divided by an activation
        if y.static and t.all_frozen(y.labels):
            return x.expanded(shape)
        x = activation(t.labels(x))
    left, right = t.labels(x), t.labels(y)
    if inverse:
        right = t.power(nonzero(right), -1.0)
    labels = lb.elementwise(lambda a, b: t.scales.product(a, b, t.now), left.expand(shape), right.expand(shape))
    return activation(labels, static=x.static and y.static)


def gain(t: Interpreter, x: Value, parameter: Value, inverse: bool) -> Value:
    """An activation times (or over) a parameter of the same shape: new output scales, carried by the parameter.

    A gain with few elements may meet many scales (one number for all channels, as in ReZero), which it would tie
    together. Where that costs more scales than the gain opens it is frozen instead, and they pass.
    """
    before = t.labels(x)
    out = t.open(parameter)
    if out is None or _tied(t, before, shared=set(range(x.ndim)) - lb.varying_axes(out)) > lb.narrowed(out).numel():
        t.freeze(parameter)
        return activation(before)
    plus, minus = (before, out) if inverse else (out, before)
    t.assign(parameter, plus=plus, minus=minus, role=Role(t.now, multiplies=True))
    return activation(lb.elementwise(lambda a, b: torch.where(a == ZERO, ZERO, b), before, out))


def _tied(t: Interpreter, labels: Tensor, shared: set[int]) -> int:
    """How many free scales are lost if the labels along some axes become one."""
    short = lb.narrowed(labels)
    if not any(lb.varies(labels, axis) for axis in shared):
        return 0
    free = torch.where(t.scales.is_frozen(short) | (short == ZERO), ZERO, t.scales.find(short)[0])
    after = free.amax([axis for axis in shared if lb.varies(labels, axis)], keepdim=True)
    return len(free.unique()) - len(after.unique())


def nonzero(labels: Tensor) -> Tensor:
    """Labels for an op that does not keep zeros: what was a structural zero is now some constant."""
    return lb.elementwise(lambda a: a.clamp_min(FROZEN), labels)


# -- homogeneous ops: f(s·x) = s·f(x) for s > 0 ------------------------------------------------------------------------


@rule("relu.default", "leaky_relu.default", "rrelu.default", "abs.default", "absolute.default")
def homogeneous(t: Interpreter, a: Arguments) -> Any:
    return activation(t.labels(a["self"]), static=a["self"].static)


@rule(
    "neg.default",
    "positive.default",
    "clone.default",
    "contiguous.default",
    "detach.default",
    "alias.default",
    "lift_fresh.default",
    "lift_fresh_copy.default",
    "resolve_conj.default",
    "resolve_neg.default",
    "_conj.default",
    "conj.default",
    "real.default",
)
def same_elements(t: Interpreter, a: Arguments) -> Any:
    """The same numbers up to a sign; a parameter stays a parameter."""
    value: Value = a["self"]
    return value if value.parameter is not None else activation(value.labels, static=value.static, fan_in=value.fan_in)


@rule("dropout.default", "feature_dropout.default", "native_dropout.default")
def dropout(t: Interpreter, a: Arguments) -> Any:
    """Zeroes elements and multiplies the others by a number, whatever their scale."""
    value = activation(t.labels(a["input"] if "input" in a else a["self"]))
    return (value, frozen(value.shape)) if isinstance(t.node.meta["val"], tuple | list) else value


@rule("prelu.default", "_prelu_kernel.default")
def prelu(t: Interpreter, a: Arguments) -> Any:
    """Homogeneous in x; the slope is a ratio and stays as it is."""
    t.freeze(a["weight"])
    return activation(t.labels(a["self"]))


@rule("threshold.default")
def threshold(t: Interpreter, a: Arguments) -> Any:
    """ReLU when both numbers are 0."""
    if a["threshold"] != 0 or a["value"] != 0:
        return NotImplemented
    return activation(t.labels(a["self"]))


@rule("clamp.default", "clamp_min.default", "clamp_max.default", "clip.default", "hardtanh.default")
def clamp(t: Interpreter, a: Arguments) -> Any:
    """Homogeneous when every bound is 0 or infinite."""
    low, high = a.get("min"), a.get("max")
    if t.op_name.startswith("hardtanh"):
        low, high = a["min_val"], a["max_val"]
    bounds = [b for b in (low, high) if b is not None and not math.isinf(b)]
    if all(b == 0 for b in bounds):
        return activation(t.labels(a["self"]))
    zero_stays = (low is None or low <= 0) and (high is None or high >= 0)
    return zero_keeping_barrier(t, a) if zero_stays else barrier(t, a)


@rule("clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor")
def clamp_tensor(t: Interpreter, a: Arguments) -> Any:
    """A maximum and a minimum with tensors: all have one scale."""
    value: Value = a["self"]
    for name in ("min", "max"):
        if name in a and a[name] is not None:
            value = bounded(t, value, a[name])
    return value.expanded(t.result_shape())


@rule("to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default")
def cast(t: Interpreter, a: Arguments) -> Any:
    """Floating-point casts keep the scale, `x.bool()` is a comparison with 0, integers are a barrier.

    So is rounding to less than float32 and than the parameters have. What a model computes in float32 inside does not
    depend on the dtype in which it is traced, and factors that are powers of two are exact in any.
    """
    value: Value = a["self"]
    a.get("other")  # only its dtype and device matter
    dtype, before = t.node.meta["val"].dtype, t.dtype_of(0)
    if before is not None and t.rounds(dtype, before):
        return NotImplemented
    if dtype.is_floating_point:
        return (
            value if value.parameter is not None else activation(value.labels, static=value.static, fan_in=value.fan_in)
        )
    if dtype == torch.bool:
        return scale_blind(t, a)
    return NotImplemented


# -- sums, maxima, choices: operands are merged ------------------------------------------------------------------------


@rule("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar", "rsub.Tensor")
def addition(t: Interpreter, a: Arguments) -> Any:
    alpha = a["alpha"]
    x, y = a["self"], a["other"]
    if t.norms is not None and t.op_name.rstrip("_") == "add" and alpha in (None, 1) and isinstance(x, Value):
        number = y.known.item() if isinstance(y, Value) and y.known is not None and y.known.ndim == 0 else y
        if (made := t.norms.added(t, x, number) or t.norms.shifted(t, x, number)) is not None:
            return made
    return add(t, as_value(x), as_value(y))


@rule("maximum.default", "minimum.default", "max.other", "min.other", "fmax.default", "fmin.default", "hypot.default")
def extremum(t: Interpreter, a: Arguments) -> Any:
    """One scale. A parameter that an activation is compared with is a bound: it takes the activation's scale."""
    x, y = a["self"], a["other"]
    return joined(t, x, y) if t.op_name == "hypot" else bounded(t, x, y)


def bounded(t: Interpreter, x: Value, y: Value) -> Value:
    """max(x, y) or min(x, y): a cap per channel is carried like an offset, and no more counts in a norm than one."""
    if x.parameter is not None:
        x, y = y, x
    if y.parameter is None or x.parameter is not None:
        return joined(t, x, y)
    shape = common_shape(x, y)
    labels = t.labels(x).expand(shape)
    if bool((lb.narrowed(labels) == ZERO).any()):
        return joined(t, x, y)
    t.assign(y.expanded(shape), plus=labels, minus=None, role=Role(t.now, multiplies=False))
    return activation(labels)


@rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(t: Interpreter, a: Arguments) -> Any:
    """The condition does not depend on scales (else it is frozen); both branches have one scale."""
    t.freeze(a["condition"])
    branches = [as_value(a["self"]), as_value(a["other"])]
    return _filled(t, branches, torch.Size(t.result_shape()))


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(t: Interpreter, a: Arguments) -> Any:
    t.freeze(a["mask"])
    return _filled(t, [a["self"], as_value(a["value"])], t.result_shape())


def _filled(t: Interpreter, branches: list[Value], shape: torch.Size) -> Value:
    # an infinity is infinite at any scale, so masking with it (before a max) constrains nothing
    finite = [b for b in branches if b.known is None or not bool(torch.isinf(b.known).all())]
    return joined(t, *(finite or branches)).expanded(shape)


@rule("lerp.Scalar", "lerp.Tensor")
def lerp(t: Interpreter, a: Arguments) -> Any:
    """x + w·(y - x): one scale for x and y, the weight is a ratio."""
    if isinstance(a["weight"], Value):
        t.freeze(a["weight"])
    return joined(t, a["self"], a["end"]).expanded(t.result_shape())


@rule("addcmul.default", "addcdiv.default")
def addcmul(t: Interpreter, a: Arguments) -> Any:
    a["value"]
    inverse = t.op_name.startswith("addcdiv")
    return add(t, a["self"], multiply(t, a["tensor1"], a["tensor2"], inverse))


# -- products and powers: exponents add --------------------------------------------------------------------------------


@rule("mul.Tensor", "mul.Scalar", "multiply.Tensor", "multiply.Scalar")
def multiplication(t: Interpreter, a: Arguments) -> Any:
    return multiply(t, as_value(a["self"]), as_value(a["other"]))


@rule("outer.default", "ger.default")
def outer(t: Interpreter, a: Arguments) -> Any:
    """x[:, None] · y[None, :]."""
    x: Value = a["self"]
    y: Value = a["vec2"]
    shape = torch.Size([x.shape[0], y.shape[0]])
    column = x.mapped(lambda s: s[:, None].expand(shape), shape)
    return multiply(t, column, y.mapped(lambda s: s[None].expand(shape), shape))


@rule("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def division(t: Interpreter, a: Arguments) -> Any:
    if a.get("rounding_mode") is not None:
        return NotImplemented  # rounding depends on the scale
    return multiply(t, as_value(a["self"]), as_value(a["other"]), inverse=True)


@rule("square.default", "sqrt.default", "rsqrt.default", "reciprocal.default")
def fixed_power(t: Interpreter, a: Arguments) -> Any:
    exponent = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}[t.op_name.rstrip("_")]
    return _power(t, a["self"], exponent)


@rule("pow.Tensor_Scalar", "pow.Tensor_Tensor")
def scalar_power(t: Interpreter, a: Arguments) -> Any:
    """x ** number. An exponent that is a tensor must be known and the same everywhere."""
    exponent = a["exponent"]
    if isinstance(exponent, Value):
        if exponent.known is None or exponent.known.numel() != 1:
            return NotImplemented
        exponent = exponent.known.item()
    return _power(t, a["self"], float(exponent)).expanded(t.result_shape())


def _power(t: Interpreter, x: Value, exponent: float) -> Value:
    labels = t.labels(x)
    if exponent == 0:
        return frozen(x.shape, static=x.static)  # x ** 0 is 1 at any scale
    if exponent < 0:
        labels = nonzero(labels)
    return activation(t.power(labels, exponent), static=x.static)


@rule("glu.default")
def glu(t: Interpreter, a: Arguments) -> Any:
    """First half times the sigmoid of the second: the gate is frozen, the other half is free."""
    labels = t.labels(a["self"])
    first, gate = labels.chunk(2, a["dim"])
    t.scales.freeze(lb.narrowed(gate), t.now)
    return activation(first)


# -- ops that do not see the scale, and ops that do --------------------------------------------------------------------


@rule(
    "sign.default",
    "sgn.default",
    "signbit.default",
    "isnan.default",
    "isinf.default",
    "isfinite.default",
    "logical_not.default",
    "logical_and.default",
    "logical_or.default",
    "logical_xor.default",
    "isposinf.default",
    "bitwise_not.default",
    "isneginf.default",
    "count_nonzero.default",
    "any.default",
    "any.dim",
    "all.default",
    "all.dim",
)
def scale_blind(t: Interpreter, a: Arguments) -> Any:
    """Depends on signs only: the input stays free, the output is frozen. (`bitwise_not` takes no other numbers.)"""
    a.everything()
    return t.frozen_result()


@rule("eq.Scalar", "ne.Scalar", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar")
def compare_number(t: Interpreter, a: Arguments) -> Any:
    """Comparing with 0 looks at the sign only."""
    return scale_blind(t, a) if a["other"] == 0 else NotImplemented


@rule("eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor")
def compare_tensors(t: Interpreter, a: Arguments) -> Any:
    """Two tensors of one scale compare the same at every scale."""
    joined(t, a["self"], a["other"])
    return t.frozen_result()


@rule(
    "tanh.default",
    "sin.default",
    "asin.default",
    "atan.default",
    "sinh.default",
    "asinh.default",
    "erf.default",
    "expm1.default",
    "log1p.default",
    "tan.default",
    "gelu.default",
    "silu.default",
    "mish.default",
    "elu.default",
    "celu.default",
    "selu.default",
    "relu6.default",
    "hardswish.default",
    "softsign.default",
    "hardshrink.default",
    "softshrink.default",
    "round.default",
    "floor.default",
    "ceil.default",
    "trunc.default",
    "frac.default",
    "nan_to_num.default",
    "tanhshrink.default",
)
def zero_keeping_barrier(t: Interpreter, a: Arguments) -> Any:
    """Not homogeneous, so the input is frozen; but f(0) = 0, so a structural zero stays one."""
    value: Value = a["self"]
    a.everything()
    t.freeze(value)
    result: Value = t.frozen_result(static=value.static)
    if value.parameter is not None or t.node.meta["val"].dtype.is_complex:
        return result
    zeros = lb.elementwise(lambda s, r: torch.where(s == ZERO, ZERO, r), value.labels, result.labels)
    return activation(zeros, static=value.static)


@rule(
    "sigmoid.default",
    "hardsigmoid.default",
    "log_sigmoid.default",
    "softplus.default",
    "exp.default",
    "exp2.default",
    "log.default",
    "log2.default",
    "log10.default",
    "cos.default",
    "cosh.default",
    "acos.default",
    "erfc.default",
    "softmax.int",
    "_softmax.default",
    "log_softmax.int",
    "_log_softmax.default",
    "_safe_softmax.default",
    "logsumexp.default",
    "pow.Scalar",
    "alpha_dropout.default",
    "nll_loss.default",
    "nll_loss_nd.default",
    "cross_entropy_loss.default",
    "mse_loss.default",
    "floor_divide.default",
    "histc.default",
)
def barrier(t: Interpreter, a: Arguments) -> Any:
    """Not homogeneous: the input is frozen."""
    values = [v for v in a.everything().values() if isinstance(v, Value)]
    t.freeze(*values)
    return t.frozen_result(static=all(v.static for v in values))


@rule("_assert_tensor_metadata.default")
def nothing(t: Interpreter, a: Arguments) -> Any:
    """Reads a dtype or a shape."""
    a.everything()


# -- values that depend on a shape only --------------------------------------------------------------------------------


@rule(
    "zeros_like.default",
    "new_zeros.default",
    "ones_like.default",
    "new_ones.default",
    "full_like.default",
    "new_full.default",
    "zero.default",
    "fill.Scalar",
    "zeros.default",
    "ones.default",
    "full.default",
)
def filled(t: Interpreter, a: Arguments) -> Any:
    a.everything()
    number = 0 if "zero" in t.op_name else 1 if "ones" in t.op_name else a["value"] if "value" in a else a["fill_value"]
    return known(torch.tensor(number).to(t.node.meta["val"].dtype).expand(t.result_shape()))


@rule(
    "rand_like.default",
    "randn_like.default",
    "randint_like.default",
    "empty_like.default",
    "new_empty.default",
    "new_empty_strided.default",
    "empty.memory_format",
    "rand.default",
    "randn.default",
    "bernoulli.p",
    "bernoulli.float",
    "uniform.default",
    "normal.default",
    "exponential.default",
    "randperm.default",
)
def unknown_numbers(t: Interpreter, a: Arguments) -> Any:
    a.everything()
    return t.frozen_result()


@rule("fill.Tensor")
def fill_tensor(t: Interpreter, a: Arguments) -> Any:
    a["self"]
    return activation(t.labels(a["value"]).expand(t.result_shape()))


@rule("copy.default")
def copy(t: Interpreter, a: Arguments) -> Any:
    """The new content is the source's; the old one is gone."""
    a["self"]
    source: Value = a["src"]
    return activation(t.labels(source).expand(t.result_shape()), static=source.static)


# -- complex numbers, as used for rotary embeddings --------------------------------------------------------------------


@rule("view_as_complex.default")
def view_as_complex(t: Interpreter, a: Arguments) -> Any:
    """Real and imaginary part are rotated into each other: one scale."""
    return activation(t.collapse(t.labels(a["self"]), [-1]).select(-1, 0))


@rule("view_as_real.default")
def view_as_real(t: Interpreter, a: Arguments) -> Any:
    return activation(t.labels(a["self"]).unsqueeze(-1).expand(t.result_shape()))


@rule("complex.default", "polar.default")
def make_complex(t: Interpreter, a: Arguments) -> Any:
    if "real" in a:
        return joined(t, a["real"], a["imag"])
    t.freeze(a["angle"])
    return activation(t.labels(a["abs"]))
