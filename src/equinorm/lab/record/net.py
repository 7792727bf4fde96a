"""The net of airbench94 (Jordan 2024) and a ResNet-20, and what stands in them where BatchNorm stood.

`Airbench`: a frozen 2 × 2 convolution that whitens patches, three blocks of two 3 × 3 convolutions, the first of each
followed by max-pooling, and a linear head divided by its width. `ResNet20` (He et al. 2016) has nine blocks of two
convolutions. `Stage` is one convolution with all that follows it up to the activation; its subclasses are the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...equilibrium.layers import EquiNormConv2d
from ...launch import plain_only
from ...msr import zero_mean_init_
from .config import Config, rates
from .data import CHANNELS, as_pixels

__all__ = ["Airbench", "Net", "ResNet20", "Stage", "net_of", "whitening_weights"]

PATCH = 2
WHITENED = 2 * 3 * PATCH * PATCH
"""Every direction of a patch, and its opposite."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@torch.no_grad()
def whitening_weights(images: Tensor, eps: float = 5e-4) -> Tensor:
    """Filters (24, 4, 2, 2) whose outputs on patches of these images are uncorrelated and of variance near 1.

    The eigenvectors of the patches' second moments, each divided by the root of its eigenvalue (plus `eps`), and their
    opposites (Page 2018, hlb-CIFAR10, airbench94).
    """
    patches = F.unfold(images[:, :3].float(), PATCH).transpose(1, 2).reshape(-1, 3 * PATCH * PATCH)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + eps).sqrt()).T.reshape(-1, 3, PATCH, PATCH)
    return F.pad(torch.cat([filters, -filters]), (0, 0, 0, 0, 0, CHANNELS - 3))


class Stage(nn.Module):
    """A 3 × 3 convolution, max-pooling if asked for, and the method; `activation` is what the net puts behind it."""

    weight: nn.Parameter
    offset: nn.Parameter

    def __init__(self, inputs: int, outputs: int, config: Config, *, pool: bool = False, stride: int = 1) -> None:
        super().__init__()
        self.pool, self.stride = pool, stride
        self.activation: Callable[[Tensor], Tensor] = _ACTIVATIONS[config.activation]
        self.make(inputs, outputs, config)

    def make(self, inputs: int, outputs: int, config: Config) -> None:
        """The parameters: `weight` and `offset`, and what the method adds."""
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        self.offset = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if config.dirac:
            nn.init.dirac_(self.weight.data[:inputs])

    def forward(self, x: Tensor) -> Tensor:
        return self.normalized(self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:
        """What the method gets to see."""
        y = self.convolved(x)
        return F.max_pool2d(y, 2) if self.pool else y

    def convolved(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters(x.dtype), padding=1, stride=self.stride)

    def filters(self, dtype: torch.dtype) -> Tensor:
        """The weight of the convolution."""
        return self.weight

    def normalized(self, y: Tensor) -> Tensor:
        return y + self.offset.view(1, -1, 1, 1)

    def set_gain(self, gain: Tensor) -> None:
        """Multiply all outputs by this; for methods that start from data."""
        raise NotImplementedError(f"{type(self).__name__} has no gain that could be set from data")


class UnitStage(Stage):
    """Filters of length 1 (the optimizer's doing) times one number per layer that is never trained."""

    gain: Tensor

    def make(self, inputs: int, outputs: int, config: Config) -> None:
        super().make(inputs, outputs, config)
        self.register_buffer("gain", torch.ones(()))

    def filters(self, dtype: torch.dtype) -> Tensor:
        return self.weight * self.gain.to(dtype)

    def set_gain(self, gain: Tensor) -> None:
        self.gain.copy_(gain)


class ScaledStage(Stage):
    """W = e^g V, filters V zero-mean and of length 1 at the start (ruff2020)."""

    def make(self, inputs: int, outputs: int, config: Config) -> None:
        super().make(inputs, outputs, config)
        zero_mean_init_(self.weight)
        self.gain = nn.Parameter(torch.zeros(outputs))

    def filters(self, dtype: torch.dtype) -> Tensor:
        return self.weight * self.gain.exp().view(-1, 1, 1, 1)

    def set_gain(self, gain: Tensor) -> None:
        self.gain.data.copy_(gain.log())


class StandardizedStage(Stage):
    """Scaled weight standardization: every filter has mean 0 and length 1, times a gain (Brock et al. 2021)."""

    def make(self, inputs: int, outputs: int, config: Config) -> None:
        super().make(inputs, outputs, config)
        self.gain = nn.Parameter(torch.ones(outputs))

    def filters(self, dtype: torch.dtype) -> Tensor:
        w = self.weight.float()
        w = w - w.mean((1, 2, 3), keepdim=True)
        w = w * w.square().sum((1, 2, 3), keepdim=True).clamp_min(1e-8).rsqrt()
        return (w * self.gain.view(-1, 1, 1, 1)).to(dtype)

    def set_gain(self, gain: Tensor) -> None:
        self.gain.data.fill_(1.0).mul_(gain.to(self.gain.dtype))


class BatchNormStage(Stage):
    """BatchNorm without gains, in airbench's setting but for the momentum, which follows the batch."""

    mean: Tensor
    variance: Tensor
    ones: Tensor

    def make(self, inputs: int, outputs: int, config: Config) -> None:
        super().make(inputs, outputs, config)
        self.momentum = rates(config).statistics_momentum
        self.register_buffer("mean", torch.zeros(outputs))
        self.register_buffer("variance", torch.ones(outputs))
        self.register_buffer("ones", torch.ones(outputs))

    def normalized(self, y: Tensor) -> Tensor:
        # all but y in float32, and with gains of 1: that is what cuDNN has fast kernels for
        offset = self.offset.float()
        return F.batch_norm(y, self.mean, self.variance, self.ones, offset, self.training, self.momentum, 1e-12)


class GroupNormStage(Stage):
    """GroupNorm without gains."""

    def make(self, inputs: int, outputs: int, config: Config) -> None:
        super().make(inputs, outputs, config)
        self.groups = min(config.groups, outputs)

    def normalized(self, y: Tensor) -> Tensor:
        return F.group_norm(y, self.groups) + self.offset.view(1, -1, 1, 1)


class EquiNormStage(Stage):
    """An EquiNorm layer; the part of its running means that a batch renews follows the batch, as BatchNorm's does."""

    def make(self, inputs: int, outputs: int, config: Config) -> None:
        momentum = rates(config).statistics_momentum
        self.layer = EquiNormConv2d(inputs, outputs, 3, padding=1, stride=self.stride, momentum=momentum)

    def convolved(self, x: Tensor) -> Tensor:
        with plain_only():  # kernels of runs side by side would share their scratch memory
            return self.layer(x)

    def normalized(self, y: Tensor) -> Tensor:
        return y


class Net(nn.Module):
    """What both nets share: stages, a head, noise and the start from data.

    `noise` is one row of numbers per example, as many as `noise_channels`.
    """

    STAGES: ClassVar[dict[str, type[Stage]]] = {
        "unit": UnitStage,
        "batchnorm": BatchNormStage,
        "groupnorm": GroupNormStage,
        "equinorm": EquiNormStage,
        "msr": ScaledStage,
        "ws_agc": StandardizedStage,
    }

    noise_channels: list[int]
    """Of what each stage reads; 0 where it gets no noise."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.stage = self.STAGES[config.norm]
        self.activation: Callable[[Tensor], Tensor] = _ACTIVATIONS[config.activation]
        self.width, self.mix = width, config.mix
        self.stages = nn.ModuleList()

    def add_head(self) -> None:
        """Of unit deviation at the start; logits are divided by the width."""
        head = torch.empty(10, self.width).uniform_(-1, 1)
        self.head = nn.Parameter(head / head.std())

    def forward(self, x: Tensor, noise: Tensor | None = None, train_whitening: bool = True) -> Tensor:
        stages, factors = self._stages(), self._noise(noise, len(x))

        def run(i: int, x: Tensor) -> Tensor:
            factor = factors[i]
            return stages[i](x if factor is None else x * factor)

        x = self.features(x, run, train_whitening)
        return F.linear(x, self.head).float() / self.width

    def features(self, x: Tensor, run: Callable[[int, Tensor], Tensor], train_whitening: bool = True) -> Tensor:
        """What the head reads; `run(i, x)` is what stage `i` makes of x, before the activation."""
        raise NotImplementedError

    def see(self, images: Tensor) -> None:
        """Take from the first images what stays as it is in training."""

    def _stages(self) -> list[Stage]:
        return [stage for stage in self.stages if isinstance(stage, Stage)]

    def _around(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.mix == 1.0 else (1 - self.mix) ** 0.5 * x + self.mix**0.5 * y

    def _noise(self, noise: Tensor | None, n: int) -> list[Tensor | None]:
        if noise is None:
            return [None] * len(self.stages)
        parts = noise.split([n * channels for channels in self.noise_channels])
        return [part.view(n, -1, 1, 1) if len(part) else None for part in parts]

    @torch.no_grad()
    def start_from_data(self, x: Tensor) -> None:
        """Gains and offsets from these images, layer by layer: outputs are centred, with one deviation per layer."""
        stages = self._stages()

        def run(i: int, x: Tensor) -> Tensor:
            stage = stages[i]
            stage.set_gain(torch.ones((), device=x.device))
            stage.offset.data.zero_()
            y = stage.pooled(x)
            variance, mean = torch.var_mean(y.float(), (0, 2, 3), correction=0)
            gain = variance.mean().clamp_min(1e-12).rsqrt()
            stage.set_gain(gain)
            stage.offset.data.copy_(-mean * gain)
            return stage.normalized(y * gain.to(y.dtype))

        self.features(x, run)

    @torch.no_grad()
    def renew_statistics(self, batches: list[Tensor]) -> None:
        """Running statistics of BatchNorm and EquiNorm as the plain average over these batches."""
        holders = [stage for stage in self.stages if isinstance(stage, BatchNormStage)] + [
            stage.layer for stage in self.stages if isinstance(stage, EquiNormStage)
        ]
        momenta = [holder.momentum for holder in holders]
        training = self.training
        self.train()
        for number, batch in enumerate(batches):
            for holder in holders:
                holder.momentum = 1.0 / (number + 1)
            self(batch)
        for holder, momentum in zip(holders, momenta, strict=True):
            holder.momentum = momentum
        self.train(training)


class Airbench(Net):
    """The net of airbench94, with `mix` a way around the second half of each block."""

    whitening: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.widths[-1])
        self.register_buffer("whitening", torch.zeros(WHITENED, CHANNELS, PATCH, PATCH))
        bound = (3 * PATCH * PATCH) ** -0.5
        self.whitening_bias = nn.Parameter(torch.empty(WHITENED).uniform_(-bound, bound))
        inputs = WHITENED
        for width in config.widths:
            self.stages += [self.stage(inputs, width, config, pool=True), self.stage(width, width, config)]
            inputs = width
        self.noise_channels = [WHITENED, *(width for width in config.widths for _ in range(2))][:-1]
        self.add_head()

    def features(self, x: Tensor, run: Callable[[int, Tensor], Tensor], train_whitening: bool = True) -> Tensor:
        bias = self.whitening_bias if train_whitening else self.whitening_bias.detach()
        # the bias apart: the convolution then needs no gradient at all
        x = self.activation(F.conv2d(x, self.whitening) + bias.view(1, -1, 1, 1))
        for i, stage in enumerate(self._stages()):
            y = stage.activation(run(i, x))
            x = self._around(x, y) if i % 2 else y
        return F.max_pool2d(x, 3).flatten(1)

    def see(self, images: Tensor) -> None:
        self.whitening.copy_(whitening_weights(images))


class ResNet20(Net):
    """ResNet-20 (He et al. 2016): a convolution, then nine blocks of two, and the mean over the image.

    A way around a block that halves the image takes every second pixel and adds channels of zeros (their option A).
    Where the net has no norm behind a block's end (`mix` below 1), a block gives √(1 - mix) x + √mix f(x).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.widths[-1])
        self.pixels = config.pixels
        self.stages.append(self.stage(CHANNELS, config.widths[0], config))
        self.noise_channels = [0]
        inputs = config.widths[0]
        for group, width in enumerate(config.widths):
            for block in range(3):
                stride = 2 if group and not block else 1
                self.stages += [self.stage(inputs, width, config, stride=stride), self.stage(width, width, config)]
                self.noise_channels += [inputs, width]
                inputs = width
        self.add_head()

    def features(self, x: Tensor, run: Callable[[int, Tensor], Tensor], train_whitening: bool = True) -> Tensor:
        stages = self._stages()
        x = stages[0].activation(run(0, as_pixels(x) if self.pixels else x))
        for first in range(1, len(stages), 2):
            activation, stride = stages[first + 1].activation, stages[first].stride
            y = run(first + 1, activation(run(first, x)))
            around = x if y.shape == x.shape else _fewer_pixels(x, stride, y.shape[1])
            x = activation(around + y) if self.mix == 1.0 else self._around(around, activation(y))
        return x.mean((2, 3))


def _fewer_pixels(x: Tensor, stride: int, channels: int) -> Tensor:
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, channels - x.shape[1]))


def net_of(config: Config) -> Net:
    """The net that a config names.

    >>> net_of(Config(net="resnet20", widths=(16, 32, 64)))
    """
    return {"airbench": Airbench, "resnet20": ResNet20}[config.net](config)
