"""Every method under DistributedDataParallel: two processes that see half of each batch, over gloo.

They train each method once; the tests compare what came out with what one process does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import equinorm
from equinorm.equilibrium.layers import EquiNormConv2d
from equinorm.msr import parameter_groups
from equinorm.norms.layers import BatchRenorm2d
from support.ranks import RankError, Ranks

RANKS, STEPS, SHARD = 2, 3, 4
NAMES = [method.name for method in equinorm.methods() if method.name != "caps"]  # which have tests of their own
PER_PROCESS = {
    *("equinorm", "batchnorm", "batchrenorm", "mean_only_batchnorm", "weightnorm_mean_only"),
    "weight_standardization",  # which keeps the batch norms
}
"""Methods with statistics of the batch, which every process takes of its own part."""
SYNCED = ["equinorm", "weightnorm", "groupnorm"]
"""Also put on a model with `nn.SyncBatchNorm`: EquiNorm then has the statistics of all processes."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    convolutions += [nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).double()


def with_sync() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(net())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    size = RANKS * SHARD
    images = torch.rand(STEPS, size, 3, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (STEPS, size), generator=generator)
    return list(zip(images, labels, strict=True))


def shard(rank: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    mine = slice(rank * SHARD, (rank + 1) * SHARD)
    return batch[0][mine], batch[1][mine]


@cache
def _converted(name: str, synced: bool) -> nn.Module:
    # in a schedule of 40,000 steps batch renorm would be plain batch norm here
    options: dict[str, Any] = {"r_schedule": (0, 2), "d_schedule": (0, 2)} if name == "batchrenorm" else {}
    torch.manual_seed(2)  # mean shift rejection draws its kernels
    example = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    return equinorm.convert(with_sync() if synced else net(), name, example, **options)[0]


def converted(name: str, synced: bool = False) -> nn.Module:
    return copy.deepcopy(_converted("none" if name == "enorm" else name, synced))


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    """As a user makes it, with what acts in its steps; `model` may be wrapped."""
    optimizer = SGD(parameter_groups(model), lr=0.1, momentum=0.9)
    if name == "msr":
        equinorm.MeanShiftRejection(model, optimizer, luma=0.01).attach()
    if name == "enorm":
        equinorm.ENorm(model, optimizer, torch.rand(2, 3, 6, 6, dtype=torch.float64), c=1.2).attach()
    return optimizer


def train(model: nn.Module, optimizer: Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for images, labels in data:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


# -- in each process ---------------------------------------------------------------------------------------------


def in_parallel(name: str, synced: bool) -> dict[str, Tensor]:
    model = converted(name, synced)
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer_of(name, wrapped), [shard(dist.get_rank(), batch) for batch in batches()])
    return model.state_dict()


Trained = Callable[..., list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def trained(ranks: Callable[[int], Ranks]) -> Trained:
    """By method, the state dict after training in each process."""
    return cache(lambda name, synced=False: ranks(RANKS).run(in_parallel, name, synced))


# -- what one process does ---------------------------------------------------------------------------------------


def alone(name: str, model: nn.Module) -> nn.Module:
    """Trained on whole batches."""
    train(model, optimizer_of(name, model), batches())
    return model


@torch.no_grad()
def hand_over_buffers(copies: list[nn.Module]) -> None:
    for each in copies[1:]:
        for mine, first in zip(each.buffers(), copies[0].buffers(), strict=True):
            mine.copy_(first)


def side_by_side(name: str, model: nn.Module) -> list[nn.Module]:
    """What DDP says it does: each part of a batch in a copy with the buffers of the first, and mean gradients."""
    copies = [copy.deepcopy(model) for _ in range(RANKS)]
    optimizers = [optimizer_of(name, each) for each in copies]
    for batch in batches():
        hand_over_buffers(copies)
        for rank, each in enumerate(copies):
            images, labels = shard(rank, batch)
            optimizers[rank].zero_grad()
            F.cross_entropy(each(images), labels).backward()
        for together in zip(*(each.parameters() for each in copies), strict=True):
            mean = torch.stack([parameter.grad for parameter in together]).mean(0)
            for parameter in together:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return copies


def assert_state(state: dict[str, Tensor], expected: nn.Module) -> None:
    assert list(state) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(
            state[key], value, rtol=1e-10, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


# -- the tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "synced"), [*((name, False) for name in [*NAMES, "enorm"]), *((name, True) for name in SYNCED)]
)
def test_parameters_stay_bitwise_equal(name: str, synced: bool, trained: Trained) -> None:
    first, second = trained(name, synced)
    for key, parameter in converted(name).named_parameters():
        assert torch.equal(first[key], second[key]), key
        if parameter.requires_grad:
            assert not torch.equal(first[key], parameter), f"{key} was not trained"


@pytest.mark.parametrize("name", [*(name for name in NAMES if name not in PER_PROCESS), "enorm"])
def test_without_statistics_it_is_training_on_the_whole_batch(name: str, trained: Trained) -> None:
    model = alone(name, converted(name))
    for state in trained(name):
        assert_state(state, model)


@pytest.mark.parametrize("name", sorted(PER_PROCESS))
def test_statistics_are_those_of_each_process(name: str, trained: Trained) -> None:
    """And the running ones of the first are handed to all before every forward pass, so they differ by one batch."""
    states = trained(name)
    for state, expected in zip(states, side_by_side(name, converted(name)), strict=True):
        assert_state(state, expected)
    running = [key for key in states[0] if "running" in key]
    assert running
    assert not any(torch.equal(states[0][key], states[1][key]) for key in running)


def test_every_method_belongs_to_one_of_the_two() -> None:
    def has_statistics(name: str) -> bool:
        return any("running" in key for key in converted(name).state_dict())

    assert {name for name in NAMES if has_statistics(name)} == PER_PROCESS
    assert isinstance(converted("batchrenorm")[1], BatchRenorm2d)


@pytest.mark.parametrize("name", SYNCED)
def test_models_with_synchronized_norms(name: str, trained: Trained) -> None:
    """They are converted in the processes, where an `nn.SyncBatchNorm` does not run on a CPU in training mode."""
    model = alone(name, converted(name))
    for state in trained(name, True):
        assert_state(state, model)


@pytest.mark.parametrize("name", NAMES)
def test_outside_of_a_group_synchronized_norms_are_batch_norms(name: str) -> None:
    synced, plain = converted(name, synced=True), converted(name)
    assert str(synced).replace("SyncBatchNorm", "BatchNorm2d") == str(plain)
    assert_state(synced.state_dict(), plain)
    if name == "equinorm":
        assert all(m.process_group is None for m in synced.modules() if isinstance(m, EquiNormConv2d))


# -- the processes themselves ------------------------------------------------------------------------------------


def failing(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("on purpose")
    return rank


def waiting() -> None:
    if dist.get_rank() == 1:
        dist.barrier()


def test_what_goes_wrong_in_a_process_is_said(ranks: Callable[[int], Ranks]) -> None:
    """And the next function finds processes that are in order."""
    pool = ranks(RANKS)
    with pytest.raises(RankError, match=r"rank 1 failed:(.|\n)*in failing(.|\n)*ZeroDivisionError: on purpose"):
        pool.run(failing, 1)
    with pytest.raises(RankError, match=r"rank 1 has not ended, and was at\n(.|\n)*in waiting"):
        pool.run(waiting, seconds=1.0)
    assert pool.run(dist.get_rank) == [0, 1]
