"""Small convolutions, BatchNorm and pools with the ReLU beside them, against torch, on a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from support.kernels_lab import check_convolution, check_norm, check_pool, check_residuals

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_convolution(dtype: torch.dtype, layout: torch.memory_format) -> None:
    from equinorm.lab.nets.kernels import convolution

    sizes = [((128, 32, 32), (16, 16)), ((3, 5, 7), (64, 16)), ((3, 5, 7), (32, 64)), ((1, 1, 1), (16, 16))]
    for i, ((images, channels), weight) in enumerate(product(sizes, [dtype, torch.float32])):
        after = {"plus": i % 3 == 0, "relu": i % 2 == 0, "scaled": i % 4 < 2, "biased": i % 5 < 2}
        kernel = {"dtype": weight, "memory_format": layout, "device": "cuda"}
        check_convolution(convolution, images, channels, dtype, **after, **kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("images", "channels"), [((128, 32, 32), 16), ((128, 16, 16), 32), ((3, 5, 7), 64)])
def test_residual_units(dtype: torch.dtype, images: tuple[int, int, int], channels: int) -> None:
    from equinorm.lab.nets.kernels import convolution

    for number, scaled, noise, biased in ((1, False, 0.0, False), (1, True, 0.0, True), (3, True, 0.5, True)):
        check_residuals(convolution, images, channels, number, dtype, scaled, noise, biased, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 16, 32, 32), (128, 96, 32, 32), (128, 64, 8, 8), (3, 6, 5, 7), (2, 1, 1, 1)])
def test_batch_norm(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    from equinorm.lab.nets.kernels import normalization

    for plus, relu in product([False, True], [False, True]):
        check_norm(normalization, shape, dtype, plus, relu, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "groups"), [((128, 128, 28, 28), 16), ((128, 96, 32, 32), 32), ((3, 6, 5, 7), 2), ((2, 4, 1, 1), 2)]
)
def test_group_norm(dtype: torch.dtype, shape: tuple[int, int, int, int], groups: int) -> None:
    from equinorm.lab.nets.kernels import normalization

    for plus, relu in product([False, True], [False, True]):
        check_norm(normalization, shape, dtype, plus, relu, groups, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128, 28, 28), (8, 256, 14, 14), (3, 96, 9, 7), (2, 5, 1, 1)])
def test_pool(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    from equinorm.lab.nets.kernels import pooling

    check_pool(pooling, shape, dtype, device="cuda")


def test_the_same_numbers_every_time() -> None:
    from equinorm.lab import nets as models
    from equinorm.lab.nets.fused import fused_kernels

    torch.manual_seed(0)
    model = models.build("resnet110", classes=10, in_shape=(3, 32, 32), depth=20).cuda()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    found = []
    for _ in range(3):
        model.zero_grad()
        deterministic = torch.backends.cudnn.flags(deterministic=True)
        with torch.autocast("cuda", torch.bfloat16), deterministic, fused_kernels():
            nn.functional.cross_entropy(model(x).float(), torch.zeros(128, dtype=torch.long, device="cuda")).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for later in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True))
