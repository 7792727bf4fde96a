"""`update_statistics_`: averages over batches, by torch's `update_bn` and by one copy of the model per batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from equinorm import update_statistics_
from equinorm.nn import EquiNormConv2d, EquiNormLinear
from equinorm.norms.layers import BatchRenorm2d, MeanOnlyBatchNorm2d

sizes = st.lists(st.integers(2, 5), min_size=1, max_size=4)


def images(sizes: list[int], seed: int = 0, channels: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.rand(n, channels, 6, 6, dtype=torch.float64, generator=draw) * (1 + i) for i, n in enumerate(sizes)]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if "running" in name}


NETS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5, momentum=None)
    ),
    "EquiNorm": lambda: nn.Sequential(
        EquiNormConv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        EquiNormConv2d(4, 6, 3, stride=2, padding=1, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        EquiNormLinear(54, 5),
    ),
    "mean-only": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), MeanOnlyBatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), MeanOnlyBatchNorm2d(5)
    ),
    "instance norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
    "one batch renorm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), BatchRenorm2d(4)),
}


def net(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[name]().double()


@given(sizes, st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_batch_norms_get_what_torch_gives_them(sizes: list[int], seed: int) -> None:
    ours, theirs = net("batch norm", seed), net("batch norm", seed)
    batches = images(sizes, seed)
    assert update_statistics_(ours, batches) == ("1", "4")
    update_bn(batches, theirs)
    torch.testing.assert_close(statistics(ours), statistics(theirs))


@pytest.mark.parametrize("name", NETS)
@given(sizes=sizes, seed=st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_statistics_are_the_average_over_the_batches(name: str, sizes: list[int], seed: int) -> None:
    """Against one copy of the model per batch, whose statistics are that batch's alone."""
    model, batches = net(name, seed), images(sizes, seed)
    model(images([4], seed + 1)[0])  # what is there before does not count
    alone = []
    for batch in batches:
        copied = copy.deepcopy(model)
        for layer in copied.modules():
            if hasattr(layer, "momentum"):
                layer.momentum = 1.0  # type: ignore[assignment]
        copied(batch)
        alone.append(statistics(copied))
    update_statistics_(model, batches)
    for key, value in statistics(model).items():
        torch.testing.assert_close(value, torch.stack([each[key] for each in alone]).mean(0), msg=key)


def test_a_layer_that_runs_twice_averages_over_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = EquiNormConv2d(3, 3, 3, padding=1).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) + self.layer(3 * x)
            return out

    model, batches = Twice(), images([3, 2])
    update_statistics_(model, batches)
    expected = torch.stack([scale * b.mean((0, 2, 3)) for b in batches for scale in (1, 3)]).mean(0)
    torch.testing.assert_close(model.layer.running_mean, expected)


@pytest.mark.parametrize("name", NETS)
def test_mode_momentum_and_schedules_stay(name: str) -> None:
    model = nn.Sequential(net(name), nn.Dropout())
    model.train()
    model[0][0].eval()  # type: ignore[index]
    modes = [m.training for m in model.modules()]
    momenta = [getattr(m, "momentum", "none") for m in model.modules()]
    weights = copy.deepcopy(list(model.parameters()))
    update_statistics_(model, images([4, 4, 4]))
    assert [m.training for m in model.modules()] == modes
    assert [getattr(m, "momentum", "none") for m in model.modules()] == momenta
    assert not any(m._forward_pre_hooks for m in model.modules())
    torch.testing.assert_close(list(model.parameters()), weights, rtol=0, atol=0)
    for module in model.modules():
        if hasattr(module, "num_batches_tracked"):
            assert module.num_batches_tracked == (3 if module.momentum is None else 0)


class NormAndDropout(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(super().forward(x))
        return out


def test_dropout_does_not_count() -> None:
    model = nn.Sequential(nn.Dropout(0.9), NormAndDropout(3), nn.BatchNorm2d(3)).double()
    batches = images([4, 4])
    update_statistics_(model, batches)
    torch.testing.assert_close(model[1].running_mean, torch.stack([b.mean((0, 2, 3)) for b in batches]).mean(0))
    assert model[2].running_var.min() > 0.9  # 10 with dropout
    assert model[2].running_var.max() < 1.1
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", NETS)
def test_a_failure_leaves_the_model_as_it_was(name: str) -> None:
    model = net(name)
    model(images([4])[0])
    before = copy.deepcopy(dict(model.named_buffers()))
    bad = [*images([3]), *images([3], channels=2)]
    for batches, error in ((bad, (RuntimeError, ValueError)), ([], ValueError), (iter(()), ValueError)):
        with pytest.raises(error):
            update_statistics_(model, batches)
        torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
        assert all(m.training for m in model.modules())
        assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "packed", [lambda x: (x, torch.zeros(len(x))), lambda x: [x], lambda x: {"input": x}], ids=["tuple", "list", "dict"]
)
def test_batches_as_loaders_give_them(packed: Callable[[Tensor], Any]) -> None:
    one, other, batches = net("EquiNorm"), net("EquiNorm"), images([3, 2])
    update_statistics_(one, batches)
    update_statistics_(other, [packed(batch) for batch in batches])
    torch.testing.assert_close(statistics(other), statistics(one))


def test_one_batch_is_not_a_list_of_batches() -> None:
    for batch in (images([3])[0], {"input": images([3])[0]}):
        with pytest.raises(TypeError, match="expected a data loader or a list of batches, got a single"):
            update_statistics_(net("EquiNorm"), batch)


def test_layers_that_no_batch_reaches_keep_their_statistics() -> None:
    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aside = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.aside(x)
            out: Tensor = self.body(x)
            return out

    model = WithHead()
    model(images([4])[0])
    before = copy.deepcopy(model.aside.state_dict())
    assert update_statistics_(model, images([4], 1)) == ("body",)
    torch.testing.assert_close(model.aside.state_dict(), before)


def test_models_without_statistics_need_nothing() -> None:
    assert update_statistics_(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), []) == ()
    assert update_statistics_(EquiNormLinear(3, 4, track_running_stats=False), []) == ()


def test_averaged_and_compiled_models() -> None:
    averaged = AveragedModel(net("EquiNorm"))
    assert update_statistics_(averaged, images([3])) == ("0", "2", "5")
    model = net("EquiNorm")
    assert update_statistics_(torch.compile(model), images([3])) == ("0", "2", "5")  # type: ignore[arg-type]
    torch.testing.assert_close(statistics(averaged.module), statistics(model))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETS)
def test_on_a_gpu_too_where_batches_are_brought(name: str) -> None:
    """In single precision, in which EquiNorm has kernels of its own."""
    here, there = net(name).float(), net(name).float().cuda()
    batches = [batch.float() for batch in images([5, 3, 4])]
    assert update_statistics_(there, batches) == update_statistics_(here, batches)
    for key, value in statistics(there).items():
        torch.testing.assert_close(value.cpu(), statistics(here)[key], rtol=1e-3, atol=1e-4, msg=key)
