"""Parameters that are sharded over processes (FSDP2, tensor parallel): as one process, number by number."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import equinorm
from equinorm.lab.bench.llama import Llama
from equinorm.lab.bench.traffic import Traffic
from equinorm.msr import parameter_groups
from equinorm.unitfilters import parameter_groups as filter_groups
from support.grids import diagonal
from support.ranks import Ranks

STEPS, BATCH = 20, 8
Pools = Callable[[int], Ranks]
TOLERANCE = 1e-6
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters: AdamW(parameters, lr=3e-3, weight_decay=1e-2),
}


# -- networks ------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Convolutions with biases around a stream, and two layers at the end; no number of ranks divides the widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(7, 9, 3, padding=1) for _ in range(2))
        self.outer = nn.ModuleList(nn.Conv2d(9, 7, 1) for _ in range(2))
        self.grouped = nn.Conv2d(7, 14, 3, groups=7)
        self.hidden, self.head = nn.Linear(14, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = F.relu(x + outer(F.relu(inner(x))))
        x = F.relu(self.grouped(x)).mean((2, 3))
        return self.head(F.relu(self.hidden(x)))


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        return Llama(layers=2, width=16, heads=4, groups=2, hidden=22, vocabulary=11).double()
    return Residual().double()


def example(name: str) -> Tensor:
    return torch.zeros(2, 5, dtype=torch.int64) if name == "llama" else torch.zeros(2, 3, 6, 6, dtype=torch.float64)


@cache
def symmetry_of(name: str) -> equinorm.Symmetry:
    """Traced once in each process, on a copy that nobody else has."""
    return equinorm.trace(net(name), example(name))


@cache
def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if name == "llama":
        tokens = torch.randint(11, (STEPS, BATCH, 6), generator=generator)
        return [(each[:, :-1], each[:, 1:]) for each in tokens]
    images = torch.rand(STEPS, BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    return list(zip(images, torch.randint(3, (STEPS, BATCH), generator=generator), strict=True))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores, labels = model(batch[0]), batch[1]
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


# -- sharding ------------------------------------------------------------------------------------------------------


def shard_(model: nn.Module, how: str) -> tuple[int, int]:
    """Shard a model in place; which part of a batch this process sees: part `number` of `count`."""
    size = dist.get_world_size()
    if how == "fsdp":
        fsdp_(model, init_device_mesh("cpu", (size,)))
        return dist.get_rank(), size
    if how == "tensor":
        tensor_parallel_(model, init_device_mesh("cpu", (size,)))
        return 0, 1
    if how == "hybrid":  # copies of shards: FSDP2 in pairs, the pairs as in data parallel
        fsdp_(model, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "shards")))
        return dist.get_rank(), size
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel_(model, mesh["tensor"])
    fsdp_(model, mesh["data"])
    return mesh.get_local_rank("data"), size // 2


def fsdp_(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    inside = model.blocks if isinstance(model, Llama) else [*model.inner, *model.outer, model.hidden]
    for module in inside:
        fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def tensor_parallel_(model: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(model, Llama):
        across, back = ("q", "k", "v", "gate", "up"), ("o", "down")
        plan = {name: ColwiseParallel() for name in across} | {name: RowwiseParallel() for name in back}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
            block.heads, block.groups = block.heads // mesh.size(), block.groups // mesh.size()
    else:
        parallelize_module(model, mesh, {"hidden": ColwiseParallel(), "head": RowwiseParallel()})


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- ENorm ---------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, optimizer: Optimizer, name: str, part: tuple[int, int] = (0, 1), steps: int = STEPS
) -> None:
    number, count = part
    for images, labels in batches(name):
        optimizer.zero_grad()
        loss_of(model, (images.chunk(count)[number], labels.chunk(count)[number])).backward()
        optimizer.step()


State = dict[str, Any]


def state_of(model: nn.Module, optimizer: Optimizer, enorm: equinorm.ENorm) -> State:
    """All that moved, whole."""
    state: State = {}
    for name, q in model.named_parameters():
        state[name] = whole(q.detach())
        state[f"{name}.grad"] = whole(q.grad)
        for key, value in optimizer.state[q].items():
            state[f"{name}.{key}"] = whole(value)
    return state | {"log_t": enorm.log_t, "imbalance": torch.tensor(enorm.imbalance())}


def sharded_run(name: str, how: str, optimizer_name: str, bias: str) -> State:
    model = net(name)
    part = shard_(model, how)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    enorm = equinorm.ENorm(model, optimizer, symmetry=symmetry_of(name), c=1.2, bias=bias)
    assert enorm.backend == "sharded"
    enorm.attach()
    train(model, optimizer, name, part)
    return state_of(model, optimizer, enorm)


@cache
def alone(name: str, optimizer_name: str, bias: str) -> State:
    model = net(name)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    enorm = equinorm.ENorm(model, optimizer, symmetry=symmetry_of(name), c=1.2, bias=bias)
    enorm.attach()
    train(model, optimizer, name)
    return state_of(model, optimizer, enorm)


def assert_equal(states: list[State], expected: State) -> None:
    """Every process has what one process has, and all have the same to the last bit."""
    for state in states:
        assert list(state) == list(expected)
        for key, value in expected.items():
            scale = max(float(value.abs().max()), 1e-3)
            assert float((state[key] - value).abs().max()) <= TOLERANCE * scale, key
            assert torch.equal(state[key], states[0][key]), key


def cells(*ways: str) -> list[Any]:
    return diagonal(("residual", "llama"), ways, ("adamw", "sgd"), ("safe", "plain"))


@pytest.mark.parametrize(("name", "how", "optimizer", "bias"), cells("fsdp", "tensor"))
def test_enorm_is_that_of_one_process(name: str, how: str, optimizer: str, bias: str, ranks: Pools) -> None:
    assert_equal(ranks(2).run(sharded_run, name, how, optimizer, bias), alone(name, optimizer, bias))


@pytest.mark.parametrize(("name", "how", "optimizer", "bias"), cells("both", "fsdp"))
def test_enorm_over_four_processes(name: str, how: str, optimizer: str, bias: str, ranks: Pools) -> None:
    assert_equal(ranks(4).run(sharded_run, name, how, optimizer, bias), alone(name, optimizer, bias))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [("llama", "sgd"), ("residual", "adamw")])
def test_enorm_over_copies_of_shards(name: str, optimizer: str, ranks: Pools) -> None:
    assert_equal(ranks(4).run(sharded_run, name, "hybrid", optimizer, "safe"), alone(name, optimizer, "safe"))


# -- what goes over the wire -----------------------------------------------------------------------------------------


def communicated(name: str, how: str, cycles: int) -> tuple[list[tuple[str, int]], int]:
    """The collectives of one step of ENorm alone, with how many numbers each has, and the number of scales."""
    model = net(name)
    part = shard_(model, how)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    enorm = equinorm.ENorm(model, optimizer, symmetry=symmetry_of(name), c=1.2, cycles=cycles)
    train(model, optimizer, name, part, steps=1)
    with Traffic() as seen:
        enorm.step()
    return [(one.name, one.numbers) for one in seen.collectives], enorm.symmetry.num_scales


@pytest.mark.parametrize(("name", "how", "cycles"), diagonal(("llama", "residual"), ("fsdp", "tensor"), (1, 3)))
def test_a_cycle_adds_up_two_numbers_for_each_scale(name: str, how: str, cycles: int, ranks: Pools) -> None:
    """And sends nothing else: no weight, gradient or state is gathered. One sum for each layer that opens scales."""
    for collectives, scales in ranks(2).run(communicated, name, how, cycles):
        assert {kind for kind, _ in collectives} == {"all_reduce"}
        assert sum(numbers for _, numbers in collectives) <= 2 * scales * cycles
        assert len(collectives) == cycles * len(symmetry_of(name).birth.unique())


def gathered_weight() -> list[tuple[str, int]]:
    model = net("residual")
    shard_(model, "fsdp")
    with Traffic() as seen:
        whole(model.stem.weight)
        dist.all_reduce(torch.ones(3))
    return [(one.name, one.numbers) for one in seen.collectives]


def test_a_gathered_weight_would_be_seen(ranks: Pools) -> None:
    padded = 8 * 3 * 3 * 3  # of seven filters each of two processes sends four
    for collectives in ranks(2).run(gathered_weight):
        assert collectives == [("all_gather", padded), ("all_reduce", 3)]


# -- balance_ ------------------------------------------------------------------------------------------------------


BALANCING: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("residual", {"c": 1.2}),
    ("residual", {"parameters": ["inner.*.weight", "outer.*.weight"]}),  # a direction in which the norm is flat
]


def balanced(name: str, how: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    model = net(name)
    shard_(model, how)
    report = equinorm.balance_(model, symmetry=symmetry_of(name), **options)
    return {key: whole(q.detach()) for key, q in model.named_parameters()}, report


@pytest.mark.parametrize(("case", "how"), diagonal(BALANCING, ("fsdp", "tensor")))
def test_balancing_is_that_of_one_process(case: tuple[str, dict[str, Any]], how: str, ranks: Pools) -> None:
    name, options = case
    model = net(name)
    report = equinorm.balance_(model, symmetry=symmetry_of(name), **options)
    for weights, other in ranks(2).run(balanced, name, how, options):
        assert (other.converged, report.converged) == (True, True)
        assert (other.num_scales, other.held, other.held_in) == (report.num_scales, report.held, report.held_in)
        assert other.norm_before == pytest.approx(report.norm_before, rel=1e-12)
        assert other.norm_after == pytest.approx(report.norm_after, rel=1e-12)
        for key, q in model.named_parameters():
            torch.testing.assert_close(weights[key], q.detach(), rtol=1e-6, atol=1e-9)


# -- what people do with sharded models ------------------------------------------------------------------------------


def residual_ready(steps: int = 0, optimizer: str = "adamw", **options: Any) -> tuple[nn.Module, Any, equinorm.ENorm]:
    """A sharded model, its optimizer and an attached ENorm, after so many steps."""
    model = net("residual")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fsdp_(model, mesh, **options)
    made = OPTIMIZERS[optimizer](model.parameters())
    enorm = equinorm.ENorm(model, made, symmetry=symmetry_of("residual"), c=1.2)
    enorm.attach()
    for batch in batches("residual")[:steps]:
        take_step(model, made, batch)
    return model, made, enorm


def take_step(model: nn.Module, optimizer: Optimizer, *parts: tuple[Tensor, Tensor]) -> None:
    """On one batch, or several whose gradients add up."""
    number, count = dist.get_rank(), dist.get_world_size()
    optimizer.zero_grad()
    for i, (images, labels) in enumerate(parts):
        model.set_requires_gradient_sync(i == len(parts) - 1)
        loss = loss_of(model, (images.chunk(count)[number], labels.chunk(count)[number]))
        (loss / len(parts)).backward()
    optimizer.step()


def outputs_before_and_after() -> tuple[Tensor, Tensor]:
    """Around one step of ENorm alone, with an optimizer that does nothing."""
    model, optimizer, enorm = residual_ready(steps=2)
    images = batches("residual")[0][0]
    before = model(images).detach()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(5):
        take_step(model, optimizer, batches("residual")[3])
    assert enorm.imbalance() < 0.2
    return before, model(images).detach()


def test_the_function_is_kept(ranks: Pools) -> None:
    for before, after in ranks(2).run(outputs_before_and_after):
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-12)


def with_(how: str) -> State:
    """What happens besides plain steps, one thing each."""
    options: dict[str, Any] = {}
    if how == "whole weights left by a forward pass":
        options["reshard_after_forward"] = False
    if how == "weights on the host":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model, optimizer, enorm = residual_ready(**options)
    data = batches("residual")
    for i in range(4):
        if how == "gradients of two batches":
            halves = list(zip(data[i][0].chunk(2), data[i][1].chunk(2), strict=True))
            take_step(model, optimizer, *halves)
        elif how == "whole weights left by a forward pass":
            optimizer.zero_grad()
            number, count = dist.get_rank(), dist.get_world_size()
            loss_of(model, tuple(x.chunk(count)[number] for x in data[i])).backward()
            with torch.no_grad():
                model(data[i][0])
            optimizer.step()
        else:
            take_step(model, optimizer, data[i])
    return state_of(model, optimizer, enorm)


@pytest.mark.parametrize(
    "how", ["gradients of two batches", "whole weights left by a forward pass", "weights on the host"]
)
def test_other_ways_to_train(how: str, ranks: Pools) -> None:
    pool = ranks(2)
    assert_equal(pool.run(with_, how), pool.run(with_, "nothing")[0])


def in_mixed_precision() -> tuple[list[torch.dtype], Tensor, Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _, enorm = residual_ready(mp_policy=policy)
    model.float()
    enorm = enorm.bind(model, AdamW(model.parameters(), lr=3e-3))
    enorm.attach()
    for images, labels in batches("residual")[:4]:
        take_step(model, enorm.optimizer, (images.float(), labels))
    weights = [whole(q.detach()) for q in model.parameters()]
    with torch.no_grad():
        before = model(batches("residual")[0][0].float())
        enorm.step()
        after = model(batches("residual")[0][0].float())
    return [q.dtype for q in weights], before.float(), after.float()


def test_mixed_precision_balances_the_weights_that_are_kept(ranks: Pools) -> None:
    for dtypes, before, after in ranks(2).run(in_mixed_precision):
        assert set(dtypes) == {torch.float32}
        torch.testing.assert_close(after, before, rtol=0.05, atol=0.02)  # computed in bfloat16


def with_a_companion(companion_is_sharded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What another copy of the model computes before and after, and the weights that it had."""
    model, other = net("residual"), net("residual")
    for q in other.parameters():
        q.data.mul_(1.1)
    symmetry = symmetry_of("residual")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fsdp_(model, mesh)
    if companion_is_sharded:
        fully_shard(other, mesh=mesh, shard_placement_fn=lambda q: Shard(q.ndim - 1 if q.shape[-1] % 2 == 0 else 0))
    optimizer = SGD(model.parameters(), lr=0.0)
    enorm = equinorm.ENorm(model, optimizer, symmetry=symmetry, companions=[other])
    images = batches("residual")[0][0]
    before = other(images).detach()
    enorm.step()
    return before, other(images).detach(), whole(other.stem.weight.detach())


@pytest.mark.parametrize("companion_is_sharded", [True, False])
def test_companions_sharded_in_their_own_way_move_along(companion_is_sharded: bool, ranks: Pools) -> None:
    for before, after, weight in ranks(2).run(with_a_companion, companion_is_sharded):
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(weight, 1.1 * net("residual").stem.weight)


class OwnSGD(SGD):
    """With state that takes a function."""


def carry_momentum(state: dict[str, Any], w: Tensor, g: Tensor) -> None:
    torch.testing.assert_close(whole(w) * whole(w).reciprocal(), torch.ones_like(whole(w)))
    state["momentum_buffer"].mul_(g)


equinorm.register_state_rule(OwnSGD, {("momentum_buffer",): carry_momentum}, linear=True)


def by(kind: str, name: str, sharded: bool) -> State:
    """Optimizers of their own kind."""
    model, part = net(name), (0, 1)
    symmetry = symmetry_on_the_meta_device(name)
    if sharded:
        part = shard_(model, "fsdp")
    if kind == "ENormSGD":
        optimizer: Optimizer = equinorm.ENormSGD(model, lr=0.02, momentum=0.9, c=1.2, symmetry=symmetry)
        train(model, optimizer, name, part, steps=6)
        return state_of(model, optimizer, optimizer.enorm)
    optimizer = OwnSGD(model.parameters(), lr=1e-2, momentum=0.9) if kind == "own" else RMSprop(model.parameters())
    enorm = equinorm.ENorm(model, optimizer, c=1.2, symmetry=symmetry)
    enorm.attach()
    train(model, optimizer, name, part, steps=6)
    return state_of(model, optimizer, enorm)


@cache
def symmetry_on_the_meta_device(name: str) -> equinorm.Symmetry:
    with torch.device("meta"):
        return equinorm.trace(net(name), example(name))


@pytest.mark.parametrize(("kind", "name"), [("ENormSGD", "residual"), ("RMSprop", "residual"), ("own", "residual")])
def test_optimizers_of_their_own_kind(kind: str, name: str, ranks: Pools) -> None:
    """And the trace of a model on the meta device serves the real one."""
    assert_equal(ranks(2).run(by, kind, name, True), by(kind, name, False))


def balanced_in_half_precision() -> tuple[dict[str, Tensor], Any]:
    model = in_half_precision()
    symmetry = equinorm.trace(model, torch.zeros(1, 4, dtype=torch.float16), verify=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    report = equinorm.balance_(model, symmetry=symmetry)
    return {key: whole(q.detach()) for key, q in model.named_parameters()}, report


def in_half_precision() -> nn.Module:
    """A unit of the last process would leave the range of its dtype, one of the first is dead, and one takes a factor
    that leaves the range itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).half()
    with torch.no_grad():
        for unit, bias, incoming, outgoing in ((1, 0.0, 0.0, 1.0), (2, 6e4, 6e4, 1e-7), (4, 6e4, 1e-4, 1.0)):
            model[0].bias[unit] = bias
            model[0].weight[unit] = incoming
            model[2].weight[:, unit] = outgoing
    return model


def test_what_would_leave_the_range_of_a_dtype_is_held_everywhere(ranks: Pools) -> None:
    model = in_half_precision()
    report = equinorm.balance_(model, torch.zeros(1, 4, dtype=torch.float16), verify=False)
    assert report.held == 2
    assert all(bool(q.isfinite().all()) for q in model.parameters())
    for weights, other in ranks(2).run(balanced_in_half_precision):
        assert (other.held, other.held_in) == (report.held, report.held_in)
        for key, q in model.named_parameters():
            torch.testing.assert_close(weights[key], q.detach(), rtol=2e-3, atol=1e-7)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoint_of(model: nn.Module, optimizer: Optimizer, enorm: equinorm.ENorm) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "enorm": enorm.state_dict()}


def save_after(steps: int, folder: str) -> None:
    dcp.save(checkpoint_of(*residual_ready(steps)), checkpoint_id=folder)


def go_on_from(folder: str, first: int, steps: int) -> State:
    model, optimizer, enorm = residual_ready()
    content = checkpoint_of(model, optimizer, enorm)
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    enorm.load_state_dict(content["enorm"])
    for batch in batches("residual")[first:steps]:
        take_step(model, optimizer, batch)
    assert enorm.calls == steps
    return state_of(model, optimizer, enorm)


def without_pause(steps: int) -> State:
    return state_of(*residual_ready(steps))


def test_checkpoints_are_resumed(tmp_path: Path, ranks: Pools) -> None:
    pool = ranks(2)
    pool.run(save_after, 3, str(tmp_path / "checkpoint"))
    assert_equal(pool.run(go_on_from, str(tmp_path / "checkpoint"), 3, 5), pool.run(without_pause, 5)[0])


@pytest.mark.slow
def test_checkpoints_are_resumed_by_another_number_of_processes(tmp_path: Path, ranks: Pools) -> None:
    ranks(2).run(save_after, 3, str(tmp_path / "checkpoint"))
    expected = ranks(2).run(without_pause, 5)[0]
    assert_equal(ranks(4).run(go_on_from, str(tmp_path / "checkpoint"), 3, 5), expected)


EXAMPLE = Path(__file__).parents[1] / "examples" / "sharded_training.py"


def example_run(folder: str, steps: int) -> list[float]:
    found: list[float] = runpy.run_path(str(EXAMPLE))["main"](Path(folder), steps, save_every=4)
    return found


def test_the_example_goes_on_from_where_it_was_ended(tmp_path: Path, ranks: Pools) -> None:
    folder, pool = str(tmp_path), ranks(2)
    losses, others = pool.run(example_run, folder, 6)
    assert losses == others
    assert losses[-1] < losses[0] - 0.5
    assert pool.run(example_run, folder, 6) == [losses[4:], losses[4:]]


@pytest.mark.slow
def test_the_example_goes_on_in_another_number_of_processes(tmp_path: Path, ranks: Pools) -> None:
    losses = ranks(2).run(example_run, str(tmp_path), 6)[0]
    for others in ranks(4).run(example_run, str(tmp_path), 6):
        assert others == pytest.approx(losses[4:], rel=1e-5)


@pytest.mark.slow
def test_the_example_runs_as_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run([*command, str(tmp_path), "10"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 processes, from step 0")
    assert "step 10: loss" in done.stdout


# -- mean shift rejection ------------------------------------------------------------------------------------------


def kernels_net() -> nn.Module:
    torch.manual_seed(0)
    model = Residual().double()
    model.grouped = nn.Conv2d(7, 8, 3, dtype=torch.float64)
    model.hidden = nn.Linear(8, 6, dtype=torch.float64)
    equinorm.mean_shift_rejection_(model, log_gain=0.0, generator=torch.Generator().manual_seed(3))
    return model


def shard_along_(model: nn.Module, axis: int | None) -> tuple[int, int]:
    """Shard convolutions along this axis where it divides, None: not at all; which part of a batch is seen here."""
    if axis is None:
        return 0, 1
    size = dist.get_world_size()
    fits = lambda q: Shard(axis if q.ndim == 4 and q.shape[axis] % size == 0 else 0)  # noqa: E731
    fsdp_(model, init_device_mesh("cpu", (size,)), shard_placement_fn=fits)
    return dist.get_rank(), size


def kernels_run(axis: int | None, optimizer_name: str, max_step: float) -> State:
    """Sharded along this axis where it divides; None: one process."""
    model = kernels_net()
    part = shard_along_(model, axis)
    optimizer = OPTIMIZERS[optimizer_name](parameter_groups(model))
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    msr = equinorm.MeanShiftRejection(model, optimizer, luma=0.01, max_step=max_step)
    with msr.attach():
        train(model, optimizer, "residual", part)
    state = {name: whole(q.detach()) for name, q in model.named_parameters()}
    return state | {"limited": torch.tensor(msr.limited)}


@pytest.mark.parametrize(("axis", "step", "count"), diagonal((1, 0), (("sgd", 1e-4), ("adamw", 1e-6)), (2, 4)))
def test_mean_shift_rejection_is_that_of_one_process(
    axis: int, step: tuple[str, float], count: int, ranks: Pools
) -> None:
    expected = kernels_run(None, *step)
    assert float(expected["limited"]) > 0  # so the norm of all gradients counts
    assert_equal(ranks(count).run(kernels_run, axis, *step), expected)


def communicated_by_kernels() -> list[tuple[str, int]]:
    model = kernels_net()
    part = shard_along_(model, 0)
    optimizer = SGD(parameter_groups(model), lr=0.1)
    msr = equinorm.MeanShiftRejection(model, optimizer, luma=0.01)
    train(model, optimizer, "residual", part, steps=1)
    with Traffic() as seen:
        msr.adapt_gradients_()
    return [(one.name, one.numbers) for one in seen.collectives]


def test_mean_shift_rejection_adds_up_two_numbers(ranks: Pools) -> None:
    for collectives in ranks(2).run(communicated_by_kernels):
        assert collectives == [("all_reduce", 2)]


# -- unit filters --------------------------------------------------------------------------------------------------


def filters_run(axis: int | None, zero_mean: bool, tangent: bool) -> tuple[State, float]:
    """What came out, and how far the longest or shortest filter is from length 1."""
    model = net("residual")
    equinorm.unit_filters_(model, zero_mean=zero_mean)
    part = shard_along_(model, axis)
    optimizer = SGD(filter_groups(model), lr=0.05, momentum=0.9)
    with equinorm.UnitFilters(model, optimizer, tangent=tangent).attach():
        train(model, optimizer, "residual", part)
    state = {name: whole(q.detach()) for name, q in model.named_parameters()}
    held = [q.flatten(1).norm(dim=1) - 1 for name, q in state.items() if name.endswith("weight.original")]
    return state, float(torch.cat(held).abs().max())


@pytest.mark.parametrize(("axis", "zero_mean", "tangent"), diagonal((1, 0), (True, False), (True, False)))
def test_unit_filters_are_those_of_one_process(axis: int, zero_mean: bool, tangent: bool, ranks: Pools) -> None:
    expected, _ = filters_run(None, zero_mean, tangent)
    found = ranks(2).run(filters_run, axis, zero_mean, tangent)
    assert_equal([state for state, _ in found], expected)
    assert max(error for _, error in found) < 1e-12


def communicated_by_filters() -> list[tuple[str, int]]:
    model = net("residual")
    equinorm.unit_filters_(model)
    part = shard_along_(model, 0)
    optimizer = SGD(filter_groups(model), lr=0.05)
    filters = equinorm.UnitFilters(model, optimizer)
    train(model, optimizer, "residual", part, steps=1)
    with Traffic() as seen:
        filters.project_()
    return [(one.name, one.numbers) for one in seen.collectives]


def test_filters_that_are_whole_here_need_nothing_from_elsewhere(ranks: Pools) -> None:
    assert ranks(2).run(communicated_by_filters) == [[], []]


# -- what is refused -----------------------------------------------------------------------------------------------


PUT = (
    "mean_shift_rejection_",
    "weight_norm_",
    "centred_weight_norm_",
    "scaled_weight_norm_",
    "weight_standardization_",
    "unit_filters_",
)
"""They put parametrizations on a model, which an engine that has taken hold of its parameters would not see."""


class OwnCriterion(equinorm.criteria.Criterion):
    def value(self, tensors: Any) -> Tensor:
        return sum((w.pow(8).sum() for w in tensors.values()), torch.zeros(()))


def refused() -> dict[str, str]:
    """The errors, and proof that nothing was changed."""
    messages = {}
    images = example("residual")
    symmetry = equinorm.trace(net("residual"), images)

    def note(what: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            messages[what] = f"{type(error).__name__}: {error}"

    wrapped = FullyShardedDataParallel(net("residual"), device_id=torch.device("cpu"), use_orig_params=True)
    before = [q.detach().clone() for q in wrapped.parameters()]
    sgd = SGD(wrapped.parameters(), lr=0.1)
    note("FSDP1, traced", lambda: equinorm.trace(wrapped, images))
    note("FSDP1, balanced", lambda: equinorm.balance_(wrapped, symmetry=symmetry))
    note("FSDP1, ENorm", lambda: equinorm.ENorm(wrapped, sgd, symmetry=symmetry))
    note("FSDP1, MSR", lambda: equinorm.MeanShiftRejection(wrapped, sgd, luma=0.0))
    note("FSDP1, convert", lambda: equinorm.convert(wrapped, "weightnorm", images))
    note("FSDP1, filters", lambda: equinorm.UnitFilters(wrapped, sgd, layers="hidden"))
    for put in PUT:
        note(f"FSDP1, {put}", lambda put=put: getattr(equinorm, put)(wrapped))
    assert all(map(torch.equal, before, wrapped.parameters()))

    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own doings, as errors in tests

    parallel = DistributedDataParallel(net("residual"))
    zero = ZeroRedundancyOptimizer(parallel.parameters(), SGD, lr=0.1)
    note("ZeroRedundancyOptimizer, ENorm", lambda: equinorm.ENorm(parallel, zero, images))
    note("ZeroRedundancyOptimizer, MSR", lambda: equinorm.MeanShiftRejection(parallel, zero, luma=0.0))
    note("ZeroRedundancyOptimizer, filters", lambda: equinorm.UnitFilters(parallel, zero, layers="hidden"))

    sharded = net("residual")
    fsdp_(sharded, init_device_mesh("cpu", (dist.get_world_size(),)))
    note("traced after sharding", lambda: equinorm.trace(sharded, images))
    note("implicit", lambda: equinorm.enorm.ImplicitENorm(sharded, images, decay=0.1))
    note("path", lambda: equinorm.enorm.path_kappa(sharded, images))
    note("convert", lambda: equinorm.convert(sharded, "weightnorm", images))
    note("fold", lambda: equinorm.fold(sharded))
    note("Muon", lambda: equinorm.unitfilters.Muon([sharded.stem.weight]))
    for criterion in (equinorm.criteria.Range(), equinorm.criteria.Path(), OwnCriterion()):
        options = {"symmetry": symmetry, "criterion": criterion}
        note(type(criterion).__name__, lambda options=options: equinorm.balance_(sharded, images, **options))
    for put in PUT:
        note(put, lambda put=put: getattr(equinorm, put)(sharded))
    assert all(map(torch.equal, net("residual").parameters(), map(whole, sharded.parameters())))
    note("backend", lambda: equinorm.ENorm(sharded, SGD(sharded.parameters()), symmetry=symmetry, backend="foreach"))
    return messages


def test_what_is_refused_is_named_with_the_remedy(ranks: Pools) -> None:
    for messages in ranks(2).run(refused):
        for what in ("traced", "balanced", "ENorm", "MSR", "convert", "filters", *PUT):
            message = messages.pop(f"FSDP1, {what}")
            assert message.startswith("TypeError: FullyShardedDataParallel (FSDP1)")
            assert "fully_shard (FSDP2)" in message
        for what in ("ENorm", "MSR", "filters"):
            message = messages.pop(f"ZeroRedundancyOptimizer, {what}")
            assert message.startswith("TypeError: ZeroRedundancyOptimizer keeps the state")
        assert "give symmetry= afterwards" in messages.pop("traced after sharding")
        assert "leave it at 'auto'" in messages.pop("backend")
        own = ("Muon", "Range", "Path", "OwnCriterion")
        assert set(messages) == {"implicit", "path", "convert", "fold", *own, *PUT}
        for what, message in messages.items():
            assert message.startswith("TypeError: ")
            assert "is sharded over processes (DTensor)" in message
            assert "before the model is sharded" in message or what not in own[1:]


class DeepSpeedEngine(nn.Module):
    """A stand-in, with the names and marks that DeepSpeed's own things have."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DeepSpeedZeroOptimizer:
    __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups


def test_deepspeed_is_refused() -> None:
    model, images = net("residual"), example("residual")
    with pytest.raises(TypeError, match=r"DeepSpeedEngine of DeepSpeed keeps .*fully_shard"):
        equinorm.balance_(DeepSpeedEngine(model), images)
    with pytest.raises(TypeError, match="DeepSpeedZeroOptimizer of DeepSpeed keeps"):
        equinorm.ENorm(model, DeepSpeedZeroOptimizer(SGD(model.parameters())), images)
    model.head.weight.ds_id = 3
    with pytest.raises(TypeError, match=r"ZeRO-3 has cut 'head\.weight'"):
        equinorm.trace(model, images)
