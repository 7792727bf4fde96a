"""Convolutional networks without skips."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .chain import Chain, named
from .norms import Layers
from .registry import model

Shape = tuple[int, int, int]


class GaussianNoise(nn.Module):
    """x + σ·N(0, 1) while training, x otherwise."""

    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sigma * torch.randn_like(x) if self.training else x

    def extra_repr(self) -> str:
        return f"sigma={self.sigma}"


class CornerMean(nn.Module):
    """The mean of the upper left corner of each map: what a pool without padding leaves of a map that is too small for
    a second window."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : self.size, : self.size].mean((2, 3))

    def extra_repr(self) -> str:
        return f"{self.size}"


@model("cifar_nv", "CIFAR-NV: 3 blocks of 3 convolutions for crops of 28 by 28", toy={"width": 4})
def cifar_nv(
    make: Layers, in_shape: Shape, classes: int, *, width: int = 128, norms: str = "blocks", end: str = "average"
) -> Chain:
    """CIFAR-NV of Gitman & Ginsburg 2017, which stock2019 trains in section 6.2.

    3×3 convolutions 128-128-128, pool, 256-256-256, pool, then 3×3 320, 1×1 320 and a classifier; pools are 3×3 maxima
    of stride 2. We did not have Gitman & Ginsburg's text. Layers, channels and pools are those of two published
    programs that agree on them: stock2019's own and NVIDIA's OpenSeq2Seq (configuration "cifar-nv"). Both have their
    BatchNorm behind the last convolution of the first two blocks only, and so has `norms="blocks"`; `norms="all"` puts
    one behind every convolution. This choice is about norms of activations; methods on weights are on all layers.

    The end differs between the two. Stock2019's program has a padded 1×1 convolution, a ReLU and the mean of a corner
    of its map; OpenSeq2Seq, and the words of stock2019, a fully connected layer. Here the map is averaged and then
    classified, which is what a 1×1 convolution and a global average would give; with `end="released"` it is as in
    stock2019's program: a 1×1 convolution padded by 1, a ReLU on the logits, and the mean of a corner of 5×5 of its map
    of 9×9. No layer has a bias by default.
    """
    if end not in ("average", "released"):
        raise ValueError(f'end is "average" or "released", got {end!r}')
    if norms not in ("blocks", "all"):
        raise ValueError(f'norms is "blocks" or "all", got {norms!r}')
    wide, last = 2 * width, 5 * width // 2

    def block(a: int, b: int, kernels: Sequence[int], pooled: bool) -> nn.Sequential:
        parts: dict[str, nn.Module] = {}
        for i, kernel in enumerate(kernels, 1):
            normed = norms == "all" or (pooled and i == len(kernels))
            parts[f"conv{i}"] = make.conv(a, b, kernel)
            parts[f"norm{i}"] = make.norm(b) if normed else nn.Identity()
            parts[f"relu{i}"] = make.relu(b)
            a = b
        return named(**parts, pool=nn.MaxPool2d(3, 2, 1) if pooled else nn.Identity())

    stages = [
        block(in_shape[0], width, (3, 3, 3), pooled=True),
        block(width, wide, (3, 3, 3), pooled=True),
        block(wide, last, (3, 1), pooled=False),
    ]
    if end == "released":
        make.classifier = make.conv(last, classes, 1, padding=1, role="linear")
        return Chain(stages, named(classifier=make.classifier, relu=nn.ReLU(), corner=CornerMean(5)))
    return Chain(stages, make.head(last, classes, bias=make.bias))


@model("convpool_cnn_c", "ConvPool-CNN-C, as Salimans & Kingma changed it or as published", toy={"width": 4})
def convpool_cnn_c(
    make: Layers,
    in_shape: Shape,
    classes: int,
    *,
    width: int = 96,
    variant: str = "salimans",
    noise: float | None = None,
    dropout: float = 0.5,
) -> Chain:
    """ConvPool-CNN-C: 3×3 convolutions 96-96-96, pool, 192-192-192, pool, then 3×3, 1×1, 1×1 (about 1.4 M parameters).

    `variant="salimans"` is the net of Salimans & Kingma 2016 (the CIFAR-10 results of arpit2019, section 4), read from
    their published program: Gaussian noise of 0.15 on the input, leaky ReLUs of slope 0.1, 2×2 pools, 192 channels in
    the last convolution, a mean over the map and a dense layer. Theirs has the norm behind the dense layer too:
    `final_norm` does that for norms of activations. `variant="springenberg"` is that of Springenberg et al. 2015, from
    memory: dropout of 0.2 on the input, ReLUs, 3×3 pools, and a last 1×1 convolution of as many channels as classes
    whose map is averaged (here: averaged, then classified, which is the same but for the ReLU on it).

    The third block's 3×3 convolution is not padded, unless the map is too small. `noise`: σ of the Gaussian noise, or
    the dropout of the input; `dropout`: that behind the pools.
    """
    if variant not in ("salimans", "springenberg"):
        raise ValueError(f'variant is "salimans" or "springenberg", got {variant!r}')
    salimans = variant == "salimans"
    wide, slope = 2 * width, 0.1 if salimans else 0.0
    smallest = min(in_shape[1:]) // 4

    def layers(a: int, b: int, kernels: Sequence[int], first_padding: int | None = None) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module] = {}
        for i, kernel in enumerate(kernels, 1):
            parts[f"conv{i}"] = make.conv(a, b, kernel, padding=first_padding if i == 1 else None)
            parts[f"norm{i}"] = make.norm(b)
            parts[f"relu{i}"] = make.relu(b, slope)
            a = b
        return parts

    def shrink() -> dict[str, nn.Module]:
        pool = nn.MaxPool2d(2) if salimans else nn.MaxPool2d(3, 2, 1)
        return {"pool": pool, "dropout": nn.Dropout(dropout) if dropout else nn.Identity()}

    amount = noise if noise is not None else 0.15 if salimans else 0.2
    start: nn.Module = GaussianNoise(amount) if salimans else nn.Dropout(amount)
    kernels = (3, 1, 1) if salimans else (3, 1)
    stages = [
        named(noise=start if amount else nn.Identity(), **layers(in_shape[0], width, (3, 3, 3)), **shrink()),
        named(**layers(width, wide, (3, 3, 3)), **shrink()),
        named(**layers(wide, wide, kernels, first_padding=0 if smallest >= 3 else 1)),
    ]
    return Chain(stages, make.head(wide, classes))


VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


@model("vgg", "VGG-11, 13, 16, 19", toy={"width": 4, "depth": 11})
def vgg(
    make: Layers, in_shape: Shape, classes: int, *, depth: int = 16, width: int = 64, head: str = "average"
) -> Chain:
    """VGG (Simonyan & Zisserman 2015): blocks of 3×3 convolutions, 64 to 512 channels, with 2×2 pools between.

    `head="average"` classifies the mean of the last map, as is usual for CIFAR; "fc" has the two hidden layers of 4096
    units and dropout of the published net (138 M parameters for 1000 classes at depth 16), where norms of activations
    have no place. Pools that a small image leaves nothing to are left out.
    """
    if depth not in VGG:
        raise ValueError(f"depth is one of {', '.join(map(str, VGG))}; got {depth}")
    if head not in ("average", "fc"):
        raise ValueError(f'head is "average" or "fc", got {head!r}')
    a, size = in_shape[0], min(in_shape[1:])
    stages: list[nn.Module] = []
    for stage, convs in enumerate(VGG[depth]):
        b = width * min(2**stage, 8)
        parts: dict[str, nn.Module] = {}
        for i in range(1, convs + 1):
            parts |= {f"conv{i}": make.conv(a, b, 3), f"norm{i}": make.norm(b), f"relu{i}": make.relu(b)}
            a = b
        stages.append(named(**parts, pool=nn.MaxPool2d(2) if size >= 2 else nn.Identity()))
        size //= 2
    if head == "average":
        return Chain(stages, make.head(a, classes))
    units = 64 * width
    dense = named(
        pool=nn.AdaptiveAvgPool2d(7),
        flatten=nn.Flatten(),
        linear1=make.linear(49 * a, units),
        relu1=make.relu(units),
        dropout1=nn.Dropout(),
        linear2=make.linear(units, units),
        relu2=make.relu(units),
        dropout2=nn.Dropout(),
    )
    return Chain([*stages, dense], make.head(units, classes, pool=False))
