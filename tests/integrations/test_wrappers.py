"""What other programs put around a model and its optimizer: seen through in one place, for all who take them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import equinorm
from equinorm.diagnostics import Recorder
from equinorm.models.unwrapping import unwrap, unwrap_optimizer
from support.short_training import dense

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
Y = torch.arange(8) % 3


def convolutional() -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten()
    )
    net.append(nn.Linear(24, 3))
    equinorm.mean_shift_rejection_(net, generator=torch.Generator().manual_seed(2))
    return net


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Wrapped:
    """A model and an optimizer in wrappers, and how they are trained."""

    def __init__(self, model: Any, optimizer: Any, backward: Any = None) -> None:
        self.model, self.optimizer, self.backward = model, optimizer, backward or Tensor.backward

    def train(self, steps: int = 4) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward(nn.functional.cross_entropy(self.model(X), Y))
            self.optimizer.step()


def in_accelerate(net: nn.Module, mixed: str = "no") -> Wrapped:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    model, optimizer = accelerator.prepare(net, sgd(net))
    return Wrapped(model, optimizer, accelerator.backward)


def in_accelerate_with_bfloat16(net: nn.Module) -> Wrapped:
    return in_accelerate(net, "bf16")


def in_opacus(net: nn.Module) -> Wrapped:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model, optimizer, _ = PrivacyEngine().make_private(
        module=net,
        optimizer=sgd(net),
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=1e9,
        poisson_sampling=False,
    )
    return Wrapped(model, optimizer)


def in_ddp(net: nn.Module) -> Wrapped:
    return Wrapped(nn.parallel.DistributedDataParallel(net), sgd(net))


def compiled(net: nn.Module) -> Wrapped:
    torch._dynamo.reset()
    return Wrapped(torch.compile(net), sgd(net))


def compiled_in_accelerate(net: nn.Module) -> Wrapped:
    torch._dynamo.reset()
    inside = in_accelerate(net)
    return Wrapped(torch.compile(inside.model), inside.optimizer, inside.backward)


def in_fabric(net: nn.Module) -> Wrapped:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, sgd(net))
    return Wrapped(model, optimizer, fabric.backward)


WRAPPERS = {
    "accelerate": in_accelerate,
    "accelerate, bfloat16": in_accelerate_with_bfloat16,
    "Opacus": in_opacus,
    "DDP": in_ddp,
    "torch.compile": compiled,
    "accelerate, compiled": compiled_in_accelerate,
    "Fabric": in_fabric,
}
SHOWS = ("torch", "accelerate", "opacus", "lightning")


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.shows("wrappers", "ENorm of accelerate's, Opacus', DDP's, compiled and Fabric's: as without them", *SHOWS)
def test_enorm(wrapper: str) -> None:
    plain, net = dense(), dense()
    bare, wrapped = Wrapped(plain, sgd(plain)), WRAPPERS[wrapper](net)
    assert unwrap(wrapped.model) is net
    assert type(unwrap_optimizer(wrapped.optimizer)) is torch.optim.SGD
    scales = equinorm.trace(plain, X).num_scales
    for each in (bare, wrapped):
        enorm = equinorm.ENorm(each.model, each.optimizer, X, c=1.2)
        assert enorm.symmetry.num_scales == scales
        assert "scales of Sequential" in repr(enorm)
        assert "attached to SGD" in repr(enorm.attach())
        each.train()
        assert enorm.calls == 4
    tolerance = 0.02 if "bfloat16" in wrapper else 1e-5
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=tolerance, atol=tolerance)


def test_opacus_hooks_see_nothing_of_a_trace() -> None:
    wrapped = in_opacus(dense())
    equinorm.trace(wrapped.model, X)
    assert wrapped.model.hooks_enabled
    assert not any(getattr(module, "activations", None) for module in wrapped.model.modules())
    wrapped.train(1)
    assert wrapped.model._module[0].weight.grad is not None


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.shows("wrappers", "mean shift rejection and the recorder: as without them", *SHOWS)
def test_mean_shift_rejection_and_recorder(wrapper: str) -> None:
    plain, net = convolutional(), convolutional()
    bare, wrapped = Wrapped(plain, sgd(plain)), WRAPPERS[wrapper](net)
    recorded = []
    for each in (bare, wrapped):
        equinorm.MeanShiftRejection(each.model, each.optimizer).attach()
        recorder = Recorder(each.model, each.optimizer, every=1, max_share=None)
        each.train(3)
        recorder.close()
        recorded.append(recorder.records)
    tolerance = 0.02 if "bfloat16" in wrapper else 1e-5
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=tolerance, atol=tolerance)
    assert [r["weights"]["energy"].keys() for r in recorded[0]] == [r["weights"]["energy"].keys() for r in recorded[1]]
    energies = [r[-1]["weights"]["energy"]["5.weight"] for r in recorded]
    assert energies[1] == pytest.approx(energies[0], rel=tolerance)


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "Opacus"])  # which has no buffers in layers
@pytest.mark.shows("wrappers", "unit filters: held at length 1", *SHOWS)
def test_unit_filters(wrapper: str) -> None:
    net = dense()
    equinorm.unit_filters_(net, keep=["4"])
    wrapped = WRAPPERS[wrapper](net)
    equinorm.UnitFilters(wrapped.model, wrapped.optimizer).attach()
    wrapped.train(3)
    torch.testing.assert_close(net[2].parametrizations.weight.original.norm(dim=1), torch.ones(12))


# -- errors ------------------------------------------------------------------------------------------------------------


class SOAP(torch.optim.SGD):
    """Named as the one that cannot follow."""


class Unknown(torch.optim.Optimizer):
    """An optimizer without a rule, with state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["curvature"] = torch.ones_like(p)
                self.state[p]["trace"] = torch.ones_like(p)


@pytest.mark.shows(
    "wrappers", "errors name the user's objects and the state keys that are there", "accelerate", "opacus"
)
def test_errors_name_what_is_inside() -> None:
    from accelerate import Accelerator
    from opacus.optimizers import DPOptimizer

    model = dense()
    private = partial(DPOptimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    for wrap in (Accelerator(cpu=True).prepare, private):
        refused = wrap(SOAP(model.parameters(), lr=0.1))
        with pytest.raises(TypeError, match=r"^SOAP cannot follow a rescaling of the weights: it preconditions by"):
            equinorm.ENorm(model, refused, X)
        optimizer = Unknown(model.parameters())
        optimizer.step()
        unknown = wrap(optimizer)
        with pytest.raises(TypeError, match=r"state of Unknown follows .*It keeps 'curvature', 'trace'"):
            equinorm.ENorm(model, unknown, X)
        adam = torch.optim.Adam(model.parameters())
        enorm = equinorm.ENorm(model, wrap(adam), X)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        adam.step()
        adam.state[model[0].weight]["odd"] = torch.zeros(1)
        with pytest.raises(ValueError, match=r"Adam keeps a state 'odd' .*it keeps 'step', 'exp_avg', 'exp_avg_sq'"):
            enorm.step()
    ddp = nn.parallel.DistributedDataParallel(model)
    other = sgd(dense())
    with pytest.raises(ValueError, match="every scale of Sequential is held"):
        equinorm.ENorm(ddp, other, X)


# -- averages ----------------------------------------------------------------------------------------------------------


def averages_of(model: nn.Module) -> dict[str, Any]:
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from timm.utils import ModelEmaV2, ModelEmaV3

    callback = EMAWeightAveraging()
    callback._average_model = AveragedModel(model)
    return {
        "AveragedModel": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "ModelEmaV2": ModelEmaV2(model),
        "ModelEmaV3": ModelEmaV3(model),
        "EMAWeightAveraging": callback,
        "a copy": copy.deepcopy(model),
    }


@pytest.mark.parametrize("kind", ["AveragedModel", "ModelEmaV2", "ModelEmaV3", "EMAWeightAveraging", "a copy"])
@pytest.mark.shows(
    "averages", "AveragedModel, ModelEmaV3, EMAWeightAveraging as companions", "torch", "timm", "lightning"
)
def test_companions(kind: str) -> None:
    model, x = dense().double(), X.double()
    average = averages_of(model)[kind]
    inside = unwrap(average)
    with torch.no_grad():
        for p in inside.parameters():
            p.add_(0.1 * torch.randn_like(p))
    before, weight = inside(x), inside[0].weight.clone()
    equinorm.ENorm(model, sgd(model), x, c=1.3, companions=[average]).step()
    torch.testing.assert_close(inside(x), before, rtol=1e-12, atol=1e-12)
    assert not inside[0].weight.equal(weight)


def test_a_callback_without_an_average_says_so() -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    model = dense()
    with pytest.raises(ValueError, match="EMAWeightAveraging has no averaged model before training starts"):
        equinorm.ENorm(model, sgd(model), X, companions=[EMAWeightAveraging()])


@pytest.mark.shows(
    "averages", "balance_ of an average, of a compiled, private and adapted model", "torch", "opacus", "peft"
)
def test_balancing_what_is_wrapped() -> None:
    from peft import LoraConfig, get_peft_model

    for wrap in (
        AveragedModel,
        torch.compile,
        lambda model: in_opacus(model).model,
        lambda model: get_peft_model(model, LoraConfig(target_modules=["2"])),
    ):
        model = dense()
        wrapped = wrap(model)
        before = wrapped(X)
        report = equinorm.balance_(wrapped, X, frozen="move")
        torch.testing.assert_close(wrapped(X), before, rtol=1e-4, atol=1e-5)
        assert "Sequential" in str(report) or report
