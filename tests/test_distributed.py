"""Every method under DistributedDataParallel: two processes that see half of each batch, over gloo.

The processes are started once and train all methods; the tests compare what came out with what one process does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import equinorm
from equinorm.equilibrium.layers import EquiNormConv2d
from equinorm.msr import parameter_groups
from equinorm.norms.layers import BatchRenorm2d

RANKS, STEPS, SHARD = 2, 3, 4
NAMES = [method.name for method in equinorm.methods()]
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


def converted(name: str, model: Callable[[], nn.Module] = net) -> nn.Module:
    # in a schedule of 40,000 steps batch renorm would be plain batch norm here
    options: dict[str, Any] = {"r_schedule": (0, 2), "d_schedule": (0, 2)} if name == "batchrenorm" else {}
    torch.manual_seed(2)  # mean shift rejection draws its kernels
    return equinorm.convert(model(), name, torch.rand(2, 3, 6, 6, dtype=torch.float64), **options)[0]


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


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    # a process that waits for the other in vain fails instead of hanging
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size=RANKS, rank=rank)
    try:
        found = {name: in_parallel(rank, name, converted(name)) for name in NAMES}
        found["enorm"] = in_parallel(rank, "enorm", converted("none"))
        for name in SYNCED:
            found[f"{name}, synced"] = in_parallel(rank, name, converted(name, with_sync))
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def in_parallel(rank: int, name: str, model: nn.Module) -> dict[str, Tensor]:
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer_of(name, wrapped), [shard(rank, batch) for batch in batches()])
    return model.state_dict()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """By rank and method, the state dict after training."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


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


@pytest.mark.parametrize("name", [*NAMES, "enorm", *(f"{name}, synced" for name in SYNCED)])
def test_parameters_stay_bitwise_equal(name: str, found: Any) -> None:
    first, second = (states[name] for states in found)
    start = converted({"enorm": "none"}.get(name, name.removesuffix(", synced")))
    for key, parameter in start.named_parameters():
        assert torch.equal(first[key], second[key]), key
        if parameter.requires_grad:
            assert not torch.equal(first[key], parameter), f"{key} was not trained"


@pytest.mark.parametrize("name", [*(name for name in NAMES if name not in PER_PROCESS), "enorm"])
def test_without_statistics_it_is_training_on_the_whole_batch(name: str, found: Any) -> None:
    model = alone(name, converted("none" if name == "enorm" else name))
    for states in found:
        assert_state(states[name], model)


@pytest.mark.parametrize("name", sorted(PER_PROCESS))
def test_statistics_are_those_of_each_process(name: str, found: Any) -> None:
    """And the running ones of the first are handed to all before every forward pass, so they differ by one batch."""
    copies = side_by_side(name, converted(name))
    for states, expected in zip(found, copies, strict=True):
        assert_state(states[name], expected)
    running = [key for key in found[0][name] if "running" in key]
    assert running
    assert not any(torch.equal(found[0][name][key], found[1][name][key]) for key in running)


def test_every_method_belongs_to_one_of_the_two() -> None:
    def has_statistics(name: str) -> bool:
        return any("running" in key for key in converted(name).state_dict())

    assert {name for name in NAMES if has_statistics(name)} == PER_PROCESS
    assert isinstance(converted("batchrenorm")[1], BatchRenorm2d)


@pytest.mark.parametrize("name", SYNCED)
def test_models_with_synchronized_norms(name: str, found: Any) -> None:
    """They are converted in the processes, where an `nn.SyncBatchNorm` does not run on a CPU in training mode."""
    model = alone(name, converted(name))
    for states in found:
        assert_state(states[f"{name}, synced"], model)


@pytest.mark.parametrize("name", NAMES)
def test_outside_of_a_group_synchronized_norms_are_batch_norms(name: str) -> None:
    synced, plain = converted(name, with_sync), converted(name)
    assert str(synced).replace("SyncBatchNorm", "BatchNorm2d") == str(plain)
    assert_state(synced.state_dict(), plain)
    if name == "equinorm":
        assert all(m.process_group is None for m in synced.modules() if isinstance(m, EquiNormConv2d))
