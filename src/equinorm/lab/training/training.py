"""One run in progress: a step that can be replayed, and a state that can be saved after any step.

Everything random is a pure function of the run's seed and of the position in training: the order of the images of the
epoch, what a step draws of the epoch and the step. So a run that is interrupted anywhere and resumed makes the very
steps it would have made.

On CUDA a whole step (batch, augmentation, forward, backward, method, optimizer) is captured as one graph. What differs
from step to step is read from tables on the device, filled once per epoch; the host only says "again".
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ... import ENorm, ImplicitENorm, MeanShiftRejection, PathSGD, Symmetry, trace
from ...diagnostics import filter_norms, layer_energy
from ...models.running_statistics import update_statistics_
from ...msr import parameter_groups, scaled_kernels
from .. import nets as models
from ..data import DataSet, augment, draw_lambda, mixed_loss
from ..data.folder import SIZE, ImageFolder, stream
from ..nets.fused import fused_kernels
from .runs import Optim, Run

__all__ = ["LOSSES", "Inputs", "Streamed", "Training", "precision"]

TEST_BATCH = 2000
AT_ONCE = 8  # steps in one graph at most
PROBES = 4  # graphs from which the pace of a run is taken
FRESH = 50  # batches from which statistics are taken anew
FEW = 32  # images: kernels of such batches are small, and go first where others fill the device

# -- what is trained ---------------------------------------------------------------------------------------------------


def binary_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The binary cross-entropy of each class's softmax, mean over images and classes.

    The loss of Verma et al.'s program for manifold mixup, from which defazio2018 started. With ten classes that are
    equally likely its gradient is 0.11 of the cross-entropy's.
    """
    with torch.autocast(logits.device.type, enabled=False):  # which does not trust it with probabilities
        target = torch.zeros_like(logits).scatter(1, y[:, None], 1.0)
        return F.binary_cross_entropy(logits.softmax(1), target)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "binary": binary_cross_entropy,
}

# -- what the runs of a process share ----------------------------------------------------------------------------------


class Inputs:
    """A data set on a device, prepared as a run wants it; runs with the same `Data` share it."""

    streamed = False

    def __init__(self, data: DataSet, run: Run) -> None:
        spec = run.data
        device = data.train.images.device
        self.spec, self.classes, self.channels_last = spec, data.classes, is_low(run.precision, device)
        self.train, self.test_labels = data.train, data.test.labels
        self.mean, self.std = (torch.tensor(x, device=device) for x in (spec.mean or data.mean, spec.std or data.std))
        fixed = not (spec.crop or spec.padding or spec.flip or spec.scale)
        self.prepared = self.seen(data.train.images, training=False) if fixed else None
        self.test = self.seen(data.test.images, training=False)
        channels, height, width = self.test.shape[1:]
        self.shape = (channels, height, width)
        self.device = device

    def __len__(self) -> int:
        return len(self.train)

    def seen(self, images: Tensor, training: bool) -> Tensor:
        """Images as a network sees them; the random part of augmentation only in training."""
        return augment(images, self.spec, self.mean, self.std, training=training, channels_last=self.channels_last)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The training images of `index`, augmented, and their labels."""
        if self.prepared is not None:
            return self.prepared[index], self.train.labels[index]
        return self.seen(self.train.images[index], training=True), self.train.labels[index]

    def examples(self, n: int) -> Tensor:
        """The first n training images, without the random part."""
        return self.seen(self.train.images[:n], training=False)

    def tests(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.test.split(TEST_BATCH), self.test_labels.split(TEST_BATCH), strict=True)

    @property
    def test_size(self) -> int:
        return len(self.test_labels)


class Streamed:
    """A folder of images that is too large for the device: worker processes decode it, batch by batch."""

    streamed = True

    def __init__(self, folder: ImageFolder, run: Run, device: torch.device, workers: int | None = None) -> None:
        spec = run.data
        self.folder, self.spec, self.device = folder, spec, device
        self.workers = min(8, (os.cpu_count() or 1) - 1) if workers is None else workers
        self.classes, self.channels_last = len(folder.classes), is_low(run.precision, device)
        self.mean, self.std = (
            torch.tensor(x, device=device) for x in (spec.mean or folder.mean, spec.std or folder.std)
        )
        self.shape = (3, spec.crop or SIZE, spec.crop or SIZE)

    def __len__(self) -> int:
        return len(self.folder.train)

    def seen(self, images: Tensor, training: bool) -> Tensor:
        spec = replace(self.spec, crop=None)  # the workers have cut
        return augment(images, spec, self.mean, self.std, training=training, channels_last=self.channels_last)

    def epoch(self, batch: int, **position: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of an epoch from a given one on: bytes and labels, on the device."""
        return self._moved(stream(self.folder, self.spec, batch, training=True, workers=self.workers, **position))

    def examples(self, n: int) -> Tensor:
        images, _ = next(iter(self.epoch(min(n, len(self)))))
        return self.seen(images, training=False)

    def tests(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self._moved(stream(self.folder, self.spec, 250, training=False, workers=self.workers)):
            yield self.seen(images, training=False), labels

    def _moved(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((images.to(self.device), labels.to(self.device)) for images, labels in batches)

    @property
    def test_size(self) -> int:
        return len(self.folder.test)


def is_low(name: str, device: torch.device) -> bool:
    """Whether this precision is a low one there, for which images lie in channels_last; a CPU's is float32."""
    return name == "bfloat16" and device.type == "cuda"


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Matrix products in full float32, in TF32, or (autocast) in bfloat16; only CUDA knows the difference."""
    if name not in ("float32", "tf32", "bfloat16"):
        raise ValueError(f"precision must be float32, tf32 or bfloat16, got {name!r}")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = name == "tf32"
    cudnn.deterministic, cudnn.benchmark = True, False
    # no cache of cast weights: a replayed graph must cast them again
    casting: AbstractContextManager[Any] = (
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if is_low(name, device) else nullcontext()
    )
    try:
        with casting:
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def mixed_seed(*parts: int) -> int:
    """One seed from several numbers, none of which can undo another (splitmix64)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1  # generators want 63 bits


# -- model, optimizer and method of a run ------------------------------------------------------------------------------


@dataclass(eq=False)
class Parts:
    model: models.Chain
    optimizer: torch.optim.Optimizer
    method: Any  # ENorm or MeanShiftRejection (with a state of its own), ImplicitENorm (a penalty), or None

    @property
    def penalty(self) -> ImplicitENorm | None:
        return self.method if isinstance(self.method, ImplicitENorm) else None


def build(run: Run, inputs: Inputs | Streamed) -> Parts:
    """The untrained network of a run with its optimizer and method; the same for the same seed on every device."""
    device = inputs.device
    examples = inputs.examples(500)
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(mixed_seed(run.seed, 0))
        model = models.build(run.model.name, classes=inputs.classes, in_shape=inputs.shape, **run.model.options)
        model = model.to(device)
        if inputs.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        models.initialise_from_data(model, examples)  # with dropout, if there is some
    example = examples[:2]
    name, options = run.method.name, dict(run.method.options)
    if name == "path_sgd":
        if run.optim.momentum or run.optim.norm_rate != 1 or run.optim.bias_rate != 1:
            raise ValueError(
                "path_sgd has no momentum and one learning rate: momentum must be 0, norm_rate and bias_rate 1"
            )
        rate: Any = torch.tensor(run.optim.lr, device=device)
        return Parts(model, PathSGD(model, example, lr=rate, weight_decay=run.optim.weight_decay), None)
    symmetry = symmetry_of(run, model, example, options) if "enorm" in name else None
    penalty = ImplicitENorm(model, symmetry=symmetry, **options).to(device) if name == "implicit_enorm" else None
    optimizer = optimizer_of(run, model, penalty)
    if penalty is not None:
        return Parts(model, optimizer, penalty)
    if name == "enorm":  # gradients are not carried: the next step starts with new ones
        enorm = ENorm(model, optimizer, symmetry=symmetry, gradients=False, **options)
        enorm.attach()
        return Parts(model, optimizer, enorm)
    if name == "msr":
        # the first runs were made without `centre_luma`, and do not say so
        rejection = MeanShiftRejection(model, optimizer, **{"centre_luma": False, **options})
        rejection.attach()
        return Parts(model, optimizer, rejection)
    if name != "none":
        raise ValueError(f"unknown method {name!r}; there are none, enorm, implicit_enorm, path_sgd, msr")
    return Parts(model, optimizer, None)


_SYMMETRIES: dict[str, Symmetry] = {}


def symmetry_of(run: Run, model: nn.Module, example: Tensor, options: dict[str, Any]) -> Symmetry:
    """The symmetry of a run's network, traced once for all runs of one architecture. Takes its own `options` out."""
    chosen = {name: options.pop(name) for name in ("batchnorm", "keep") if name in options}
    key = repr((run.model, tuple(example.shape), example.device, chosen))
    if key not in _SYMMETRIES:
        _SYMMETRIES[key] = trace(model, example, **chosen)
    return _SYMMETRIES[key].bind(model)


def optimizer_of(run: Run, model: nn.Module, penalty: nn.Module | None) -> torch.optim.Optimizer:
    """The optimizer over parameter groups: what decays, what does not, what is slower than the rest (`part`: its
    learning rate over the run's), and the coefficients of implicit ENorm."""
    spec, device = run.optim, next(model.parameters()).device
    decay = 0.0 if penalty is not None else spec.weight_decay  # implicit ENorm's penalty takes its place
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": decay}]
    if any(True for _ in scaled_kernels(model)):
        groups = parameter_groups(model, decay)
    elif not spec.decay_norms:
        kinds = [[p for p in model.parameters() if of_outputs(p) == norms] for norms in (False, True)]
        groups = [{"params": kind, "weight_decay": d} for kind, d in zip(kinds, (decay, 0.0), strict=True)]
    groups = [{**group, **slower} for group in groups for slower in by_rate(group["params"], spec, model)]
    if penalty is not None:
        groups.append({"params": list(penalty.parameters()), "weight_decay": 0.0})
    on_gpu = device.type == "cuda"
    for group in groups:
        rate = group.get("part", 1.0) * spec.lr
        group["lr"] = torch.tensor(rate, device=device) if on_gpu else rate
    momentum = spec.schedule.at(0.0, run.epochs, spec.lr, spec.momentum)[1]
    kind: dict[str, Any] = {"fused": True} if on_gpu else {"foreach": True}
    filled = [group for group in groups if group["params"]]
    if spec.name == "adam":
        return torch.optim.Adam(filled, lr=spec.lr, capturable=on_gpu, **kind)
    if spec.name != "sgd":
        raise ValueError(f"unknown optimizer {spec.name!r}; there are sgd and adam")
    return torch.optim.SGD(filled, lr=spec.lr, momentum=momentum, nesterov=spec.nesterov, **kind)


def by_rate(parameters: Iterable[nn.Parameter], spec: Optim, model: nn.Module) -> list[dict[str, Any]]:
    """Groups of parameters that learn equally fast."""
    biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    groups: dict[float, list[nn.Parameter]] = {}
    for p in parameters:
        part = (spec.norm_rate if of_outputs(p) else 1.0) * (spec.bias_rate if id(p) in biases else 1.0)
        groups.setdefault(part, []).append(p)
    return [{"params": several, "part": part} for part, several in groups.items()]


def of_outputs(parameter: nn.Parameter) -> bool:
    """Whether it has one number for each output, as gains, offsets and biases, e^g of mean shift rejection too."""
    return parameter.numel() == (len(parameter) if parameter.ndim else 1)


# -- the run -----------------------------------------------------------------------------------------------------------


class Training:
    """A run in progress on one device: `step()` until `finished`, and `collect()` what the epochs gave into `log`.

    On CUDA neither waits for the device, so the host can drive many runs at once.
    """

    def __init__(
        self,
        run: Run,
        inputs: Inputs | Streamed,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`state`: of an earlier `state_dict`, to go on from there; `rank` and `world`: of a group of processes that
        train the run together, each on its part of every batch."""
        if run.batch % world:
            raise ValueError(f"batch {run.batch} cannot be split evenly over {world} processes")
        if run.batch > len(inputs):
            raise ValueError(f"batch {run.batch} is larger than the training set of {len(inputs)} images")
        if run.loss not in LOSSES:
            raise ValueError(f"loss must be {' or '.join(LOSSES)}, got {run.loss!r}")
        for name in run.record:
            if name not in RECORDED:
                raise ValueError(f"record can hold {', '.join(RECORDED)}, got {name!r}")
        if "fresh_statistics" in run.record and inputs.streamed:
            raise ValueError("fresh_statistics can be recorded where images are in memory, not where they are streamed")
        self._loss = LOSSES[run.loss]
        self.run, self.inputs, self.device, self.rank, self.world = run, inputs, inputs.device, rank, world
        self.steps_per_epoch = math.ceil(len(inputs) / run.batch)  # the last batch is filled up from the first images
        self.total_steps = round(run.epochs * self.steps_per_epoch)
        self.done = 0
        self.log: list[dict[str, Any]] = []
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event | None, Extras]] = deque()
        self._turns: deque[torch.cuda.Event] = deque()
        with self._context():
            self.parts = build(run, inputs)
        self._network: nn.Module = self.parts.model if world == 1 else DistributedDataParallel(self.parts.model)
        self._feed: Iterator[tuple[Tensor, Tensor]] | None = None
        self.mixes = run.data.mixup > 0
        self._make_tables()
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._random, self.at_once = True, 1  # whether steps draw random numbers, and how many are one graph
        self._generator = torch.Generator(self.device)
        self.captured = self.device.type == "cuda" and world == 1 and not inputs.streamed
        if self.captured:
            self.stream = torch.cuda.Stream(priority=-1 if run.batch <= FEW else 0)
            # One pool for all graphs of a run: they never run at once, and what one leaves there no other reads.
            # (With one for each, a schedule of the momentum would leave the memory of a graph behind every epoch.)
            self._pool = torch.cuda.graph_pool_handle()
            self.stream.wait_stream(torch.cuda.current_stream())
            self._warm_up()
        if state is not None:
            self._load(state)

    # -- position ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.done // self.steps_per_epoch

    @property
    def finished(self) -> bool:
        return self.done >= self.total_steps

    @property
    def at_epoch_end(self) -> bool:
        return self.done % self.steps_per_epoch == 0 or self.finished

    # -- tables: what differs from step to step ------------------------------------------------------------------------

    def _make_tables(self) -> None:
        n, device = self.steps_per_epoch, self.device
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.order = torch.zeros(n, 0 if self.inputs.streamed else self.run.batch, dtype=torch.int64, device=device)
        self.rates = torch.zeros(n, device=device)
        self.lams = torch.ones(n, device=device)
        self.sums = torch.zeros(2, device=device)  # training loss and accuracy since the epoch began
        self.tested = torch.zeros(2, device=device)
        self.layers: list[int] = [0] * n
        self._filled_for = -1

    def _fill_tables(self) -> None:
        run, epoch, n = self.run, self.epoch, self.steps_per_epoch
        self._filled_for = epoch
        if isinstance(self.inputs, Streamed):
            start, part = self.done % n, {"rank": self.rank, "world": self.world}
            self._feed = self.inputs.epoch(run.batch, seed=run.seed, epoch=epoch, start=start, **part)
        else:
            self._generator.manual_seed(mixed_seed(run.seed, 1, epoch))
            order = torch.randperm(len(self.inputs), generator=self._generator, device=self.device)
            self.order.view(-1).copy_(order.repeat(2)[: self.order.numel()])
        spec = run.optim
        at = [spec.schedule.at(epoch + i / n, run.epochs, spec.lr, spec.momentum) for i in range(n)]
        self.host_rates = [lr for lr, _ in at]
        self.rates.copy_(torch.tensor(self.host_rates, dtype=torch.float32), non_blocking=True)
        self._set_momentum(at[0][1])
        if self.mixes:
            draw = torch.Generator().manual_seed(mixed_seed(run.seed, 2, epoch))
            lams = [draw_lambda(run.data.mixup, draw) for _ in range(n)]
            self.lams.copy_(torch.tensor(lams, dtype=torch.float32), non_blocking=True)
            if run.data.manifold:
                self.layers = torch.randint(self.parts.model.mix_layers, (n,), generator=draw).tolist()

    def _set_momentum(self, momentum: float) -> None:
        for group in self.parts.optimizer.param_groups:
            if "momentum" in group and group["momentum"] != momentum:
                group["momentum"] = momentum
                self._graphs = {key: g for key, g in self._graphs.items() if key == "evaluate"}

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, most: int = 1) -> None:
        """One training step; or several, `most` at most, where they are captured as one graph.

        At the end of an epoch also the evaluation, whose numbers `collect` brings.
        """
        i = self.done % self.steps_per_epoch
        if self._filled_for != self.epoch or i == 0:
            self._begin_epoch(fresh=i == 0)
        left = min(self.steps_per_epoch - i, self.total_steps - self.done)
        count = self.at_once if self.at_once <= min(most, left) else 1
        layer = self.layers[i]
        if self._random:
            self._generator.manual_seed(mixed_seed(self.run.seed, 3, self.done, *([self.rank] if self.rank else [])))
        self._replay((count, layer), lambda: self._steps(count, layer), self.host_rates[i])
        self.done += count
        if self.at_epoch_end:
            self._replay("evaluate", self._evaluate)
            with self._stream():
                self._report()

    def turn(self, steps: int, stop: Callable[[], bool]) -> None:
        """Some steps, at most to the end of the epoch; where they are captured, so many graphs."""
        for _ in range(steps):
            self.step(steps)
            if self.at_epoch_end or stop():
                break
        if self.captured:
            with self._stream():
                self._turns.append(_event())

    def pace(self) -> float:
        """Seconds of a step that has the device to itself, found by making some.

        The fastest of several graphs, up to the end of the epoch: the first of a kind must be captured.
        """
        took: list[float] = []
        while len(took) < PROBES and not self.finished and not (took and self.at_epoch_end):
            self._wait()
            before, start = self.done, time.monotonic()
            self.step(self.at_once)
            self._wait()
            took.append((time.monotonic() - start) / (self.done - before))
        return min(took, default=0.0)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def busy(self) -> bool:
        """Whether the device has more than one turn still to do."""
        while self._turns and self._turns[0].query():
            self._turns.popleft()
        return len(self._turns) > 1

    def _begin_epoch(self, fresh: bool) -> None:
        with self._stream():
            self._fill_tables()
            if fresh:
                self.sums.zero_()
                self.cursor.zero_()

    def _steps(self, count: int, layer: int) -> None:
        for _ in range(count):
            self._step(layer)

    def _step(self, layer: int) -> None:
        parts = self.parts
        x, y = self._batch()
        if self.mixes:
            lam = self.lams.index_select(0, self.cursor)
            other = torch.rand(len(y), device=self.device).argsort()
            logits = self._network(x, mix=(layer, lam, other)).float()
            loss = mixed_loss(self._loss, logits, y, lam, other)
        else:
            logits = self._network(x).float()
            loss = self._loss(logits, y)
        total = loss if parts.penalty is None else loss + parts.penalty()
        parts.optimizer.zero_grad()  # a captured backward pass writes its gradients to the same place every time
        with torch.autocast(self.device.type, enabled=False):
            total.sum().backward()
            if self.captured:
                rate = self.rates.index_select(0, self.cursor)[0]
                for group in parts.optimizer.param_groups:
                    group["lr"].copy_(rate * group["part"] if "part" in group else rate)
            parts.optimizer.step()
        with torch.no_grad():
            self.sums[0] += loss.detach().sum()
            self.sums[1] += (logits.argmax(1) == y).sum() / len(y)
            self.cursor += 1

    def _batch(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.inputs, Streamed):
            assert self._feed is not None
            images, labels = next(self._feed)
            return self.inputs.seen(images, training=True), labels
        index = self.order.index_select(0, self.cursor).view(-1)
        return self.inputs.batch(index if self.world == 1 else index.chunk(self.world)[self.rank])

    def _evaluate(self) -> None:
        self.tested.copy_(self._test(self.parts.model))

    @torch.no_grad()
    def _test(self, model: nn.Module) -> Tensor:
        """The sum of the losses of all test images, and how many are right."""
        model.eval()
        found = torch.zeros_like(self.tested)
        for x, y in self.inputs.tests():
            logits = model(x).float()
            loss = F.cross_entropy(logits, y, reduction="sum")
            found += torch.stack([loss, (logits.argmax(1) == y).float().sum()])
        model.train()
        return found

    def _test_anew(self) -> dict[str, Tensor]:
        """Loss and accuracy with running statistics taken anew, of training images that are augmented and not mixed."""
        model, inputs = copy.deepcopy(self.parts.model), self.inputs
        assert isinstance(inputs, Inputs)
        self._generator.manual_seed(mixed_seed(self.run.seed, 4))
        with precision(self.run.precision, self.device), self._seeded():  # not fused: that would pass by hooks
            update_statistics_(model, (inputs.batch(index) for index in self.order[:FRESH]))
            loss, right = self._test(model) / inputs.test_size
        return {"test_loss": loss, "test_accuracy": 100 * right}

    def _report(self) -> None:
        """Send the metrics of the epoch that has ended on their way to the host, without waiting for them."""
        numbers = torch.cat([self.sums, self.tested])
        if self.world > 1:
            torch.distributed.all_reduce(numbers[:2])
            numbers[:2] /= self.world
        extras = record(self.run, self.parts.model)
        if "fresh_statistics" in self.run.record and self.finished:
            extras["fresh_statistics"] = self._test_anew()
        event = None
        if self.captured:
            numbers, extras = _sent(numbers), {name: _each(values, _sent) for name, values in extras.items()}
            event = _event()
        self._pending.append((self.done, numbers, event, extras))

    @property
    def ahead(self) -> int:
        """Epochs that were started and whose numbers have not been collected yet."""
        return len(self._pending)

    def collect(self, wait: bool = False) -> bool:
        """Move the metrics of epochs that have ended into `log`; whether there were any."""
        found = False
        while self._pending:
            done, numbers, event, extras = self._pending[0]
            if event is not None and not event.query():
                if not wait:
                    return found
                event.synchronize()
            self._pending.popleft()
            measured = {name: _each(values, Tensor.tolist) for name, values in extras.items()}
            self.log.append(self._metrics(done, *numbers.tolist()) | measured)
            found, wait = True, False
        return found

    def _metrics(self, done: int, loss: float, accuracy: float, test_loss: float, right: float) -> dict[str, Any]:
        run, n = self.run, self.inputs.test_size
        steps = (done - 1) % self.steps_per_epoch + 1
        spec, position = run.optim, (done - 1) / self.steps_per_epoch
        return {
            "epoch": (done - 1) // self.steps_per_epoch + 1,
            "train_loss": loss / steps,
            "train_accuracy": 100 * accuracy / steps,
            "test_loss": test_loss / n,
            "test_accuracy": 100 * right / n,
            "lr": spec.schedule.at(position, run.epochs, spec.lr, spec.momentum)[0],
        }

    @property
    def diverged(self) -> str | None:
        """Why the run cannot go on, if so."""
        for row in self.log[-1:]:
            if not math.isfinite(row["train_loss"]):
                return f"the training loss is {row['train_loss']} in epoch {row['epoch']}"
        return None

    # -- graphs --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _context(self) -> Iterator[None]:
        with precision(self.run.precision, self.device), fused_kernels():
            yield

    def _stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.captured else nullcontext()

    def _replay(self, key: Any, body: Callable[[], None], lr: float | None = None) -> None:
        """Do `body` as a graph that was captured under `key`, or as it is where nothing is captured."""
        if self.captured:
            with self._stream():
                if key not in self._graphs:
                    with self._context():
                        self._graphs[key] = self._capture(body)
                self._graphs[key].replay()
            return
        if lr is not None:
            self._set_rate(lr)
        with self._context(), self._seeded():
            body()

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Let random functions begin where this run's generator was told to, and have no part in what follows."""
        own = [self.device.index or 0] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=own):
            torch.manual_seed(self._generator.initial_seed())
            yield

    def _set_rate(self, lr: float) -> None:
        for group in self.parts.optimizer.param_groups:
            rate = group.get("part", 1.0) * lr
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _capture(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph whose random numbers come from this run's own generator, whatever runs beside it."""
        graph = torch.cuda.CUDAGraph()
        with _default_generator(self._generator):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def _warm_up(self) -> None:
        """Make steps that do not count: what happens only once must not happen inside a capture."""
        before, method = _copied(self._tensors()), self._method_state()
        with self._context(), self._stream(), _default_generator(self._generator):
            self._fill_tables()
            self._generator.manual_seed(0)
            for _ in range(2):
                self.cursor.zero_()
                self._step(0)
            self._random = self._generator.get_offset() > 0
            if not self._random:  # nothing differs from step to step but what the tables say
                self.at_once = max(k for k in range(1, AT_ONCE + 1) if self.steps_per_epoch % k == 0)
            self._evaluate()
            for name, tensor in self._tensors().items():
                if name in before:
                    tensor.copy_(before[name])
                else:
                    tensor.zero_()  # momentum: nothing yet
            self._load_method(method)

    def close(self) -> None:
        """Wait for what is under way. Tensors of a run must not go to another one while its graphs still write them."""
        if self.captured:
            self.stream.synchronize()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on, on the CPU."""
        while self._pending:
            self.collect(wait=True)
        with self._stream():
            tensors = _copied(self._tensors(), torch.device("cpu"))
        return {"done": self.done, "log": list(self.log), "tensors": tensors, "method": self._method_state()}

    def _load(self, state: dict[str, Any]) -> None:
        self.done, self.log = state["done"], list(state["log"])
        slots = self._slots()
        with self._stream():
            own = self._tensors()
            for name, tensor in state["tensors"].items():
                if name in own:
                    own[name].copy_(tensor)
                else:  # the optimizer makes its buffers in the first step
                    _, number, key = name.split(".", 2)
                    self.parts.optimizer.state[slots[int(number)]][key] = tensor.to(self.device, copy=True)
            self._load_method(state["method"])

    def _method_state(self) -> dict[str, Any] | None:
        method = self.parts.method
        return method.state_dict() if isinstance(method, ENorm | MeanShiftRejection) else None

    def _load_method(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.parts.method.load_state_dict(state)

    def _slots(self) -> list[Tensor]:
        return [p for group in self.parts.optimizer.param_groups for p in group["params"]]

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, by name."""
        found = {f"model.{k}": v for k, v in self.parts.model.state_dict().items()}
        if self.parts.penalty is not None:
            found |= {f"penalty.{k}": v for k, v in self.parts.penalty.state_dict().items()}
        for number, p in enumerate(self._slots()):
            for k, v in self.parts.optimizer.state.get(p, {}).items():
                if isinstance(v, Tensor):
                    found[f"optimizer.{number}.{k}"] = v.detach()
        return found | {"sums": self.sums, "cursor": self.cursor}


def _each(tensors: dict[str, Tensor], do: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {name: do(tensor) for name, tensor in tensors.items()}


def _sent(tensor: Tensor) -> Tensor:
    """The tensor as the host will have it when the stream has come here."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _event() -> torch.cuda.Event:
    """Where the current stream is."""
    event = torch.cuda.Event()
    event.record()
    return event


def _copied(tensors: dict[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    return {name: tensor.to(device or tensor.device, copy=True) for name, tensor in tensors.items()}


@contextmanager
def _default_generator(own: torch.Generator) -> Iterator[None]:
    """Let every random function draw from `own`, also those that cannot be told to (CUDA)."""
    index = own.device.index or 0
    default = torch.cuda.default_generators[index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own.graphsafe_get_state())
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


# -- what is measured besides loss and accuracy ------------------------------------------------------------------------

RECORDED = ("filters", "energy", "fresh_statistics")
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
DEFLATED = 0.1  # of the largest filter of its layer


Extras = dict[str, dict[str, Tensor]]


@cache
def _quantiles(device: torch.device) -> Tensor:
    return torch.tensor(QUANTILES, dtype=torch.float64, device=device)


@torch.no_grad()
def record(run: Run, model: nn.Module) -> Extras:
    """The extras a run asks for: magnitudes of its filters (ruff2020), energy by layer (stock2019, figure 10).

    They stay on the device: whoever waits for one run keeps those beside it waiting.
    """
    extras: Extras = {}
    if "filters" in run.record:
        layers = [norms for name, norms in filter_norms(model).norms.items() if model.get_parameter(name).ndim > 2]
        norms = torch.cat(layers).double()
        small = torch.cat([layer < DEFLATED * layer.max() for layer in layers]).double()
        extras["filters"] = {
            "mean": norms.mean(),
            "deflated": 100 * small.mean(),
            "quantiles": torch.quantile(norms, _quantiles(norms.device)),
        }
    if "energy" in run.record:
        energy = layer_energy(model)
        extras["energy"] = {"norm": energy.norm, "layers": energy.energy}
    return extras
