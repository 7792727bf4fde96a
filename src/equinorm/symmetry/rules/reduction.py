"""Ops that combine elements along axes: sums, means, extrema, norms, pooling, resampling."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from ..interpreter import Arguments, Interpreter
from ..values import Value, activation, frozen
from .elementwise import joined
from .registry import rule


def reduced(t: Interpreter, value: Value, dims: Any, keepdim: bool) -> Tensor:
    """Labels after a reduction: what is combined has one scale."""
    labels = t.labels(value)
    dims = range(value.ndim) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    axes = sorted({d % value.ndim for d in dims}) if value.ndim else []
    labels = t.collapse(labels, axes)
    if not keepdim:
        for axis in reversed(axes):
            labels = labels.select(axis, 0)
    return labels


def _dims(a: Arguments) -> tuple[Any, bool]:
    return a.get("dim"), bool(a.get("keepdim"))


@rule(
    "sum.default",
    "sum.dim_IntList",
    "mean.default",
    "mean.dim",
    "amax.default",
    "amin.default",
    "max.default",
    "min.default",
    "nansum.default",
    "nanmean.default",
    "median.default",
)
def linear_reduction(t: Interpreter, a: Arguments) -> Any:
    a.get("dtype")
    return activation(reduced(t, a["self"], *_dims(a)), static=a["self"].static)


@rule("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def norm(t: Interpreter, a: Arguments) -> Any:
    """Every norm is homogeneous; order 0 counts elements and sees no scale."""
    order = a["ord"] if "ord" in a else a["p"]
    a.get("dtype")
    labels = reduced(t, a["self"], *_dims(a))
    return frozen(labels.shape) if order == 0 else activation(labels, static=a["self"].static)


@rule("cdist.default", "_cdist_forward.default")
def distance(t: Interpreter, a: Arguments) -> Any:
    """Norms of differences between rows of x1 and rows of x2: homogeneous if they all have one scale.

    Order 0 counts elements that differ, and sees no scale.
    """
    a["compute_mode"]
    both = [t.collapse(t.labels(a[name]), [-2, -1])[..., :1, :1] for name in ("x1", "x2")]
    one = t.labels(joined(t, *map(activation, both)))
    return frozen(t.result_shape()) if a["p"] == 0 else activation(one.expand(t.result_shape()))


@rule(
    "var.correction",
    "var.dim",
    "var.default",
    "std.correction",
    "std.dim",
    "std.default",
    "var_mean.correction",
    "std_mean.correction",
    "var_mean.dim",
    "std_mean.dim",
)
def spread(t: Interpreter, a: Arguments) -> Any:
    """A variance has the square of the scale, a deviation the scale itself."""
    a.get("correction"), a.get("unbiased")
    labels = reduced(t, a["self"], *_dims(a))
    first = activation(t.power(labels, 2.0) if t.op_name.startswith("var") else labels, static=a["self"].static)
    return (first, activation(labels)) if t.op_name.endswith("mean") else first


@rule("max.dim", "min.dim", "median.dim", "kthvalue.default", "mode.default", "cummax.default", "cummin.default")
def extremum_along(t: Interpreter, a: Arguments) -> Any:
    """Among elements of one scale the position of the extremum does not depend on it."""
    a.everything()
    value: Value = a["self"]
    if t.op_name.startswith("cum"):
        labels = t.collapse(t.labels(value), [a["dim"]]).expand(value.shape)
    else:
        labels = reduced(t, value, a["dim"], a["keepdim"])
    return (activation(labels), frozen(labels.shape))


@rule("topk.default", "sort.default", "sort.stable")
def ordered(t: Interpreter, a: Arguments) -> Any:
    a.everything()
    labels = t.collapse(t.labels(a["self"]), [a["dim"]]).expand(t.result_shape(0))
    return (activation(labels), frozen(labels.shape))


@rule("argmax.default", "argmin.default", "argsort.default", "argsort.stable")
def position(t: Interpreter, a: Arguments) -> Any:
    """Depends on the order of elements only, which one common scale keeps."""
    a.everything()
    value: Value = a["self"]
    t.collapse(t.labels(value), range(value.ndim) if a["dim"] is None else [a["dim"]])
    return t.frozen_result()


@rule("cumsum.default")
def running(t: Interpreter, a: Arguments) -> Any:
    a["dtype"]
    return activation(t.collapse(t.labels(a["self"]), [a["dim"]]).expand(t.result_shape()))


@rule("prod.dim_int")
def product(t: Interpreter, a: Arguments) -> Any:
    """n factors of one scale have its n-th power."""
    a["dtype"]
    value: Value = a["self"]
    factors = value.shape[a["dim"]] if value.ndim else 1
    return activation(t.power(reduced(t, value, *_dims(a)), float(factors)))


# -- pooling and resampling: combine or copy pixels of one channel -----------------------------------------------------

_POOLS = [
    f"{kind}_pool{n}d{tail}"
    for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "_adaptive_avg")
    for n in (1, 2, 3)
    for tail in (".default",)
]
_POOLS += [f"max_pool{n}d_with_indices.default" for n in (1, 2, 3)]
_SAMPLERS = [
    f"{kind}.{tail}"
    for kind in (
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    )
    for tail in ("default", "vec")
]


@rule(*_POOLS, *_SAMPLERS)
def pooling(t: Interpreter, a: Arguments) -> Any:
    """Averages, maxima and interpolations of pixels of one channel keep the channel's scale.

    Padding with zeros (average) or minus infinity (maximum) fits any scale.
    """
    a.everything()
    value: Value = a["self"] if "self" in a else a["input"]
    found = re.search(r"(\d)d", t.op_name)
    assert found is not None
    spatial = int(found.group(1))
    labels = t.collapse(t.labels(value), range(value.ndim - spatial, value.ndim))
    val = t.node.meta["val"]
    if isinstance(val, tuple | list):
        return (activation(labels.expand(val[0].shape)), frozen(val[1].shape))
    return activation(labels.expand(val.shape))


@rule("grid_sampler.default", "grid_sampler_2d.default", "grid_sampler_3d.default")
def grid_sample(t: Interpreter, a: Arguments) -> Any:
    """Interpolates pixels of one channel at given places."""
    t.freeze(a["grid"])
    value: Value = a["input"]
    a.everything()
    return activation(t.collapse(t.labels(value), range(2, value.ndim)).expand(t.result_shape()))


@rule(
    "fft_fft.default",
    "fft_ifft.default",
    "fft_rfft.default",
    "fft_irfft.default",
    "fft_hfft.default",
    "fft_ihfft.default",
    "fft_fft2.default",
    "fft_ifft2.default",
    "fft_rfft2.default",
    "fft_irfft2.default",
    "fft_fftn.default",
    "fft_ifftn.default",
    "fft_rfftn.default",
    "fft_irfftn.default",
)
def fourier(t: Interpreter, a: Arguments) -> Any:
    """Linear along its axes, which mix."""
    a.everything()
    value: Value = a["self"]
    dims = a["dim"]
    axes = [dims] if isinstance(dims, int) else range(value.ndim) if dims is None else dims
    return activation(t.collapse(t.labels(value), axes).expand(t.result_shape()))
