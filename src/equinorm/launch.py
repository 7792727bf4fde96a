"""When the fused kernels take over from their plain twins, and how they are launched at little cost to the host.

They do for ordinary tensors on CUDA, run eagerly. `torch.compile` fuses the plain versions itself, but for what a
room's `operators` do better, and whatever looks at the single operations of a model (an export, a trace, functorch, a
dispatch mode) has to see them. Without Triton there are no kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "CHANNELS_LAST",
    "DTYPES",
    "ORDINARY",
    "DeviceTable",
    "Launch",
    "channels_last",
    "compilable",
    "dense",
    "is_capturing",
    "kernels",
    "launchable",
    "module",
    "on_device",
    "plain_only",
]

ALIGNMENT = 16
"""Bytes. Triton has another version of a kernel for addresses that are not multiples of this."""

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of the tensors that kernels take; sums are float32, so float64 is for the plain twins."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of axes."""

ORDINARY = (Tensor, nn.Parameter)
"""Types of tensors without ways of their own. Not a set: `torch.compile` of torch 2.6 cannot look into one of types."""
_kernels_allowed = True


def kernels(name: str, *tensors: Tensor | None) -> ModuleType | None:
    """The module of that name if its kernels can be launched on these tensors, here and now; else None.

    >>> kernels("equinorm.msr.kernels", V, g)
    """
    return module(name) if launchable(*tensors) else None


def launchable(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors on one CUDA device, in eager mode; None stands for no tensor."""
    if torch.compiler.is_compiling() or not _kernels_allowed:
        return False
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if device is None:
            if not tensor.is_cuda:
                return False
            device = tensor.device
        if type(tensor) not in ORDINARY or tensor.device != device:
            return False
    return not (
        torch._C._get_tracing_state() is not None  # torch.jit.trace
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def dense(tensor: Tensor) -> bool:
    """Whether a tensor is what kernels take: not empty, without gaps, filter after filter in memory."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.numel() == 0:
        return False
    return tensor.is_contiguous() or channels_last(tensor)


def channels_last(tensor: Tensor) -> bool:
    layout = CHANNELS_LAST.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)


def compilable(operators: str, *tensors: Tensor | None) -> bool:
    """Whether `torch.compile` looks, at ordinary tensors on CUDA: then `torch.ops.equinorm` has what that module makes.

    Not where it looks in order to export: a program for elsewhere has to be made of torch's own operations.
    """
    if not torch.compiler.is_compiling() or _exporting() or not _kernels_allowed:
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return all(type(tensor) in ORDINARY and _on_cuda(tensor) for tensor in given) and _operators_apply(operators)


def _on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _operators_apply(name: str) -> bool:
    """Have the operations made, for which it takes Triton. They have no rules for functorch."""
    return not torch._C._are_functorch_transforms_active() and module(name) is not None


# torch.compile calls it and takes the answer: as `torch.compiler.assume_constant_result`, which imports Triton, has it
_operators_apply._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _exporting() -> bool:
    """`torch.compiler.is_exporting()`, which is always true when torch 2.11 traces it; torch 2.6 does not tell."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


@contextmanager
def plain_only() -> Iterator[None]:
    """Use the plain twins in here, for comparisons.

    >>> with plain_only():
    ...     expected = layer(x)
    """
    global _kernels_allowed
    before, _kernels_allowed = _kernels_allowed, False
    try:
        yield
    finally:
        _kernels_allowed = before


@cache
def module(name: str) -> ModuleType | None:
    """The module of that name; None without Triton."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module(name)


class Launch:
    """A Triton kernel with its grid and its numbers; called with its tensors, which are its first parameters.

    Triton looks at every argument of every call to find out which version of a kernel it needs: some tens of
    microseconds, more than a small kernel runs. Here it is asked on the first call; then the version it chose is
    launched, on the current stream. So all calls have tensors of the same dtypes, or None, in the same places.
    Addresses that are not aligned need another version and go the long way, as does what Triton interprets.

    >>> double = Launch(_double, (triton.cdiv(x.numel(), 1024),), x.device, size=x.numel(), BLOCK=1024)
    >>> double(x)
    >>> again = double.on(x)    # x is looked at once, for any number of calls
    >>> again()

    `early` lets the kernel begin before the one ahead of it has ended (Hopper's programmatic dependent launch).
    """

    __slots__ = ("_arguments", "_compiled", "_index", "_run", "_shape", "grid", "kernel", "numbers", "options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        *,
        num_warps: int = 4,
        early: int = False,
        **numbers: Any,
    ) -> None:
        names = kernel.arg_names[-len(numbers) :]
        assert list(numbers) == names, f"the last parameters of this kernel are {names}, got {list(numbers)}"
        assert num_warps.bit_count() == 1, f"the number of warps is a power of two, got {num_warps}"
        self.kernel, self.grid, self.numbers = kernel, grid, numbers
        self.options = {"num_warps": num_warps} | ({"launch_pdl": True} if early else {})
        self._shape = (*grid, 1, 1)[:3]
        self._index = device.index
        self._arguments = tuple(numbers.values())
        self._run: Any = None
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor | None) -> None:
        self._launch(tensors, *_addresses(tensors))

    def by(self, kernel: Any, *tensors: Tensor | None) -> None:
        """The launch by a stand-in for the kernel, such as one that torch can look into; None: by the kernel."""
        if kernel is None:
            self(*tensors)
        else:
            kernel[self.grid](*tensors, **self.numbers, **self.options)

    def on(self, *tensors: Tensor | None) -> Callable[[], None]:
        """The launch on these tensors, whose memory stays where it is."""
        return partial(self._launch, tensors, *_addresses(tensors))

    def _launch(self, tensors: tuple[Tensor | None, ...], addresses: list[int | None], aligned: bool) -> None:
        if self._run is None or not aligned:
            compiled = self.kernel[self.grid](*tensors, **self.numbers, **self.options)
            if aligned:
                self._remember(compiled)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        # what Triton does in the end, without its hooks for profilers
        self._run(*self._shape, stream, *self._compiled, None, None, None, *addresses, *self._arguments)

    def _remember(self, compiled: Any) -> None:
        """Keep what Triton chose, if it tells."""
        if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
            self._compiled = (compiled.function, compiled.packed_metadata)
            self._run = compiled.run
            if hasattr(self.kernel, "non_constexpr_indices"):  # Triton 3.2, whose launchers do not take constants
                constant = {p.name for p in self.kernel.params if p.is_constexpr}
                self._arguments = tuple(value for name, value in self.numbers.items() if name not in constant)


def _addresses(tensors: Iterable[Tensor | None]) -> tuple[list[int | None], bool]:
    """Where tensors lie, and whether that is aligned for all of them."""
    all_bits, addresses = 0, []
    for tensor in tensors:
        address = None if tensor is None else tensor.data_ptr()
        addresses.append(address)
        all_bits |= address or 0
    return addresses, all_bits % ALIGNMENT == 0


class DeviceTable:
    """A table on the device, written by kernels whose arguments are its values: no copy from the host to wait for.

    What a captured graph reads is never written again: then the next values go to new memory, as those do that are
    written inside a capture.

    >>> table = DeviceTable(2, torch.int64, device)
    >>> table.write((x.data_ptr(), y.data_ptr()))      # costs nothing where no value changed
    >>> launch(table.values)
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(length, dtype=dtype, device=device)
        self.places = self.values.split(1)
        self._last_written: tuple[float, ...] | None = None
        self._read_by_graphs: list[Tensor] = []

    @property
    def known(self) -> bool:
        """Whether the values are those last written: not after writing was only captured."""
        return self._last_written is not None

    def write(self, values: tuple[float, ...]) -> bool:
        """Write all values; True if `values` is another tensor now."""
        if values == self._last_written:
            return False
        capturing = is_capturing(self.values.device)
        renewed = capturing or any(self.values is read for read in self._read_by_graphs)
        if renewed:
            self.values = torch.zeros_like(self.values)
            self.places = self.values.split(1)
        else:
            self.values.zero_()
        not_zero = [(place, value) for place, value in zip(self.places, values, strict=True) if value]
        if not_zero:
            torch._foreach_add_([place for place, _ in not_zero], [value for _, value in not_zero])
        self._last_written = None if capturing else values
        return renewed

    def keep(self) -> None:
        """Call inside a capture: the graph reads the table as it is."""
        if not any(self.values is read for read in self._read_by_graphs):
            self._read_by_graphs.append(self.values)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on this device in here. Changing devices takes a while, and is done only if need be."""
    if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
        return torch.cuda.device(device)
    return nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
