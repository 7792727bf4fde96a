"""Measure a network while it trains, at an interval and a bounded cost.

    recorder = Recorder(model, optimizer, path="run.jsonl")      # from here on, every 100th optimizer.step()
    ...
    recorder.close(); print(recorder.cost())

Between recordings nothing happens: no copy, no kernel, no host synchronisation. At a recording the numbers are packed
into one tensor on the device and copied to the host without waiting; they are read and written at the next recording.
If the recorder has used more than `max_share` of the time, it passes recordings over until it has not.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..models.unwrapping import unwrap, unwrap_optimizer
from .curvature import top_eigenvalue
from .landscape import STEPS, gradient_scan
from .probe import Batch, Loss, by_filter, filters, wider
from .propagation import forward_norms, gradient_norms
from .shift import channel_means, drift, kernel_means
from .units import dead_units
from .writers import writing_to

EVERY = 100
MAX_SHARE = 0.02
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

# -- what can be recorded ----------------------------------------------------------------------------------------------


@dataclass
class Context:
    """What an instrument gets at a recording."""

    model: nn.Module
    optimizer: Optimizer
    step: int
    loss_fn: Loss | None = None
    batch: Callable[[], Batch] | None = None
    memory: dict[str, Any] = field(default_factory=dict)  # what an instrument wants to find again at the next recording

    def probe(self) -> tuple[nn.Module, Loss, Batch]:
        """The arguments of an instrument that needs a loss and a batch."""
        if self.loss_fn is None or self.batch is None:
            raise ValueError("this instrument needs a loss and a batch: Recorder(..., loss_fn=..., batch=(x, y))")
        return self.model, self.loss_fn, self.batch()

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])


Values = Mapping[str, Any]  # tensors, numbers, and dicts of them by layer
Instrument = Callable[[Context], Values]


def record_weights(context: Context) -> Values:
    """From the weights alone: energy of each layer, and quantiles of the lengths of its filters."""
    rows = {name: by_filter(w, axis) for name, (w, axis) in filters(context.model).items()}
    lengths = {name: torch.linalg.vector_norm(row, dim=1) for name, row in rows.items()}
    return {
        "energy": {name: length.square().sum() for name, length in lengths.items()},
        "filter_norm": {name: _quantiles(length) for name, length in lengths.items()},
    }


def record_gradients(context: Context) -> Values:
    """From the gradients that the step was made with: ‖∇W‖ of each layer, and lr · ‖∇W‖ / ‖W‖."""
    groups = {id(p): group["lr"] for group in context.optimizer.param_groups for p in group["params"]}
    weights = [
        (name, p, p.grad)
        for name, p in unwrap(context.model).named_parameters()
        if p.grad is not None and p.ndim > 1 and id(p) in groups
    ]
    if not weights:
        return {}
    lengths = [torch.linalg.vector_norm(g, dtype=wider(g.dtype)) for _, _, g in weights]
    sizes = [torch.linalg.vector_norm(p.detach(), dtype=wider(p.dtype)) for _, p, _ in weights]
    return {
        "gradient_norm": {name: length for (name, _, _), length in zip(weights, lengths, strict=True)},
        "relative_step": {
            name: groups[id(p)] * length / size.clamp_min(1e-30)
            for (name, p, _), length, size in zip(weights, lengths, sizes, strict=True)
        },
    }


def record_landscape(context: Context) -> Values:
    """Loss, predictiveness and smoothness along the gradient at ½, 1, 2 and 4 times the learning rate."""
    scan = gradient_scan(*context.probe(), steps=[context.lr * factor for factor in STEPS])
    return {
        "steps": scan.steps,
        "loss": scan.loss,
        "losses": scan.losses,
        "gradient_norm": scan.gradient_norm,
        "changes": scan.changes,
        "cosines": scan.cosines,
        "beta": scan.smoothness.beta,
    }


def record_curvature(context: Context) -> Values:
    """The top eigenvalue of the Hessian, by at most 30 power iterations."""
    found = top_eigenvalue(*context.probe(), iterations=30, tolerance=1e-2)
    return {"eigenvalue": found.value, "residual": found.residual}


def record_propagation(context: Context) -> Values:
    """Root mean square of each layer's output, and the gradient's norm there."""
    model, loss_fn, batch = context.probe()
    forward, backward = forward_norms(model, batch[0]), gradient_norms(model, loss_fn, batch)
    return {
        "forward_rms": dict(zip(forward.names, forward.rms, strict=True)),
        "backward_norm": dict(zip(backward.names, backward.norm, strict=True)),
    }


def record_shift(context: Context) -> Values:
    """The part of each layer's output that is mean, how far the channel means have moved since the last recording, in
    units of the layer's deviation, and the part of each kernel that a constant goes through."""
    means, before = channel_means(context.model, context.probe()[2][0]), context.memory.get("channel_means")
    context.memory["channel_means"] = means
    moved = None if before is None else drift(before, means)
    return {
        "mean_share": means.share,
        "drift": {} if moved is None else dict(zip(moved.names, moved.drift, strict=True)),
        "kernel_mean_share": kernel_means(context.model).share,
    }


def record_units(context: Context) -> Values:
    """Dead and saturated units."""
    found = dead_units(context.model, context.probe()[2][0])
    return {
        "dead": dict(zip(found.names, found.dead, strict=True)),
        "saturated": dict(zip(found.names, found.saturated, strict=True)),
    }


INSTRUMENTS: dict[str, Instrument] = {
    "weights": record_weights,
    "gradients": record_gradients,
    "landscape": record_landscape,
    "curvature": record_curvature,
    "propagation": record_propagation,
    "shift": record_shift,
    "units": record_units,
}
"""By name. The first two need neither a loss nor a batch and cost next to nothing: they are the default."""
_NEED_A_BATCH = ("landscape", "curvature", "propagation", "shift", "units")


def _quantiles(values: Tensor) -> Tensor:
    ordered = values.sort().values  # one by one: an index made of a list would wait for the device
    return torch.stack([ordered[round(q * (len(values) - 1))] for q in QUANTILES])


# -- when and where ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What recording has cost so far."""

    share: float  # of the time from the first step to the last
    seconds: float  # in recordings
    elapsed: float  # from the first step to the last
    records: int
    passed_over: int  # recordings that were due but over the budget

    def __str__(self) -> str:
        each = self.seconds / self.records if self.records else 0.0
        late = f", {self.passed_over} passed over to stay within the budget" if self.passed_over else ""
        return (
            f"{self.records} recordings of {1e3 * each:.1f} ms in {self.elapsed:.1f} s: "
            f"{100 * self.share:.2f} % of the time{late}"
        )


@dataclass
class _Pending:
    """A recording whose numbers are on their way to the host."""

    step: int
    layout: dict[str, Any]  # the record, with a slice of `numbers` in the place of every tensor
    numbers: Tensor
    host_seconds: float
    events: tuple[Any, Any] | None = None


@dataclass
class _Layout:
    tensors: list[Tensor] = field(default_factory=list)
    size: int = 0

    def take(self, value: Any) -> Any:
        """Replace tensors by (start, stop, is a list) in one flat vector."""
        if isinstance(value, Tensor):
            start, self.size = self.size, self.size + value.numel()
            self.tensors.append(value.detach())
            return (start, self.size, value.ndim > 0)
        if isinstance(value, Mapping):
            return {str(key): self.take(item) for key, item in value.items()}
        return [self.take(item) for item in value] if isinstance(value, list | tuple) else value


class Recorder:
    """Record instruments after every `every`-th step of an optimizer.

    Args:
        model, optimizer: what is trained. The first step is recorded, then every `every`-th.
        every: interval in optimizer steps.
        instruments: names from `INSTRUMENTS`, or functions of a `Context` that return tensors by name.
        loss_fn, batch: for instruments that need them; `batch` is a pair (inputs, targets), or a function that
            returns one.
        path: a file that gets one line of JSON per recording. It is appended to; a torn last line is cut off first.
        keep: how many records stay in memory, in `records`.
        writer: TensorBoard's SummaryWriter, a run of wandb, the module `mlflow`, accelerate's `Accelerator`, one of
            Lightning's loggers, or any function of (numbers by tag, step); see `diagnostics.writers`.
        max_share: the part of the time that recording may take; None for no limit.
        context: made around every measurement, such as `lambda: torch.autocast("cuda", torch.bfloat16)`.
        attach: False to call `record()` by hand, as a step that is replayed as a CUDA graph needs.

    >>> recorder = Recorder(model, optimizer, every=100, instruments=["weights", "landscape"],
    ...                     loss_fn=F.cross_entropy, batch=(x, y), path="run.jsonl")
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int = EVERY,
        instruments: Sequence[str | Instrument] = ("weights", "gradients"),
        *,
        loss_fn: Loss | None = None,
        batch: Batch | Callable[[], Batch] | None = None,
        path: str | os.PathLike[str] | None = None,
        keep: int = 1000,
        writer: Any = None,
        max_share: float | None = MAX_SHARE,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        attach: bool = True,
    ) -> None:
        if every < 1 or keep < 0:
            raise ValueError(f"every must be at least 1 and keep at least 0, got {every} and {keep}")
        self.instruments = {_name(i): INSTRUMENTS[i] if isinstance(i, str) else i for i in _known(instruments)}
        given = batch if callable(batch) or batch is None else (lambda: batch)
        optimizer, model = unwrap_optimizer(optimizer), unwrap(model)
        self._context = Context(model, optimizer, 0, loss_fn, given)
        needy = [name for name in self.instruments if name in _NEED_A_BATCH]
        if needy and (loss_fn is None or batch is None):
            raise ValueError(f"the instrument {needy[0]!r} needs a loss and a batch: pass loss_fn=... and batch=(x, y)")
        self.every, self.writer, self.max_share, self._around = every, writer, max_share, context
        self._write = None if writer is None else writing_to(writer)
        self.records: deque[dict[str, Any]] = deque(maxlen=keep)
        self._file = None if path is None else _open_lines(Path(path))
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._pending: _Pending | None = None
        self._seconds, self._made, self._passed = 0.0, 0, 0
        self._start = self._latest = float("nan")
        self.step = 0
        self._handle: RemovableHandle | None = None
        if attach:
            self._handle = optimizer.register_step_post_hook(lambda *_: self.advance())

    # -- what a user calls ---------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Count a step, and record if one is due; called by the optimizer where the recorder is attached."""
        self._latest = time.perf_counter()
        if self.step == 0:
            self._start = self._latest
        self.step += 1
        if self.step != 1 and self.step % self.every:
            return
        if self.max_share is not None and self.step != 1:
            expected = self._seconds + self._seconds / max(self._made, 1)
            if expected > self.max_share * (self._latest - self._start):
                self._passed += 1
                return
        self.record()

    def record(self) -> None:
        """Record now, whatever the interval and the budget."""
        self._drain()
        begin = time.perf_counter()
        if math.isnan(self._start):
            self._start = begin
        events = _events(self._device)
        self._context.step = self.step
        layout = _Layout()
        with self._around():
            found = {name: layout.take(instrument(self._context)) for name, instrument in self.instruments.items()}
        numbers = _to_host(layout.tensors, self._device)
        if events is not None:
            events[1].record()
        self._made += 1
        self._latest = time.perf_counter()
        self._pending = _Pending(self.step, found, numbers, self._latest - begin, events)
        if events is None:
            self._drain()

    def cost(self) -> Cost:
        """The share of the time since the first step that went into recording; print it."""
        self._drain()
        elapsed = self._latest - self._start if self._made else 0.0
        share = self._seconds / elapsed if elapsed else 0.0
        return Cost(share, self._seconds, elapsed, self._made, self._passed)

    def flush(self) -> None:
        """Write what is still on its way to the host."""
        self._drain()

    def remove(self) -> None:
        """Take the hook off the optimizer; records stay."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def close(self) -> None:
        """Remove the hook, write what is left and close the file; a second time does nothing."""
        self.remove()
        self._drain()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read, keep and write the recording that is on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        begin = time.perf_counter()
        spent = pending.host_seconds
        if pending.events is not None:
            start, end = pending.events
            end.synchronize()  # long past, unless this is called right after the recording
            spent = max(spent, start.elapsed_time(end) / 1e3)
        record = {"step": pending.step, **_filled(pending.layout, pending.numbers.tolist())}
        self.records.append(record)
        if self._file is not None:
            _append_line(self._file, record)
        if self._write is not None:
            self._write(dict(_scalars(record)), pending.step)
        self._seconds += spent + (time.perf_counter() - begin)


def _known(instruments: Iterable[str | Instrument]) -> list[str | Instrument]:
    chosen: list[str | Instrument] = [instruments] if isinstance(instruments, str) else list(instruments)
    for instrument in chosen:
        if isinstance(instrument, str) and instrument not in INSTRUMENTS:
            raise ValueError(f"there is no instrument {instrument!r}: choose from {', '.join(INSTRUMENTS)}")
    return chosen


def _name(instrument: str | Instrument) -> str:
    return instrument if isinstance(instrument, str) else getattr(instrument, "__name__", type(instrument).__name__)


def _events(device: torch.device) -> tuple[Any, Any] | None:
    if device.type != "cuda":
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    return start, end


def _to_host(tensors: list[Tensor], device: torch.device) -> Tensor:
    """All numbers in one vector of float64 on the host; from CUDA copied without waiting."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    exact = torch.float32 if device.type == "mps" else torch.float64
    flat = torch.cat([t.reshape(-1).to(device, exact) for t in tensors])
    if device.type != "cuda":
        return flat.cpu()
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    return host.copy_(flat, non_blocking=True)


def _filled(layout: Any, numbers: list[float]) -> Any:
    """The record with its numbers; JSON has no NaN and no infinity, they become None."""
    if isinstance(layout, dict):
        return {key: _filled(item, numbers) for key, item in layout.items()}
    if isinstance(layout, list):
        return [_filled(item, numbers) for item in layout]
    if isinstance(layout, tuple):
        start, stop, is_list = layout
        values = [_finite(number) for number in numbers[start:stop]]
        return values if is_list else values[0]
    return _finite(layout) if isinstance(layout, float) else layout


def _finite(number: float) -> float | None:
    return float(f"{number:.7g}") if math.isfinite(number) else None


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for key, value in record.items():
        tag = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{tag}/")
        elif isinstance(value, list):
            yield from ((f"{tag}/{i}", x) for i, x in enumerate(value) if x is not None)
        elif isinstance(value, int | float) and key != "step":
            yield tag, value


# -- lines of JSON -----------------------------------------------------------------------------------------------------


def _open_lines(path: Path) -> int:
    """Open for appending; what a crash left of a last line is cut off."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: make it first")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        start = max(0, end - (1 << 16))
        end = start + os.pread(descriptor, end - start, start).rfind(b"\n") + 1
    os.ftruncate(descriptor, end)
    return descriptor


def _append_line(descriptor: int, record: Mapping[str, Any]) -> None:
    """One write per line; if the disk takes only a part of it, the part is taken back."""
    line = (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode()
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        written = os.write(descriptor, line)
    except OSError:
        os.ftruncate(descriptor, end)
        raise
    if written != len(line):
        os.ftruncate(descriptor, end)
        raise OSError(f"only {written} of {len(line)} bytes of a record could be written: is the disk full?")


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file; a torn last line is left out.

    >>> [record["landscape"]["loss"] for record in read_records("run.jsonl")]
    """
    content = Path(path).read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


__all__ = ["INSTRUMENTS", "Context", "Cost", "Instrument", "Recorder", "read_records"]
