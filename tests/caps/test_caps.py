"""Caps: which functions get them, that the function stays, what freedom they open, and that equal ones fold back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equinorm
from equinorm.caps import Cap, FunctionCaps
from support.nets import assert_function_kept, double_and_trace


def chain(act: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), act, nn.Conv2d(5, 4, 1), nn.Hardtanh(0, 2), nn.Flatten(), nn.Linear(64, 2))


def images() -> Tensor:
    return 4 * torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Functions(nn.Module):
    """All spellings, a plain ReLU6 that is called twice, one after linear layers, and a clamp that is no cap."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1), nn.Conv2d(4, 4, 1)
        self.d, self.e, self.f = nn.Linear(64, 6), nn.Linear(6, 7), nn.Linear(7, 2)
        self.act = nn.ReLU6()
        self.inner = chain(nn.ReLU6())

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.a(x))
        y = self.b(y).clamp_(0, 3)
        y = self.act(self.c(y))
        z = self.d(y.flatten(1)).clamp(min=0, max=2.5)
        z = self.act(self.e(z)).clamp(0.5, 5)
        return F.hardtanh(self.f(z), -1, 1) + self.inner(x)


@pytest.mark.parametrize("act", [nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(0, 6)])
def test_modules_become_caps_that_carry_scales(act: nn.Module) -> None:
    model, x = chain(act), images()
    assert equinorm.trace(model, x).num_scales == 0
    capped, report = equinorm.convert(model, "caps", x)
    assert [row.module for row in report.converted] == ["1", "3"]
    torch.testing.assert_close(capped(x), model(x), rtol=0, atol=0)
    twin, x, sym = double_and_trace(capped, x)
    assert sym.num_scales == 5 + 4
    assert_function_kept(twin, x, sym)


def test_functions_in_the_code_of_a_module_become_caps() -> None:
    torch.manual_seed(0)
    model, x = Functions(), images()
    capped, report = equinorm.convert(model, "caps", x)
    assert {row.module for row in report.converted} == {"", "inner.1", "inner.3"}
    assert isinstance(capped.caps, FunctionCaps)
    assert capped.caps.axes == (-3, -3, -3, -1, -1)
    torch.testing.assert_close(capped(x), model(x), rtol=0, atol=0)
    twin, y, sym = double_and_trace(capped, x)
    assert sym.num_scales == 5 + 4 + 4 + 6 + (5 + 4)  # the last clamp is no cap and freezes what it reads
    assert_function_kept(twin, y, sym)
    again = pickle.loads(pickle.dumps(copy.deepcopy(capped)))
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


class Block(nn.Module):
    """One ReLU6 that is called twice, as in EfficientNet-lite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Conv2d(5, 7, 1), nn.Conv2d(7, 5, 1), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))))


class Around(nn.Module):
    """A ReLU6 that is called before and after blocks with caps of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.act = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 6, 1), nn.ReLU6()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.head(self.blocks(self.act(self.stem(x))))).mean((2, 3)) @ x.new_ones(6, 1)


def test_calls_inside_of_blocks_that_get_caps_are_theirs() -> None:
    """The outer module's last ReLU6 kept no cap: the calls of its blocks were counted as its own."""
    torch.manual_seed(0)
    model, x = Around(), images()
    capped, report = equinorm.convert(model, "caps", x)
    assert {row.module for row in report.converted} == {"", "blocks.0", "blocks.1"}
    torch.testing.assert_close(capped(x), model(x), rtol=0, atol=0)
    for name, cap in capped.named_parameters():
        if "caps" in name:  # every cap is used
            assert torch.autograd.grad((capped(x) * 1e3).sum(), cap, allow_unused=True)[0] is not None, name
    assert isinstance(capped.caps, FunctionCaps)
    assert capped.caps.calls == ((6.0, 0), (6.0, 1))
    twin, y, sym = double_and_trace(capped, x)
    assert sym.num_scales == 5 + 2 * (7 + 5)
    assert_function_kept(twin, y, sym)


def test_the_gradient_is_that_of_relu6() -> None:
    model, x = Functions(), images()
    capped, _ = equinorm.convert(model, "caps", x)
    model(x).sum().backward()
    capped(x).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(capped.get_parameter(name).grad, parameter.grad)


def test_converting_again_changes_nothing() -> None:
    capped, _ = equinorm.convert(Functions(), "caps", images())
    again, report = equinorm.convert(capped, "caps", images())
    assert not report.converted
    assert list(again.state_dict()) == list(capped.state_dict())


@pytest.mark.parametrize("build", [lambda: chain(nn.ReLU6()), Functions])
def test_equal_caps_fold_back(build: type[nn.Module]) -> None:
    model = build()
    capped, _ = equinorm.convert(model, "caps", images())
    plain, _ = equinorm.fold(capped)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert not any(isinstance(module, Cap | FunctionCaps) for module in plain.modules())
    torch.testing.assert_close(plain(images()), model(images()), rtol=0, atol=0)


def test_caps_that_differ_stay_and_the_report_says_so() -> None:
    capped, _ = equinorm.convert(Functions(), "caps", images())
    equinorm.balance_(capped, images())
    before = capped(images())
    plain, report = equinorm.fold(capped)
    assert isinstance(plain.inner[1], Cap)
    assert isinstance(plain.caps, FunctionCaps)
    why = {row.module: row.why for row in report.kept}
    assert why["inner.1"].startswith("its caps differ from channel to channel, from ")
    assert why["caps"].startswith("one of its caps is not ")
    torch.testing.assert_close(plain(images()), before, rtol=0, atol=0)


def test_keep_and_what_is_called_otherwise() -> None:
    model, x = chain(nn.ReLU6()), images()
    capped, report = equinorm.convert(model, "caps", x, keep=["1"])
    assert isinstance(capped[1], nn.ReLU6)
    assert {row.module: row.why for row in report.kept} == {"1": "kept as asked"}

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.high = nn.Linear(3, 3), 6.0

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).clamp(0, self.high)

    branches, _ = equinorm.convert(Branches(), "caps", torch.randn(2, 3))
    branches.high = 3.0
    with pytest.raises(RuntimeError, match=r"is at 3\.0 here, but was 6\.0"):
        branches(torch.randn(2, 3))


def test_nothing_to_cap_is_an_error() -> None:
    with pytest.raises(ValueError, match="calls no ReLU6, Hardtanh"):
        equinorm.convert(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "caps", torch.randn(2, 3))


def test_caps_do_not_count_in_the_norm() -> None:
    capped, _ = equinorm.convert(chain(nn.ReLU6()), "caps", images())
    counted = {w.name: w.multiplicative for w in equinorm.trace(capped, images()).parameters}
    assert not counted["1.cap"]
    assert counted["0.weight"]


COMPACT = [("mobilenet_v2", 712, 14_984), ("efficientnet_lite0", 784, 18_672 + 32 + 1280)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after"), COMPACT)
def test_compact_nets_gain_what_was_measured(name: str, before: int, after: int) -> None:
    """Free scales without and with caps, batch norms folded; of MobileNetV2 the features alone, as was measured.

    Of EfficientNet-lite0 the stem and the head were left out then.
    """
    x = torch.randn(1, 3, 64, 64)
    if name == "mobilenet_v2":
        model = pytest.importorskip("torchvision").models.mobilenet_v2(weights=None).features.eval()
    else:
        model = pytest.importorskip("timm").create_model(name).eval()
    model, _ = equinorm.fold(model, x)
    assert equinorm.trace(model, x, verify=False).num_scales == before
    capped, _ = equinorm.convert(model, "caps", x)
    torch.testing.assert_close(capped(x), model(x))
    assert equinorm.trace(capped, x).num_scales == after


def test_caps_compile_in_one_graph() -> None:
    capped, _ = equinorm.convert(Functions(), "caps", images())
    compiled = torch.compile(capped, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), capped(images()))
