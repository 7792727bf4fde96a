"""Fused attention. (Written out with matmul and softmax it needs no rule of its own.)"""

from __future__ import annotations

from typing import Any

from ..interpreter import Arguments, Interpreter
from ..values import Value, activation
from .registry import rule


@rule(
    "scaled_dot_product_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_attention_math.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
)
def attention(t: Interpreter, a: Arguments) -> Any:
    """softmax(q·k)·v: per head and feature k = 1/q, and the output carries v's scales.

    Masks and learned position biases are added to the scores, so they are frozen: the rule does not read them.
    """
    query: Value = a["query"]
    q, k, v = (t.collapse(t.labels(a[name]), [-2]) for name in ("query", "key", "value"))
    if query.ndim > 2 and k.shape[-3] != q.shape[-3]:  # grouped queries: each key head serves several query heads
        heads = q.shape[-3]
        k = k.repeat_interleave(heads // k.shape[-3], -3) if k.shape[-3] > 1 else k
        v = v.repeat_interleave(heads // v.shape[-3], -3) if v.shape[-3] > 1 else v
    t.merge(k, q, exponent=-1.0)
    val = t.node.meta["val"]
    if isinstance(val, tuple | list):
        return (activation(v.expand(val[0].shape)), *t.frozen_result()[1:])
    return activation(v.expand(val.shape))
