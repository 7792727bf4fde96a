"""Models and optimizers inside wrappers; stand-ins have the names and attributes of other programs' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import equinorm
from equinorm.models.unwrapping import as_written, unwrap, unwrap_optimizer, unwrap_optimizers

X = torch.randn(4, 3)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class GradSampleModule(nn.Module):
    """As Opacus': hooks that keep what goes through."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self.hooks_enabled, self.seen = module, True, 0
        for each in module.modules():
            each.register_forward_hook(self.capture)

    def capture(self, *_: Any) -> None:
        self.seen += self.hooks_enabled

    def forward(self, x: Tensor) -> Any:
        return self._module(x)


class ModelEmaV3(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class PeftModel(nn.Module):
    def __init__(self, model: nn.Module, prompt: bool = False) -> None:
        super().__init__()
        self.base_model, self.active_peft_config = model, SimpleNamespace(is_prompt_learning=prompt)

    def get_base_model(self) -> nn.Module:
        return self.base_model


class EMAWeightAveraging(type("WeightAveraging", (), {})):  # type: ignore[misc]
    _average_model: Any = None


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, AveragedModel, GradSampleModule, ModelEmaV3, PeftModel]
)
def test_a_model_inside(wrap: Any) -> None:
    model = net()
    wrapped = wrap(model)
    inside = unwrap(wrapped)
    assert inside is model or type(wrapped) is AveragedModel  # which copies
    assert unwrap(ModelEmaV3(wrapped)) is inside
    assert unwrap(inside) is inside
    assert equinorm.trace(wrapped, X).model is inside
    with pytest.raises(TypeError, match="convert the model first and wrap it then"):
        equinorm.convert(wrapped, "weightnorm", X)


def test_a_model_that_only_looks_like_a_wrapper() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = self._module = net()

    mine = Mine()
    assert unwrap(mine) is mine
    prompted = PeftModel(net(), prompt=True)
    assert unwrap(prompted) is prompted


def test_an_average_of_a_callback() -> None:
    callback, model = EMAWeightAveraging(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="EMAWeightAveraging has no averaged model before training starts"):
        equinorm.ENorm(model, optimizer, X, companions=[callback])
    callback._average_model = AveragedModel(model)
    enorm = equinorm.ENorm(model, optimizer, X, c=1.5, companions=[callback])
    before, weight = callback._average_model(X), callback._average_model.module[0].weight.clone()
    enorm.step()
    torch.testing.assert_close(callback._average_model(X), before)
    assert not callback._average_model.module[0].weight.equal(weight)


def wrapper(optimizer: Any, name: str = "optimizer") -> Any:
    return SimpleNamespace(**{name: optimizer, "param_groups": optimizer.param_groups})


@pytest.mark.parametrize("name", ["optimizer", "original_optimizer", "_optimizer"])
def test_an_optimizer_inside(name: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrapper(wrapper(optimizer), name)
    assert unwrap_optimizer(wrapped) is optimizer
    assert unwrap_optimizers([wrapped, optimizer]) == (optimizer,)
    assert equinorm.ENorm(model, wrapped, X).optimizer is optimizer
    assert "attached to SGD" in repr(equinorm.ENorm(model, wrapped, X).attach())


def test_an_optimizer_that_keeps_another_besides() -> None:
    inner = torch.optim.SGD(net().parameters(), lr=0.1)
    outer = torch.optim.Adam(net().parameters())
    outer.optimizer = inner  # type: ignore[attr-defined]
    assert unwrap_optimizer(outer) is outer
    with pytest.raises(TypeError, match="expected the optimizer that trains the model, got int"):
        equinorm.ENorm(net(), 3, X)  # type: ignore[arg-type]


def test_hooks_of_opacus_see_nothing_of_a_trace() -> None:
    private = GradSampleModule(net())
    equinorm.trace(private, X)
    assert private.seen == 0
    assert private.hooks_enabled
    private(X)
    assert private.seen == 4


def test_the_forward_that_accelerate_replaced_is_put_back() -> None:
    """Guards against tracing through autocast: what is computed in half precision has no scales."""
    model = net()
    model._original_forward = model.forward

    def forward(x: Tensor) -> Tensor:
        return type(model).forward(model, x.bfloat16().float())

    model.forward = forward  # type: ignore[method-assign]
    assert equinorm.trace(model, X).num_scales == equinorm.trace(net(), X).num_scales == 4
    assert vars(model)["forward"] is forward
    with as_written(model):
        assert "forward" not in vars(model)
    with pytest.raises(RuntimeError, match="stop"), as_written(model):
        raise RuntimeError("stop")
    assert vars(model)["forward"] is forward


def test_names_for_weight_decay_are_known_with_and_without_the_prefix() -> None:
    names = equinorm.no_weight_decay(nn.DataParallel(net()))
    assert names == {"0.bias", "2.bias", "module.0.bias", "module.2.bias"}
