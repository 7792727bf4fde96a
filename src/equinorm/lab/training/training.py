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
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ... import ENorm, MeanShiftRejection
from ...models.running_statistics import update_statistics_
from ..data import draw_lambda, mixed_loss
from ..nets.fused import fused_kernels
from . import streams
from .federated import Federation, dirichlet_shares
from .inputs import Inputs, Streamed
from .losses import LOSSES
from .parts import build
from .precision import default_generator, mixed_seed, precision
from .private import PrivateGradients
from .recording import RECORDED, Extras, record
from .runs import Run

__all__ = ["Training"]

AT_ONCE = 8  # steps in one graph at most
PROBES = 4  # graphs from which the pace of a run is taken
FRESH = 50  # batches from which statistics are taken anew
FEW = 32  # images: kernels of such batches are small, and go first where others fill the device


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
        self.federation = self._federation(run, inputs, world)
        if self.federation is not None:
            self.steps_per_epoch = self.federation.steps_per_round
        self.total_steps = round(run.epochs * self.steps_per_epoch)
        self.done = 0
        self.log: list[dict[str, Any]] = []
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event | None, Extras]] = deque()
        self._turns: deque[torch.cuda.Event] = deque()
        with self._context():
            self.parts = build(run, inputs)
        self._private = self._private_gradients(run, world)
        self._network: nn.Module = self.parts.model if world == 1 else DistributedDataParallel(self.parts.model)
        self._feed: Iterator[tuple[Tensor, Tensor]] | None = None
        self.mixes = run.data.mixup > 0
        self._make_tables()
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._random, self.at_once = True, 1  # whether steps draw random numbers, and how many are one graph
        self._generator = torch.Generator(self.device)
        self.captured = self.device.type == "cuda" and world == 1 and not inputs.streamed
        if self.captured:
            self.stream = streams.take(priority=-1 if run.batch <= FEW else 0)
            # One pool for all graphs of a run: they never run at once, and what one leaves there no other reads.
            # (With one for each, a schedule of the momentum would leave the memory of a graph behind every epoch.)
            self._pool = torch.cuda.graph_pool_handle()
            self.stream.wait_stream(torch.cuda.current_stream())
            self._warm_up()
        if self.federation is not None:
            with self._stream():
                self.federation.start(self._network_tensors())
        if state is not None:
            self._load(state)

    @staticmethod
    def _federation(run: Run, inputs: Inputs | Streamed, world: int) -> Federation | None:
        if not run.data.clients:
            return None
        if isinstance(inputs, Streamed) or world > 1 or run.data.mixup:
            raise ValueError("clients are trained in one process on images in memory, without mixup")
        labels = inputs.train.labels.cpu().numpy()
        return Federation(dirichlet_shares(labels, run.data.clients, run.data.dirichlet, run.seed), run.batch)

    def _private_gradients(self, run: Run, world: int) -> PrivateGradients | None:
        if not run.optim.clip:
            return None
        if world > 1 or run.data.mixup or self.parts.penalty is not None:
            raise ValueError("gradients of single examples are clipped in one process, without mixup and penalties")
        return PrivateGradients(self.parts.model, self._loss, run.optim.clip, run.optim.noise_multiplier)

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
            if self.federation is not None:
                self.order.view(-1).copy_(self.federation.order(self._generator, self.device))
            else:
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
        left = left if self.federation is None else min(left, self.federation.left(i))
        count = self.at_once if self.at_once <= min(most, left) else 1
        layer = self.layers[i]
        if self._random:
            self._generator.manual_seed(mixed_seed(self.run.seed, 3, self.done, *([self.rank] if self.rank else [])))
        self._replay((count, layer), lambda: self._steps(count, layer), self.host_rates[i])
        self.done += count
        if self.federation is not None and i + count in self.federation.ends:
            with self._stream():
                self.federation.after(i + count, self._network_tensors(), self._forget)
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
        if self._private is not None:
            loss, logits = self._private(x, y)
            self._update(loss, logits, y)
            return
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
        self._update(loss, logits, y)

    def _update(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """A step of the optimizer, and what is counted of the batch."""
        parts = self.parts
        with torch.autocast(self.device.type, enabled=False):
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
        # kernels of our own know nothing of examples by themselves
        fused = nullcontext() if self.run.optim.clip else fused_kernels()
        with precision(self.run.precision, self.device), fused:
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
        with default_generator(self._generator):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def _warm_up(self) -> None:
        """Make steps that do not count: what happens only once must not happen inside a capture."""
        before, method = _copied(self._tensors()), self._method_state()
        with self._context(), self._stream(), default_generator(self._generator):
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
        """Wait for what is under way, and let the next run have the stream: this one makes no more steps.

        Tensors of a run must not go to another one while its graphs still write them.
        """
        if self.captured:
            self.stream.synchronize()
            streams.give_back(self.stream)

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
        if self.federation is not None:
            found |= self.federation.tensors()
        return found | {"sums": self.sums, "cursor": self.cursor}

    def _network_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, which clients train and a federation averages."""
        return dict(self.parts.model.state_dict(keep_vars=False))

    def _forget(self) -> None:
        """The next client's optimizer starts anew."""
        for p in self._slots():
            for value in self.parts.optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor):
                    value.zero_()


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
