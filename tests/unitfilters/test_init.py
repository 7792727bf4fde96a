"""The start from data: one deviation, mean zero, all or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equinorm.models.initialising import standardizing
from equinorm.unitfilters import data_init_, unit_filters_


class Gained(nn.Module):
    """A convolution of unit filters with gain and bias of its own, as a net may write it itself."""

    def __init__(self, inputs: int, outputs: int, per: str = "layer") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(outputs, dtype=torch.float64))
        self.register_buffer("gain", torch.ones(() if per == "layer" else (outputs, 1, 1), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * nn.functional.conv2d(x, self.weight) + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self, own: str = "layer") -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.branch = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.own = Gained(6, 4, own)
        self.sequence = nn.Linear(7, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.branch(x).relu()
        x = self.own(x).relu().flatten(2)[:, :, :7]
        return self.head(self.sequence(x).relu())


def net(own: str = "layer", **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net(own).double()
    unit_filters_(model, **options)
    return model


def images(n: int = 32) -> Tensor:
    return 3.0 * torch.randn(n, 3, 9, 9, dtype=torch.float64) + 1.0


def outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    channel = {"sequence": 2}
    for name in ("stem", "branch", "own", "sequence"):
        getattr(model, name).register_forward_hook(
            lambda _, __, y, name=name: seen.__setitem__(name, y.transpose(0, channel.get(name, 1)).flatten(1))
        )
    model(x)
    return seen


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("per", ["layer", "channel"])
def test_layers_put_out_one_deviation_and_no_mean(per: Any, learned: bool) -> None:
    model, x = net(per, learned=learned), images()
    kept = model.head(torch.ones(1, 5).double())
    report = data_init_(model, x, modules="own", per=per)
    assert report.order == ("stem", "branch", "own", "sequence")
    assert report.without_bias == ("branch",)
    assert not report.constant
    for name, y in outputs(model, x).items():
        variance, mean = y.var(1, correction=0), y.mean(1)
        if name != "branch":
            torch.testing.assert_close(mean, torch.zeros_like(mean))
        torch.testing.assert_close(
            variance if per == "channel" else variance.mean(),
            torch.ones_like(variance if per == "channel" else variance.mean()),
        )
        if per == "layer":
            assert variance.std() > 1e-3
    assert torch.equal(model.head(torch.ones(1, 5).double()), kept)


def test_one_number_per_layer_keeps_proportions() -> None:
    model, x = net(), images()
    before = model.stem.parametrizations["weight"][0].gain.clone()
    data_init_(model, x, modules="own")
    ratio = model.stem.parametrizations["weight"][0].gain / before
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_without_centring_biases_are_scaled_along() -> None:
    model, x = net(), images()
    before = model.stem(x)
    report = data_init_(model, x, modules="own", centre=False)
    ratio = model.stem(x) / before
    torch.testing.assert_close(ratio, ratio[:1, :1, :1, :1].expand_as(ratio))
    assert report.without_bias == ()


def test_constant_channels_keep_their_gain() -> None:
    model, x = net(), images()
    model.own.weight.data[1] = 0.0
    model.sequence.parametrizations["weight"].original.data.zero_()
    report = data_init_(model, x, modules="own")
    assert report.constant == {"own": 1, "sequence": 5}
    assert "own: 1 constant output" in str(report)
    assert torch.isfinite(model(x)).all()


def test_a_layer_that_runs_twice_is_set_by_its_first_run() -> None:
    layer = nn.Linear(4, 4).double()
    model = nn.Sequential(layer, nn.ReLU(), layer)
    unit_filters_(model, classifier=True)
    x = torch.randn(64, 4, dtype=torch.float64)
    assert data_init_(model, x).order == ("0",)
    torch.testing.assert_close(layer(x).var(0, correction=0).mean().item(), 1.0)


def test_means_and_scales_of_an_output() -> None:
    y = torch.tensor([[0.0, 5.0], [2.0, 5.0]])
    mean, scale, varies = standardizing(y, channel=1, per="channel")
    assert (mean.tolist(), scale.tolist(), varies.tolist()) == ([1.0, 5.0], [1.0, 1.0], [True, False])
    assert standardizing(4 * y, channel=1)[1].tolist() == pytest.approx([8**-0.5] * 2)


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("cause", ["error", "one value", "not run", "infinite"])
def test_all_or_nothing(cause: str) -> None:
    model, x = net(), images()
    model.norm = nn.BatchNorm2d(3).double()
    first = model.stem
    model.stem = nn.Sequential(model.norm, first)
    if cause == "error":
        model.head = Breaks()  # type: ignore[assignment]
    elif cause == "one value":
        x = x[:1, :, :5, :5]
    elif cause == "not run":
        model.more = nn.Linear(2, 2)
        unit_filters_(model.more, classifier=True)
    else:
        model.own.bias.data[0] = torch.inf
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((RuntimeError, ValueError)) as error:
        data_init_(model, x, modules="own")
    message = {"error": "broken on purpose", "one value": "", "not run": "never ran", "infinite": "not finite"}[cause]
    assert message in str(error.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not first._forward_hooks


def test_what_cannot_be_set() -> None:
    with pytest.raises(ValueError, match="no layer of the model"):
        data_init_(nn.Linear(2, 2), torch.randn(4, 2))
    with pytest.raises(ValueError, match="one gain for all channels"):
        data_init_(net(), images(), per="channel", modules=["own"])
    with pytest.raises(ValueError, match="without a tensor `gain`"):
        data_init_(net(), images(), modules=["head"])
    with pytest.raises(ValueError, match="did you mean own"):
        data_init_(net(), images(), modules=["pwn"])
    with pytest.raises(ValueError, match='"layer" or "channel"'):
        data_init_(net(), images(), per="filter")  # type: ignore[arg-type]
