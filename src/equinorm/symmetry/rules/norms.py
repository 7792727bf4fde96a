"""Normalization layers: what goes in is frozen, what comes out is carried by gain and offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import labels as lb
from ..interpreter import Arguments, Interpreter
from ..invariances import Norms
from ..values import Value, activation
from .elementwise import add, multiply
from .registry import rule


def affine(
    t: Interpreter, shape: torch.Size, gain: Value | None, offset: Value | None, layout: Sequence[int] | None
) -> Value:
    """gain · (something frozen) + offset; `layout` is the shape in which gain and offset meet it."""
    out = activation(t.frozen_labels(shape))

    def laid(value: Value) -> Value:
        size = torch.Size(layout) if layout is not None else value.shape
        return value.mapped(lambda s: lb.reshape(s, size), size)

    if gain is not None:
        out = multiply(t, out, laid(gain))
    return out if offset is None else add(t, out, laid(offset))


@rule(
    "batch_norm.default",
    "native_batch_norm.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_no_training.default",
    "_native_batch_norm_legit_functional.default",
    "_batch_norm_with_update.default",
    "_batch_norm_no_update.default",
    "_batch_norm_with_update_functional.default",
    "cudnn_batch_norm.default",
    "instance_norm.default",
    "native_group_norm.default",
    "group_norm.default",
)
def channel_norm(t: Interpreter, a: Arguments) -> Any:
    """Batch, instance and group norm: one gain and offset per channel (axis 1).

    With statistics of the batch the input's scale would cancel but for epsilon; with running statistics it does not.
    Either way the input is frozen, unless ε follows (`invariances`). `batchnorm="ignore"` treats batch norm as absent,
    as stock2019 did for ENorm + BN.
    """
    x: Value = a["input"]
    values = [v for v in a.everything().values() if isinstance(v, Value)]
    gain, offset = a["weight"], a["bias"]
    several = isinstance(t.node.meta["val"], tuple | list)
    if t.batchnorm == "ignore" and "batch_norm" in t.op_name:
        t.freeze(*(v for v in (gain, offset) if v is not None))
        out = x
    else:
        absorbed = t.norms is not None and x.parameter is None and _absorb(t, t.norms, x, a)
        t.freeze(*(v for v in values if v is not gain and v is not offset and not (absorbed and v is x)))
        layout = [-1] + [1] * (x.ndim - 2)
        layout[0] = x.shape[1]
        out = affine(t, x.shape, gain, offset, layout)
    return (out, *t.frozen_result()[1:]) if several else out


def _absorb(t: Interpreter, norms: Norms, x: Value, a: Arguments) -> bool:
    """Let a norm of channels take the scale of what it reads, where that can be."""
    epsilon = a["eps"] if "eps" in a else a.get("epsilon")
    if "batch_norm" not in t.op_name and "instance_norm" not in t.op_name:
        return norms.absorb(t, x, epsilon, range(x.ndim))
    statistics = any(name in a and a[name] is not None for name in ("running_mean", "running_var"))
    by_batch = ("training" in a and a["training"]) or ("use_input_stats" in a and a["use_input_stats"])
    training = bool(by_batch) or "update" in t.op_name.replace("no_update", "")
    return norms.absorb_batch(t, x, epsilon, training, statistics)


@rule("layer_norm.default", "native_layer_norm.default", "rms_norm.default", "_fused_rms_norm.default")
def trailing_norm(t: Interpreter, a: Arguments) -> Any:
    """Layer and RMS norm: gain and offset have the shape of the normalized trailing axes."""
    x: Value = a["input"]
    shape, epsilon = a["normalized_shape"], a["eps"]
    axes = range(x.ndim - len(shape), x.ndim)
    if t.norms is None or x.parameter is not None or not t.norms.absorb(t, x, epsilon, axes):
        t.freeze(x)
    out = affine(t, x.shape, a["weight"], a.get("bias"), layout=None)
    return (out, *t.frozen_result()[1:]) if isinstance(t.node.meta["val"], tuple | list) else out


@rule("_weight_norm.default", "_weight_norm_interface.default")
def weight_norm(t: Interpreter, a: Arguments) -> Any:
    """g·v/|v|: the direction is frozen, so the weight is as free as its gain."""
    direction: Value = a["v"]
    a["dim"]
    t.freeze(direction)
    weight = a["g"].expanded(direction.shape)
    return (weight, *t.frozen_result()[1:]) if isinstance(t.node.meta["val"], tuple | list) else weight
