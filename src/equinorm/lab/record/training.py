"""One run: captured once as a CUDA graph, then replayed; loaded anew for every further seed and rate.

The host only replays: which images, how they are moved, what noise they get and how long the step is stand in tables on
the device, made before the run, and the number of the step is counted there. So an eager step and a captured one are
the same computation, and several runs can be replayed side by side on streams of their own.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Config
from .data import SIZE, Images, Pixels, addresses, normalized
from .net import Net, net_of
from .optimizer import FlatOptimizer

__all__ = ["Training", "together"]

FIRST_IMAGES = 5000
"""Whitening and the start from data see these."""
_NOISE = 1 << 24
_CHUNK = 2000


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def _noise_pool(amplitude: float, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Factors U(1 - amplitude, 1 + amplitude) from which every step reads a stretch, from a place of its own."""
    generator = torch.Generator(device).manual_seed(0)
    pool = torch.rand(size, generator=generator, device=device)
    return pool.mul_(2 * amplitude).add_(1 - amplitude).to(dtype)


class Phase(NamedTuple):
    """What is the same for all steps of a part of the run, so that one graph can be replayed for them."""

    train_whitening: bool
    size: int
    """The side of the windows."""


class Training:
    """A net, its optimizer and its tables.

    >>> training = Training(config, images, pixels)
    >>> training.capture(); training.reset(seed=0); training.prepare(); training.advance(training.steps)
    >>> training.accuracy()
    """

    def __init__(self, config: Config, images: Images, pixels: Pixels) -> None:
        self.config, self.images, self.pixels = config, images, pixels
        self.device = images.train.device
        self.dtype = getattr(torch, config.dtype)
        per_epoch = pixels.n // config.batch
        if not per_epoch:
            raise ValueError(f"a batch of {config.batch} is more than the {pixels.n} training images")
        self.steps = math.ceil(config.epochs * per_epoch)
        self.whitening_steps = min(self.steps, math.ceil(config.whitening_epochs * per_epoch))
        self.small_steps = round(config.small_part * self.steps)
        torch.manual_seed(0)
        self.net = self._fresh()
        self.optimizer = FlatOptimizer(self.net, config, self.dtype, self.steps)
        for name, buffer in self.net.named_buffers(recurse=False):
            self.net.register_buffer(name, buffer.to(self.dtype).to(memory_format=torch.channels_last))
        self.t = torch.zeros(1, dtype=torch.long, device=self.device)
        self.at = torch.zeros(self.steps, config.batch, dtype=torch.long, device=self.device)
        self.labels = torch.zeros_like(self.at)
        self.noise_from = torch.zeros(self.steps, 1, dtype=torch.long, device=self.device)
        count = config.batch * sum(self.net.noise_channels)
        size = count + (_NOISE if self.device.type == "cuda" else 1 << 16)
        self.noise = None
        if config.noise:
            self.noise = _noise_pool(config.noise, size, self.dtype, self.device)
            self._stretch = torch.arange(count, device=self.device)
        self.loss: Callable[..., Tensor] = _loss
        self.update: Callable[..., None] = self.optimizer.step
        self.graphs: dict[Phase, Any] = {}
        self.stream: Any = None
        self.done = 0
        self.generator = torch.Generator(self.device)

    def _fresh(self) -> Net:
        with self.device:
            return net_of(self.config)

    # -- before a run --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset(self, seed: int, config: Config | None = None) -> None:
        """New weights; with a config, which may differ in its rates only, new rates."""
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        fresh = self._fresh()
        self.optimizer.load(fresh)
        for own, new in zip(self.net.buffers(), fresh.buffers(), strict=True):
            own.copy_(new)
        self.optimizer.set_rates(config or self.config, self.steps, self.whitening_steps)
        self.t.zero_()
        self.done = 0

    @torch.no_grad()
    def prepare(self) -> None:
        """What belongs to the time of a run: whitening, the start from data, and the tables."""
        first = normalized(self.images.train[:FIRST_IMAGES], self.dtype)
        self.net.see(first)
        if self.config.start_from_data:
            self.net.eval().start_from_data(first)
            self.optimizer.take_others()
        at, labels = addresses(
            self.pixels.labels, self.config.batch, self.steps, self.generator, self.config.small, self.small_steps
        )
        self.at.copy_(at)
        self.labels.copy_(labels)
        if self.noise is not None:
            span = len(self.noise) - len(self._stretch)
            self.noise_from.random_(0, span, generator=self.generator)
        self.net.train()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, phase: Phase) -> None:
        """One step, wherever the tables and the counter say; in eager mode or under capture."""
        train_whitening = phase.train_whitening
        x = self.pixels.windows(self.at.index_select(0, self.t).view(-1), phase.size)
        labels = self.labels.index_select(0, self.t).view(-1)
        noise = None
        if self.noise is not None:
            noise = self.noise[self._stretch + self.noise_from.index_select(0, self.t).view(-1)]
        loss = self.loss(self.net, x, labels, noise, train_whitening, self.config.smoothing, self.config.loss_scale)
        parameters = self.optimizer.parameters
        found = torch.autograd.grad(loss, parameters, allow_unused=not train_whitening)
        # the bias of the whitening layer has no gradient once it is no longer trained
        gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
        self.update(gradients, self.t)
        self.t.add_(1)

    def phase(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        return Phase(step < self.whitening_steps, self.config.small if step < self.small_steps else SIZE)

    def _phases(self) -> list[Phase]:
        begins = {0, self.whitening_steps, self.small_steps}
        return list(dict.fromkeys(self.phase(step) for step in sorted(begins) if step < self.steps))

    def capture(self) -> None:
        """Capture a step; weights and counters are anybody's after it. Eager configs and the CPU have none."""
        if self.config.mode == "compiled":
            self.loss = torch.compile(_loss, dynamic=False)
            self.update = torch.compile(self.optimizer.step, dynamic=False)
        if self.device.type != "cuda" or self.config.mode == "eager":
            return
        self.stream = torch.cuda.Stream(self.device)
        _synchronize(self.device)
        for phase in self._phases():
            with torch.cuda.stream(self.stream):
                for _ in range(3):  # libraries make their handles and try their algorithms, Triton compiles
                    self.t.zero_()
                    self.step(phase)
            _synchronize(self.device)
            self.t.zero_()
            _synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self.step(phase)
            self.graphs[phase] = graph
        # once for nothing, as airbench does: what a run does before its steps has a first time too
        self.reset(0)
        self.prepare()
        self.advance(1)
        _synchronize(self.device)

    def advance(self, steps: int = 1) -> None:
        """That many steps, at most to the end; nothing is waited for. The streams must have been synchronized."""
        with torch.cuda.stream(self.stream) if self.graphs else contextlib.nullcontext():
            for _ in range(min(steps, self.steps - self.done)):
                phase = self.phase(self.done)
                if self.graphs:
                    self.graphs[phase].replay()
                else:
                    self.step(phase)
                self.done += 1

    def train(self, seed: int, config: Config | None = None) -> float:
        """A whole run alone on the device; its seconds, as airbench counts them.

        Counted are normalizing, padding and flipping the images, whitening, the start from data, all tables and all
        steps; not counted are reading the files, compilation and capture, drawing the first weights, and evaluation.
        """
        self.reset(seed, config)
        _synchronize(self.device)
        started = time.perf_counter()
        self.pixels.fill()
        self.prepare()
        _synchronize(self.device)
        self.advance(self.steps)
        _synchronize(self.device)
        seconds = time.perf_counter() - started
        if self.config.average:
            self.optimizer.use_averages()
        return seconds

    # -- after a run ---------------------------------------------------------------------------------------------------

    def finite(self) -> bool:
        """Whether all weights are numbers."""
        return bool(torch.isfinite(self.optimizer.filters).all() & torch.isfinite(self.optimizer.others).all())

    @torch.no_grad()
    def accuracy(self, views: bool = True) -> float:
        """In %, on the images that the run was given as its test set.

        With `views` as in airbench: logits are averaged over an image and its mirror image (weight a half), and those
        two moved by a pixel up and left and down and right (a quarter each).
        """
        self.net.eval()
        right = torch.zeros((), device=self.device)
        for start in range(0, len(self.images.test), _CHUNK):
            x = normalized(self.images.test[start : start + _CHUNK], self.dtype)
            logits = self._logits(x) if views else self.net(x)
            right += (logits.argmax(1) == self.images.test_labels[start : start + _CHUNK]).sum()
        return 100.0 * float(right) / len(self.images.test)

    def _logits(self, x: Tensor) -> Tensor:
        def mirrored(x: Tensor) -> Tensor:
            return 0.5 * self.net(x) + 0.5 * self.net(_channels_last(x.flip(-1)))

        padded = F.pad(x, (1,) * 4, mode="reflect")
        size = x.shape[-1]
        moved = [_channels_last(padded[:, :, i : i + size, i : i + size]) for i in (0, 2)]
        return 0.5 * mirrored(x) + 0.25 * mirrored(moved[0]) + 0.25 * mirrored(moved[1])

    @torch.no_grad()
    def renew_statistics(self, images: int = 20000, batch: int = 1000) -> None:
        """Running statistics anew from so many training images, in batches of a size that has good ones."""
        chosen = self.images.train[:images]
        parts = [chosen[start : start + batch] for start in range(0, len(chosen), batch)]
        self.net.renew_statistics([normalized(part, self.dtype) for part in parts])


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _loss(
    net: Net,
    x: Tensor,
    labels: Tensor,
    noise: Tensor | None,
    train_whitening: bool,
    smoothing: float,
    scale: float,
) -> Tensor:
    logits = net(x, noise, train_whitening)
    return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum") * scale


def together(trainings: Sequence[Training], deadline: float = math.inf, probe: int = 200) -> float:
    """Advance prepared trainings side by side to their ends; the seconds it took.

    TimeoutError if the first `probe` steps say that `deadline` (of `time.monotonic`) would be missed.
    """
    device = trainings[0].device
    _synchronize(device)
    started, most = time.monotonic(), max(training.steps for training in trainings)
    for t in range(most):
        for training in trainings:
            training.advance()
        if t + 1 == probe and most > 2 * probe:
            _synchronize(device)
            needed = (time.monotonic() - started) / probe * (most - probe)
            if time.monotonic() + needed > deadline:
                raise TimeoutError(f"{len(trainings)} runs side by side need {needed:.0f} s more than is left or less")
    _synchronize(device)
    return time.monotonic() - started
