"""Residual networks: for ImageNet and for CIFAR, wide ones, and those with the activation first.

Skips are those of He et al. 2015, section 4.1. "A": the identity, zeros in new channels, half of them before and half
behind the old ones, or with "A behind" all behind, as in ruff2020's program; "B": a learned 1×1 convolution
where the shape changes, the identity elsewhere; "C": a learned 1×1 convolution everywhere, which is what stock2019
(section 4) needs. A learned skip has the same norm as the branch beside it. "A+norm": A with a norm on what it takes
over where the shape changes, as BatchNorm has it in the program of Zhang et al. 2019 (Fixup).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from ...msr import InputNoise
from ...skipinit import BranchScale
from .chain import Chain, named
from .fixup import Scalar, with_scalars
from .fused import Residual
from .norms import Layers, Role
from .registry import model

Shape = tuple[int, int, int]


class ZeroPaddedSkip(nn.Module):
    """Skip A: every second pixel where the branch has a stride of 2, and zeros in the channels that are new, on both
    sides of the old ones or all `behind` them."""

    def __init__(self, a: int, b: int, stride: int, behind: bool = False) -> None:
        super().__init__()
        self.stride, self.before = stride, 0 if behind else (b - a) // 2
        self.after = b - a - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


Branch = Callable[[Layers, int, int, int, bool], tuple[nn.Sequential, int]]
"""(make, channels of the input, width, stride, activation first) -> the branch, channels of its output."""


def basic(make: Layers, a: int, width: int, stride: int, preact: bool) -> tuple[nn.Sequential, int]:
    """Two 3×3 convolutions."""
    branch = named(
        conv1=make.conv(a, width, 3, stride),
        norm1=make.norm(width),
        relu1=make.relu(width),
        conv2=make.conv(width, width, 3, role="branch end"),
        norm2=nn.Identity() if preact else make.norm(width),
    )
    return branch, width


def bottleneck(make: Layers, a: int, width: int, stride: int, preact: bool) -> tuple[nn.Sequential, int]:
    """1×1 to a quarter of the channels, 3×3 with the stride, 1×1 back."""
    out = 4 * width
    branch = named(
        conv1=make.conv(a, width, 1),
        norm1=make.norm(width),
        relu1=make.relu(width),
        conv2=make.conv(width, width, 3, stride),
        norm2=make.norm(width),
        relu2=make.relu(width),
        conv3=make.conv(width, out, 1, role="branch end"),
        norm3=nn.Identity() if preact else make.norm(out),
    )
    return branch, out


def _skip(make: Layers, a: int, b: int, stride: int, skips: str, preact: bool) -> nn.Module:
    same = a == b and stride == 1
    if skips == "A+norm" and not same:
        pixels, zeros = ZeroPaddedSkip(a, a, stride), ZeroPaddedSkip(a, b, 1)
        return named(pixels=pixels, norm=make.norm(a), zeros=zeros)
    if skips == "C" or (skips == "B" and not same):
        conv = make.conv(a, b, 1, stride, role="linear")
        return named(conv=conv, norm=nn.Identity() if preact else make.norm(b))
    return nn.Identity() if same else ZeroPaddedSkip(a, b, stride, behind=skips == "A behind")


def _stem(
    make: Layers, in_shape: Shape, width: int, stem: str | None, preact: bool, role: Role
) -> dict[str, nn.Module]:
    """3×3 for small images; 7×7 of stride 2 and a pool for large ones. Before pre-activation blocks, bare."""
    if stem not in (None, "cifar", "imagenet"):
        raise ValueError(f'stem is "cifar", "imagenet" or None (by the size of the images); got {stem!r}')
    large = min(in_shape[1:]) >= 64 if stem is None else stem == "imagenet"
    kernel, stride = (7, 2) if large else (3, 1)
    return {
        "conv": make.conv(in_shape[0], width, kernel, stride, role=role),
        "norm": nn.Identity() if preact else make.norm(width),
        "relu": nn.Identity() if preact else make.relu(width),
        "pool": nn.MaxPool2d(3, 2, 1) if large else nn.Identity(),
    }


def residual_net(
    make: Layers,
    in_shape: Shape,
    classes: int,
    *,
    blocks: Sequence[int],
    widths: Sequence[int],
    first_width: int,
    branch: Branch,
    skips: str,
    stem: str | None,
    noise: float,
    noise_at: str = "unit",
    noise_per: str = "element",
    preact: bool = False,
    last_activation: bool = False,
    zero_last: bool = False,
    skipinit: bool = False,
    fixup: bool = False,
) -> Chain:
    """A stem, a stage of blocks for each of `widths`, each but the first halving the image, and a classifier."""
    if skips not in ("A", "A behind", "A+norm", "B", "C"):
        raise ValueError(f'skips is "A", "A behind", "A+norm", "B" or "C", got {skips!r}')
    if preact and skips == "A+norm":
        raise ValueError('with the activation first, skips have no norm: skips="A"')
    if zero_last and (preact or make.activation is None):
        raise ValueError("zero_last is for blocks that end in a norm of activations, whose gain it sets to 0")
    if fixup and (preact or make.activation is not None or make.weight is not None):
        raise ValueError('Fixup is for blocks with the activation last and without a norm: norm="none", preact=False')
    if noise_at not in ("unit", "branch"):
        raise ValueError(f'noise_at is "unit" or "branch", got {noise_at!r}')
    if len(blocks) != len(widths) or min(blocks) < 1:
        raise ValueError(f"blocks is the number of blocks in each of {len(widths)} stages, got {tuple(blocks)}")
    a = first_width
    stages: list[dict[str, nn.Module]] = []
    for stage, (number, width) in enumerate(zip(blocks, widths, strict=True)):
        stages.append({})
        for i in range(number):
            stride = 2 if stage and not i else 1
            first = named(norm=make.norm(a), relu=make.relu(a)) if preact else None
            inside, b = branch(make, a, width, stride, preact)
            if zero_last:
                nn.init.zeros_(cast(Tensor, inside[-1].weight))
            inside = with_scalars(inside) if fixup else inside
            inside = named(branch=inside, scale=BranchScale(b)) if skipinit else inside
            skip = _skip(make, a, b, stride, skips, preact)
            noisy = InputNoise(noise, noise_per) if noise else nn.Identity()
            relu = None if preact else make.relu(b)
            stages[-1][f"block{i + 1}"] = Residual(inside, skip, noisy, first, relu, noise_at)
            a = b
    if fixup:
        stages[-1]["before_head"] = Scalar()
    if last_activation:
        stages[-1]["last"] = named(norm=make.norm(a), relu=make.relu(a))
    # With the activation first and a skip that reads it, all that is read of the stem is rectified.
    bare = preact and not stages[0]["block1"].skip_reads_first
    parts = _stem(make, in_shape, first_width, stem, preact, role="linear" if bare else "rectified")
    parts |= {"norm": Scalar()} if fixup else {}
    stages[0] = {"stem": named(**parts), **stages[0]}
    return Chain([named(**stage) for stage in stages], make.head(a, classes))


DEPTHS: dict[int, tuple[Branch, tuple[int, ...]]] = {
    18: (basic, (2, 2, 2, 2)),
    34: (basic, (3, 4, 6, 3)),
    50: (bottleneck, (3, 4, 6, 3)),
    101: (bottleneck, (3, 4, 23, 3)),
    152: (bottleneck, (3, 8, 36, 3)),
}


def _four_stages(depth: int, blocks: Sequence[int] | None, width: int) -> dict[str, Any]:
    if depth not in DEPTHS:
        raise ValueError(f"depth is one of {', '.join(map(str, DEPTHS))}; got {depth}")
    branch, usual = DEPTHS[depth]
    return {
        "blocks": usual if blocks is None else blocks,
        "widths": [width * 2**i for i in range(4)],
        "first_width": width,
        "branch": branch,
    }


TOY = {"blocks": (1, 1, 1, 1), "width": 4, "stem": "cifar"}
SMALL = {"depth": 8, "width": 4}


@model("resnet50", "ResNet-50, with bottlenecks", TOY, depth=50)
@model("resnet18", "ResNet-18; skips='C' for learned skips everywhere", TOY, depth=18)
def resnet(
    make: Layers,
    in_shape: Shape,
    classes: int,
    *,
    depth: int,
    blocks: Sequence[int] | None = None,
    width: int = 64,
    skips: str = "B",
    stem: str | None = None,
    noise: float = 0.0,
) -> Chain:
    """The ResNets of He et al. 2015 for ImageNet (stock2019, section 6.3; defazio2018, section 6.4).

    `stem=None` takes the 7×7 one from images of 64 pixels on. `blocks`: so many in each stage, instead of those that
    belong to the depth. The stride of a bottleneck is in its 3×3 convolution.
    """
    return residual_net(
        make, in_shape, classes, **_four_stages(depth, blocks, width), skips=skips, stem=stem, noise=noise
    )


@model("preact_resnet", "PreActResNet-18, 34, 50, 101, 152", TOY)
def preact_resnet(
    make: Layers,
    in_shape: Shape,
    classes: int,
    *,
    depth: int = 18,
    blocks: Sequence[int] | None = None,
    width: int = 64,
    skips: str = "B",
    stem: str | None = None,
    noise: float = 0.0,
    last_activation: bool = False,
) -> Chain:
    """ResNets with norm and ReLU first (He et al. 2016); depth 152 is the 58.1 M network of defazio2018, section 6.1.

    As in the program of Verma et al. that defazio2018 started from, nothing stands between the last block and the mean
    over its map; `last_activation=True` puts norm and ReLU there, as He et al. do. Learned skips have no norm. EquiNorm
    needs inputs that are not negative, so there the ReLU alone comes first, and the convolution behind it normalizes.
    """
    return residual_net(
        make,
        in_shape,
        classes,
        **_four_stages(depth, blocks, width),
        skips=skips,
        stem=stem,
        noise=noise,
        preact=True,
        last_activation=last_activation,
    )


@model("wrn_20_96", "the wide ResNet of defazio2018", SMALL, depth=20, width=96, skips="B")
@model("resnet110", "ResNet-110 for CIFAR", SMALL, depth=110)
@model("resnet_cifar", "ResNet-20, 32, 44, 56, 110, ... for CIFAR", SMALL, depth=20)
def resnet_cifar(
    make: Layers,
    in_shape: Shape,
    classes: int,
    *,
    depth: int,
    width: int = 16,
    skips: str = "A",
    noise: float = 0.0,
    noise_at: str = "unit",
    noise_per: str = "element",
    preact: bool = False,
    last_activation: bool | None = None,
    zero_last: bool = False,
    skipinit: bool = False,
    fixup: bool = False,
) -> Chain:
    """The ResNets of He et al. 2015 for CIFAR: depth 6n + 2, stages of `width`, twice and four times as many channels.

    Depth 110 is the network of ruff2020. Depth 20 with 96 channels and skips "B" is defazio2018's "non-bottleneck wide
    ResNet network with 20 convolutions, 96 initial planes [...] and 9.7m parameters" (section 6.1): it has 9.7 M
    parameters, and 20 layers if the classifier counts and the skips do not.

    `noise`: the amplitude of `InputNoise` at each residual unit, at what the whole unit or only its branch reads, per
    element, channel or example. `preact`: norm and ReLU come first in each unit, and once more behind the last (He et
    al. 2016) unless `last_activation=False`, as in the program of Verma et al. `zero_last`: the gain of the last norm
    in each branch starts at 0 (Goyal et al. 2017). `skipinit`: each branch ends in a learned scale that starts at 0 (De
    & Smith 2020). `fixup`: the scalars and the start of Zhang et al. 2019, instead of norms.
    """
    n, rest = divmod(depth - 2, 6)
    if rest or n < 1:
        raise ValueError(f"depth is 6n + 2 (20, 32, 44, 56, 110, ...); got {depth}")
    last = preact if last_activation is None else last_activation
    return residual_net(
        make,
        in_shape,
        classes,
        blocks=(n, n, n),
        widths=(width, 2 * width, 4 * width),
        first_width=width,
        branch=basic,
        skips=skips,
        stem="cifar",
        noise=noise,
        noise_at=noise_at,
        noise_per=noise_per,
        preact=preact,
        last_activation=last,
        zero_last=zero_last,
        skipinit=skipinit,
        fixup=fixup,
    )


@model("wrn", "wide ResNets, WRN-28-10 and so on", {"depth": 10, "widen": 2, "width": 2})
def wrn(
    make: Layers,
    in_shape: Shape,
    classes: int,
    *,
    depth: int = 28,
    widen: int = 10,
    width: int = 16,
    skips: str = "B",
    noise: float = 0.0,
) -> Chain:
    """Wide ResNets (Zagoruyko & Komodakis 2016): depth 6n + 4, activation first, `widen` times the channels.

    WRN-28-10 has 36.5 M parameters. The one of defazio2018 is built differently: "wrn_20_96".
    """
    n, rest = divmod(depth - 4, 6)
    if rest or n < 1:
        raise ValueError(f"depth is 6n + 4 (16, 22, 28, 40, ...); got {depth}")
    return residual_net(
        make,
        in_shape,
        classes,
        blocks=(n, n, n),
        widths=[widen * width * 2**i for i in range(3)],
        first_width=width,
        branch=basic,
        skips=skips,
        stem="cifar",
        noise=noise,
        preact=True,
        last_activation=True,
    )
