"""The numeric net below the rules: a rule that is wrong is caught, what it opened is frozen, and it is said so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.symmetry import verify
from equinorm.symmetry.rules.registry import RULES, register_rule
from equinorm.symmetry.values import activation
from support.nets import Net, assert_function_kept


@torch.library.custom_op("verified::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x + 0.5


@shifted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    """A rule that takes a shift for homogeneous."""
    register_rule("verified.shifted.default")(lambda t, a: activation(t.labels(a["x"])))
    yield
    del RULES["verified.shifted.default"]


def three_layers() -> nn.Module:
    net = Net(
        lambda m, x: m.c(shifted(m.b(m.a(x).relu()).relu())),
        a=nn.Linear(3, 5),
        b=nn.Linear(5, 4),
        c=nn.Linear(4, 2),
    )
    return net.double()


@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_rule_is_caught_and_only_what_it_opened_is_frozen() -> None:
    model, x = three_layers(), torch.randn(6, 3, dtype=torch.float64)
    assert equinorm.trace(model, x, verify=False).num_scales == 9
    symmetry = equinorm.trace(model, x)
    assert symmetry.num_scales == 5, "the first layer is free, the one before the shift is not"
    assert len(symmetry.verification.frozen) == 1
    assert "linear in b" in symmetry.verification.frozen[0]
    assert "frozen because moving them changed the outputs: linear in b" in str(symmetry.explain(summary=True))
    assert_function_kept(model, x, symmetry)


@pytest.mark.usefixtures("wrong_rule")
def test_offsets_of_zero_and_constant_inputs_hide_nothing() -> None:
    """With zero inputs and zero offsets everything is zero, and zero times anything is the same."""
    model, x = three_layers(), torch.zeros(6, 3, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "b.weight" in name or "bias" in name:
                parameter.zero_()
    kept = {name: p.clone() for name, p in model.named_parameters()}
    assert equinorm.trace(model, x).num_scales == 5
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    assert not x.any()


@pytest.mark.usefixtures("wrong_rule")
def test_what_changes_outputs_only_together_is_found() -> None:
    """Two factors that cancel: neither half alone changes anything."""
    groups = list(range(11))
    for pair in ([0, 10], [2, 3], [7, 9], [4]):
        found = verify.culprits(groups, lambda some, pair=pair: set(pair) <= set(some))  # type: ignore[misc]
        assert set(found) & set(pair), f"{found} has nothing of {pair}"
    assert verify.culprits([3], lambda some: True) == [3]


@pytest.mark.parametrize("verified", [None, True])
def test_a_right_model_loses_nothing(verified: bool | None) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    symmetry = equinorm.trace(model, torch.randn(6, 3), verify=verified)
    assert symmetry.num_scales == 9
    assert symmetry.verification.done
    assert symmetry.verification.change == 0.0, "factors are powers of two, so not even the rounding changes"
    assert symmetry.verification.frozen == ()
    assert str(symmetry.verification).startswith("verified: with all scales moved outputs change by 0")


def test_a_model_with_noise_of_its_own_is_not_blamed() -> None:
    """What comes out differently each time cannot be compared; nothing is frozen for it."""
    source = random.SystemRandom()
    model = Net(lambda m, x: m.b(m.a(x).relu()) + source.random(), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    symmetry = equinorm.trace(model, torch.randn(6, 3))
    assert symmetry.num_scales == 5
    assert not symmetry.verification.done
    assert "each time" in symmetry.verification.why_not


def test_a_model_that_asserts_its_values_is_verified() -> None:
    """A run that fails with moved scales counts as a change."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        if not torch.compiler.is_exporting():
            assert float(h.detach().norm()) == size[0], "not as it was"
        return m.b(h)  # type: ignore[no-any-return]

    model, x = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 2)).double(), torch.randn(6, 3, dtype=torch.float64)
    size = [0.0]
    layer = model.get_submodule("a")
    torch.nn.init.normal_(layer.bias)  # type: ignore[arg-type]
    size[0] = float(layer(x).relu().detach().norm())
    symmetry = equinorm.trace(model, x)
    assert symmetry.num_scales == 0
    assert symmetry.verification.frozen


def test_models_that_cannot_be_run_say_why() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    symmetry = equinorm.trace(model, torch.randn(6, 3, device="meta"))
    assert symmetry.num_scales == 5
    assert str(symmetry.verification) == "not verified: the model cannot be run: the model is on the meta device"


def test_large_models_are_verified_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equinorm.symmetry.symmetry.LARGEST_WORK", 10)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(6, 3)
    assert "verify=True" in equinorm.trace(model, x).verification.why_not
    assert equinorm.trace(model, x, verify=True).verification.done
    assert "not asked for" in equinorm.trace(model, x, verify=False).verification.why_not


def test_gradients_in_forward_can_be_run() -> None:
    """A model that differentiates in its forward runs with gradients on, here only outside of the export."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        if not torch.compiler.is_exporting():
            torch.autograd.grad(h.sum(), m.a.weight)
        return m.b(h)  # type: ignore[no-any-return]

    symmetry = equinorm.trace(Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 2)), torch.randn(6, 3))
    assert symmetry.verification.done
    assert symmetry.num_scales == 5


MODES: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2)),
    lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2)),
]


@pytest.mark.parametrize("build", MODES)
def test_modes_statistics_and_dropout_are_as_they_were(build: Callable[[], nn.Module]) -> None:
    """In training mode statistics move and masks are drawn: the same in both runs, and not in the user's model."""
    model = build().train()
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    symmetry = equinorm.trace(model, torch.randn(6, 3))
    assert symmetry.verification.done
    assert symmetry.verification.frozen == ()
    assert symmetry.num_scales == 5
    assert model.training
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items())


def test_the_report_of_balance_says_by_how_much_outputs_moved() -> None:
    model, x = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(6, 3)
    report = equinorm.balance_(model, x)
    assert report.output_change is not None
    assert report.output_change < 1e-6
    assert "outputs moved by" in str(report)
    assert equinorm.balance_(model, x, verify=False).output_change is None
