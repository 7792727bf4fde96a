"""min(relu(x), c) with a cap c per channel; as a module, and in the place of functions that a module's code calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Cap", "FunctionCaps", "bounds_of", "capped", "has_caps", "put_caps_"]


def capped(x: Tensor, cap: Tensor, axis: int) -> Tensor:
    """min(relu(x), cap) with one cap for each position of an axis, which counts from the end.

    >>> y = capped(x, torch.full((8,), 6.0), axis=-3)
    """
    return torch.minimum(F.relu(x), cap.to(x.dtype).view(-1, *[1] * (-1 - axis)))


class Cap(nn.Module):
    """min(relu(x), c) with one cap c per channel. With equal caps it is `nn.Hardtanh(0, c)`; c = 6 is ReLU6.

    ReLU6 is not homogeneous, but min(relu(s x), s c) = s min(relu(x), c) for s > 0: a cap per channel carries the scale
    of its channel, as a bias does.

    `axis` is the channels' axis counted from the end: -1 behind a linear layer, -3 behind a 2-d convolution.

    >>> nn.Sequential(nn.Conv2d(3, 8, 3), Cap(8, cap=6.0, axis=-3))
    """

    def __init__(self, num_features: int, cap: float = 6.0, axis: int = -3) -> None:
        super().__init__()
        if cap <= 0:
            raise ValueError(f"a cap must be positive, got {cap}")
        if axis >= 0:
            raise ValueError(f"axis counts from the end, so it is negative; got {axis}")
        self.axis = axis
        self.cap = nn.Parameter(torch.full((num_features,), float(cap)))

    def forward(self, x: Tensor) -> Tensor:
        return capped(x, self.cap, self.axis)

    def extra_repr(self) -> str:
        return f"{len(self.cap)}, axis={self.axis}"


# -- in the place of functions -----------------------------------------------------------------------------------------


def _of_hardtanh(x: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> tuple[Any, Any, Any]:
    return x, min_val, max_val


def _of_relu6(x: Any, inplace: bool = False) -> tuple[Any, Any, Any]:
    return x, 0.0, 6.0


def _of_clamp(x: Any, min: Any = None, max: Any = None, *, out: Any = None) -> tuple[Any, Any, Any]:
    return x, min, None if out is not None else max


def _is_inplace(x: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> bool:
    """Whether the result is written over x: `inplace` is the last argument of F.relu6 and F.hardtanh."""
    return inplace is True or (bool(args) and args[-1] is True)


_READ: dict[Callable[..., Any], Callable[..., tuple[Any, Any, Any]]] = {
    F.relu6: _of_relu6,
    F.hardtanh: _of_hardtanh,
    F.hardtanh_: _of_hardtanh,
    torch._C._nn.hardtanh: _of_hardtanh,
    torch._C._nn.hardtanh_: _of_hardtanh,
    torch._C._nn.relu6: _of_relu6,
    torch._C._nn.relu6_: _of_relu6,
    **dict.fromkeys(
        (torch.clamp, torch.clip, torch.clamp_, torch.clip_, Tensor.clamp, Tensor.clip, Tensor.clamp_, Tensor.clip_),
        _of_clamp,
    ),
}
"""The functions that may cap, and what they are given: x, the lower and the upper bound."""
_WRITES = frozenset({function for function in _READ if function.__name__.endswith("_")})


def bounds_of(low: Any, high: Any) -> float | None:
    """The cap of a clamp between two bounds, if it is one: 0 below and a positive number above."""
    numbers = all(isinstance(bound, int | float) for bound in (low, high))
    return float(high) if numbers and low == 0 and 0 < high < float("inf") else None


class _Active(threading.local):
    """The modes that are on, innermost last: only the innermost module's code is meant."""

    def __init__(self) -> None:
        self.modes: list[_CapMode] = []


_ACTIVE = _Active()


class _CapMode(TorchFunctionMode):
    """Puts caps in the place of the functions that cap, in the order in which they are called."""

    def __init__(self, caps: FunctionCaps) -> None:
        super().__init__()
        self.caps = caps
        self.count = 0

    def __enter__(self) -> _CapMode:
        _ACTIVE.modes.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        _ACTIVE.modes.pop()
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _READ or _ACTIVE.modes[-1] is not self:
            return func(*args, **kwargs)
        x, low, high = _READ[func](*args, **kwargs)
        cap = bounds_of(low, high)
        if cap is None:
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        was, which = self.caps.expected(number)
        if was != cap:
            raise RuntimeError(
                f"call {number} of a function that caps is at {cap} here, but was {was} when the model was converted: "
                "its forward took another way. Convert it with inputs of this kind."
            )
        if which is None:
            return func(*args, **kwargs)
        result = capped(x, self.caps.caps[which], self.caps.axes[which])
        return x.copy_(result) if func in _WRITES or _is_inplace(*args, **kwargs) else result


class FunctionCaps(nn.Module):
    """The caps that stand in the place of F.relu6, F.hardtanh(0, c) and clamp(0, c) in the code of one module.

    `calls` holds, for each call in order, its number c and which cap takes its place (`None`: none does).
    """

    def __init__(self, caps: Iterable[Cap], calls: Iterable[tuple[float, int | None]]) -> None:
        super().__init__()
        caps = list(caps)
        self.caps = nn.ParameterList([cap.cap for cap in caps])
        self.axes = tuple(cap.axis for cap in caps)
        self.calls = tuple(calls)

    def expected(self, number: int) -> tuple[float | None, int | None]:
        """What a call is known to be: its number c, and which cap takes its place."""
        return self.calls[number] if number < len(self.calls) else (None, None)

    def extra_repr(self) -> str:
        return f"{len(self.axes)} caps"


def put_caps_(module: nn.Module, caps: FunctionCaps) -> None:
    """Let caps take the place of the functions that a module's code calls; they become its child `caps`."""
    module.register_module("caps", caps.train(module.training))
    module.register_forward_pre_hook(_enter)
    module.register_forward_hook(_leave, always_call=True)


def has_caps(module: nn.Module) -> bool:
    """Whether caps take the place of functions in a module's code."""
    return _enter in module._forward_pre_hooks.values()


def _enter(module: nn.Module, _: Any) -> None:
    if isinstance(module.caps, FunctionCaps):  # else it was folded
        _CapMode(module.caps).__enter__()


def _leave(module: nn.Module, *_: Any) -> None:
    if _ACTIVE.modes and _ACTIVE.modes[-1].caps is module.caps:
        _ACTIVE.modes[-1].__exit__(None, None, None)
