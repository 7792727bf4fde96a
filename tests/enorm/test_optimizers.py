"""How optimizer state follows a rescaling, and Path-SGD.

The arbiter: state carried through a rescaling equals state gathered in the new coordinates from the start.
Two copies of one optimizer see the same history, one in coordinates w with gradients g, one in f·w with g/f.
The first one's state is carried by f; from then on both are the same optimizer: same state, same steps.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from equinorm import unitfilters
from equinorm.enorm import optimizer_state as optimizers
from equinorm.enorm.optimizer_state import (
    carry_state_,
    check_optimizer,
    decoupled_decay,
    register_state_rule,
    state_rule,
    step_is_linear,
)
from equinorm.enorm.pathsgd import PathSGD, path_kappa

TINY = 1e-30  # eps has no coordinates: the arbiter holds as far as it is negligible


class Lion(Optimizer):
    """Chen et al. 2023, as a user brings it along: sign of an average of gradients, decoupled decay."""

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (0.9 * average + 0.1 * p.grad).sign())
                average.lerp_(p.grad, 0.01)


OWN: dict[str, type[Optimizer]] = {"Lion": Lion, "MuonForFilters": unitfilters.Muon}
"""Those that torch does not have."""


@dataclass(frozen=True)
class Case:
    """One optimizer with one set of options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    gathering_lr: float = 0.0  # weights are held while state is gathered
    lr: float = 0.01
    rank_one: bool = False
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (5,), (2, 3, 2, 2))

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items() if k != "eps")])

    @property
    def optimizer_class(self) -> type[Optimizer]:
        return OWN.get(self.name) or getattr(torch.optim, self.name)

    def build(self, params: list[Tensor], **options: Any) -> Optimizer:
        return self.optimizer_class(params, **{"lr": self.gathering_lr, **self.options, **options})


def _cases() -> Iterator[Case]:
    for foreach in (False, True):
        how = {"foreach": foreach}
        yield Case("SGD", how)
        yield Case("SGD", {"momentum": 0.9, **how})
        yield Case("SGD", {"momentum": 0.9, "nesterov": True, **how})
        yield Case("SGD", {"momentum": 0.9, "dampening": 0.3, "maximize": True, **how})
        # lr = 0 while weights are held, or the average would hold steps as well as weights
        yield Case("ASGD", {"t0": 0.0, **how})
        for name, amsgrad in itertools.product(("Adam", "AdamW"), (False, True)):
            yield Case(name, {"amsgrad": amsgrad, "eps": TINY, "maximize": amsgrad, **how})
        yield Case("AdamW", {"weight_decay": 0.1, "eps": TINY, **how})
        for name in ("NAdam", "RAdam"):
            yield Case(name, {"eps": TINY, **how})
            yield Case(name, {"eps": TINY, "decoupled_weight_decay": True, "weight_decay": 0.1, **how})
        yield Case("Adamax", {"eps": TINY, **how})
        for centered, momentum in itertools.product((False, True), (0.0, 0.9)):
            yield Case("RMSprop", {"centered": centered, "momentum": momentum, "eps": TINY, **how})
        yield Case("Adagrad", {"eps": TINY, "lr_decay": 0.1, **how})
        # eps is where acc_delta starts, so it cannot vanish; steps are of the size of its root
        yield Case("Adadelta", {"eps": 1e-20, **how}, lr=1e6)
        yield Case("Rprop", how, gathering_lr=1e-2)  # lr is where step_size starts
        yield Case("Adafactor", {"eps": (TINY, 1e-3), "weight_decay": 0.1, **how}, rank_one=True)
    for name in ("SGD", "Adam", "AdamW", "Adagrad"):
        extra = {"momentum": 0.9} if name == "SGD" else {"eps": TINY}
        yield Case(name, {"fused": True, **extra})
    for nesterov in (False, True):
        yield Case("Muon", {"nesterov": nesterov}, shapes=((3, 4), (4, 2)))
    yield Case("Lion", {"weight_decay": 0.1})
    yield Case("MuonForFilters", {"weight_decay": 0.1}, shapes=((3, 4), (2, 3, 2, 2)))


CASES = [case for case in _cases() if case.name in OWN or hasattr(torch.optim, case.name)]
EACH = pytest.mark.parametrize("case", CASES, ids=str)
# one per class, with as many state keys as it can have
RICHEST = {
    case.name: case
    for case in sorted(CASES, key=lambda c: bool(c.options.get("amsgrad") or c.options.get("centered")))
    if case.name != "SGD" or "momentum" in case.options
}


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test registers into a copy."""
    monkeypatch.setattr(optimizers, "_RULES", dict(optimizers._RULES))
    register_state_rule(Lion, {"exp_avg": -1}, decoupled=True)


def _factor(shape: tuple[int, ...], axes: int, generator: torch.Generator) -> Tensor:
    """A factor that varies along some axes of `shape`; powers of two, lest rounding decides a sign."""
    kept = [n if axes >> i & 1 else 1 for i, n in enumerate(shape)]
    return 2.0 ** torch.randint(-5, 6, kept, generator=generator).double()


def _gradient(shape: tuple[int, ...], rank_one: bool, t: int, generator: torch.Generator) -> Tensor:
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    g = g + 0.3 * g.sign()  # eps is negligible beside it
    if not rank_one or len(shape) < 2:
        return g
    # signs vary; squares are the same outer product at every t, but for a number
    fixed = torch.Generator().manual_seed(7)
    row = torch.rand(*shape[:-1], 1, generator=fixed, dtype=torch.float64) + 0.5
    col = torch.rand(*shape[:-2], 1, shape[-1], generator=fixed, dtype=torch.float64) + 0.5
    return g.sign() * row * col * (1 + t)


def _step(optimizer: Optimizer, params: list[Tensor], weights: list[Tensor] | None, grads: list[Tensor]) -> None:
    for i, p in enumerate(params):
        if weights is not None:
            p.data.copy_(weights[i])
        p.grad = grads[i].clone()
    optimizer.step()


def _assert_same_state(one: Optimizer, other: Optimizer) -> None:
    ours, theirs = one.state_dict()["state"], other.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index in theirs:
        assert ours[index].keys() == theirs[index].keys()
        for key, expected in theirs[index].items():
            if isinstance(expected, Tensor):
                torch.testing.assert_close(
                    ours[index][key],
                    expected,
                    rtol=1e-9,
                    atol=0.0,
                    msg=lambda m, key=key: f"state {key}: {m}",
                )


def _arbiter(case: Case, seed: int, steps: int, axes: int, uneven: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = [_factor(shape, axes, generator) for shape in case.shapes]
    if uneven:
        factors = [f * (0.7 + torch.rand(f.shape, generator=generator, dtype=torch.float64)) for f in factors]
    old = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in case.shapes]
    new = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in case.shapes]
    carried, gathered = case.build(old), case.build(new)
    weights: list[Tensor] = []
    for t in range(steps):
        weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.shapes]
        grads = [_gradient(shape, case.rank_one, t, generator) for shape in case.shapes]
        _step(carried, old, weights, grads)
        _step(
            gathered,
            new,
            [f * w for f, w in zip(factors, weights, strict=True)],
            [g / f for f, g in zip(factors, grads, strict=True)],
        )

    check_optimizer(carried, old)
    for p, f in zip(old, factors, strict=True):
        carry_state_(carried, p, f)
    _assert_same_state(carried, gathered)

    # From here on they are one and the same optimizer. Two steps: ASGD uses a new lr one step late.
    for optimizer in (carried, gathered):
        optimizer.param_groups[0]["lr"] = case.lr
    start = [f * w for f, w in zip(factors, weights, strict=True)]
    for t in range(2):
        grads = [
            _gradient(shape, case.rank_one, t, generator) / f for shape, f in zip(case.shapes, factors, strict=True)
        ]
        _step(carried, old, start if t == 0 else None, grads)
        _step(gathered, new, start if t == 0 else None, grads)
    for p, q, s in zip(old, new, start, strict=True):
        torch.testing.assert_close(p - s, q - s, rtol=1e-6, atol=1e-13)
        assert (q - s).abs().max() > 1e-6, "no step was made: nothing was compared"


@EACH
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), steps=st.integers(1, 6), axes=st.integers(0, 15))
def test_carried_state_is_the_state_gathered_in_the_new_coordinates(
    case: Case, seed: int, steps: int, axes: int
) -> None:
    _arbiter(case, seed, steps, axes)


@EACH
def test_carried_state_with_factors_that_are_no_powers_of_two(case: Case) -> None:
    # Muon orthogonalizes in bfloat16, where the last digit of a double decides a rounding
    if case.name == "Muon":
        pytest.skip("its step is computed in bfloat16")
    _arbiter(case, seed=3, steps=5, axes=15, uneven=True)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (name, key)
        for name in sorted(RICHEST)
        if name != "Lion"
        for key in state_rule(RICHEST[name].optimizer_class).powers
    ],
)
def test_the_arbiter_notices_a_wrong_power(name: str, key: str) -> None:
    """Every power in the table counts: off by one, zeros included, and the arbiter or the check objects."""
    case = RICHEST[name]
    rule = state_rule(case.optimizer_class)
    for wrong in (rule.powers[key] - 1, rule.powers[key] + 1):
        register_state_rule(case.optimizer_class, {**rule.powers, **rule.together, key: wrong}, linear=rule.linear)
        with pytest.raises((AssertionError, ValueError), match=key):
            _arbiter(case, seed=5, steps=4, axes=15)


@pytest.mark.parametrize("name", [n for n in RICHEST if n != "Lion"])
def test_every_rule_is_met_by_some_state(name: str) -> None:
    """The table names no key that the optimizer, with all its options, does not hold."""
    case = RICHEST[name]
    params = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in case.shapes]
    held: set[str] = set()
    for options in (c.options for c in CASES if c.name == name):
        optimizer = case.optimizer_class(params, lr=0.0, **options)
        _step(optimizer, params, None, [torch.ones_like(p) for p in params])
        held |= {key for state in optimizer.state.values() for key in state}
    rule = state_rule(case.optimizer_class)
    assert held == {*rule.powers, *(key for keys in rule.together for key in keys)}


# The safe bias ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@given(seed=st.integers(0, 2**31), t_old=st.floats(0.01, 10), t_new=st.floats(0.01, 10))
@settings(max_examples=15, deadline=None)
def test_safe_bias_momentum_is_carried_with_its_gain(nesterov: bool, seed: int, t_old: float, t_new: float) -> None:
    """The optimizer sees t²·g; after the rescaling t_new²·g/f (design, section 2)."""
    generator = torch.Generator().manual_seed(seed)
    f = _factor((5,), 1, generator)
    old, new = (torch.zeros(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    carried, gathered = (torch.optim.SGD([p], lr=0.0, momentum=0.9, nesterov=nesterov) for p in (old, new))
    for _ in range(3):
        g = torch.randn(5, generator=generator, dtype=torch.float64)
        _step(carried, [old], None, [t_old**2 * g])
        _step(gathered, [new], None, [t_new**2 * g / f])
    carry_state_(carried, old, f, gradient_gain=torch.tensor((t_new / t_old) ** 2, dtype=torch.float64))
    _assert_same_state(carried, gathered)


def test_the_gain_concerns_gradients_not_weights() -> None:
    p = torch.ones(2, requires_grad=True)
    adam, asgd = torch.optim.Adam([p]), torch.optim.ASGD([p], lr=0.0)
    for optimizer in (adam, asgd):
        _step(optimizer, [p], [torch.ones(2)], [torch.ones(2)])
        before = copy.deepcopy(optimizer.state[p])
        carry_state_(optimizer, p, torch.tensor([2.0, 4.0]), gradient_gain=torch.tensor(8.0))
        state = optimizer.state[p]
        if optimizer is adam:
            torch.testing.assert_close(state["exp_avg"], before["exp_avg"] * torch.tensor([4.0, 2.0]))
            torch.testing.assert_close(state["exp_avg_sq"], before["exp_avg_sq"] * torch.tensor([16.0, 4.0]))
        else:
            torch.testing.assert_close(state["ax"], before["ax"] * torch.tensor([2.0, 4.0]))


# Refusals ---------------------------------------------------------------------------------------------------


class Unknown(Optimizer):
    """State under a key nobody has told us about, after a rule-bearing one."""

    keys: tuple[str, ...] = ("momentum_buffer", "curvature")

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                for key in self.keys:
                    self.state[p].setdefault(key, torch.zeros_like(p)).add_(p.grad)


def _stepped(make: Callable[[list[Tensor]], Optimizer], shape: tuple[int, ...] = (2, 3)) -> tuple[Optimizer, Tensor]:
    p = torch.ones(shape, requires_grad=True)
    optimizer = make([p])
    _step(optimizer, [p], None, [torch.full(shape, 0.5)])
    return optimizer, p


def _assert_refused_untouched(optimizer: Optimizer, p: Tensor, error: type[Exception], *parts: str) -> None:
    before = copy.deepcopy(optimizer.state[p])
    for call in (
        lambda: check_optimizer(optimizer, [p]),
        lambda: carry_state_(optimizer, p, torch.full((1,), 2.0)),
    ):
        with pytest.raises(error) as raised:
            call()
        for part in parts:
            assert part in str(raised.value)
    for key, value in before.items():
        assert value is None or torch.equal(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value)), key


def test_unknown_optimizer_is_refused_by_name() -> None:
    optimizer, p = _stepped(Unknown)
    _assert_refused_untouched(optimizer, p, TypeError, "Unknown", "equinorm.register_state_rule")


def test_unknown_state_is_refused_by_key_before_the_known_one_moves() -> None:
    register_state_rule(Unknown, {"momentum_buffer": -1})
    optimizer, p = _stepped(Unknown)
    _assert_refused_untouched(optimizer, p, ValueError, "Unknown", "'curvature'", "equinorm.register_state_rule")


@pytest.mark.parametrize("value", [None, 3, "text", torch.tensor(1.0)], ids=str)
def test_unknown_state_is_refused_whatever_it_holds(value: Any) -> None:
    optimizer, p = _stepped(lambda params: torch.optim.SGD(params, momentum=0.9))
    optimizer.state[p]["mystery"] = value
    with pytest.raises(ValueError, match="mystery"):
        check_optimizer(optimizer, [p])


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.ones(3)], ids=["number", "0-dim", "row"])
def test_state_that_does_not_fit_its_power_is_refused(value: Any) -> None:
    optimizer, p = _stepped(lambda params: torch.optim.SGD(params, momentum=0.9))
    optimizer.state[p]["momentum_buffer"] = value
    with pytest.raises(ValueError, match="momentum_buffer"):
        check_optimizer(optimizer, [p])


def test_half_a_factored_moment_is_refused() -> None:
    optimizer, p = _stepped(torch.optim.Adafactor)
    optimizer.state[p]["col_var"] = None
    _assert_refused_untouched(optimizer, p, ValueError, "row_var", "col_var")


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_without_coordinates_are_refused(name: str) -> None:
    optimizer = getattr(torch.optim, name)([torch.ones(2, requires_grad=True)])
    with pytest.raises(TypeError, match=name):
        check_optimizer(optimizer, [])
    with pytest.raises(TypeError, match=name):
        step_is_linear(optimizer)


def test_a_wrapper_is_not_taken_for_an_optimizer() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
        check_optimizer(object(), [])  # type: ignore[arg-type]


def test_looking_creates_no_state() -> None:
    p = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.Adam([p])
    check_optimizer(optimizer, [p])
    carry_state_(optimizer, p, torch.full((2,), 3.0))
    assert len(optimizer.state) == 0


def test_state_that_is_none_is_let_be() -> None:
    optimizer, p = _stepped(lambda params: torch.optim.SGD(params, momentum=0.9))
    optimizer.state[p]["momentum_buffer"] = None
    check_optimizer(optimizer, [p])
    carry_state_(optimizer, p, torch.full((1,), 3.0))
    assert optimizer.state[p]["momentum_buffer"] is None


# The registry -----------------------------------------------------------------------------------------------


def test_registering_makes_an_optimizer_known() -> None:
    optimizer, p = _stepped(Unknown)
    register_state_rule(Unknown, {"momentum_buffer": -1, "curvature": -2}, linear=True)
    check_optimizer(optimizer, [p])
    carry_state_(optimizer, p, torch.tensor(2.0))
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], torch.full((2, 3), 0.25))
    torch.testing.assert_close(optimizer.state[p]["curvature"], torch.full((2, 3), 0.125))
    assert step_is_linear(optimizer)


def test_a_function_carries_keys_that_go_together() -> None:
    def swap_(state: dict[str, Any], w: Tensor, g: Tensor) -> None:
        state["momentum_buffer"], state["curvature"] = state["curvature"] * w, state["momentum_buffer"] * g

    register_state_rule(Unknown, {("momentum_buffer", "curvature"): swap_})
    optimizer, p = _stepped(Unknown)
    carry_state_(optimizer, p, torch.tensor(4.0))
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], torch.full((2, 3), 2.0))
    torch.testing.assert_close(optimizer.state[p]["curvature"], torch.full((2, 3), 0.125))


def test_subclasses_inherit_and_their_own_rule_wins() -> None:
    class Mine(torch.optim.SGD):
        pass

    class Yours(Mine):
        pass

    assert state_rule(Yours) is state_rule(torch.optim.SGD)
    register_state_rule(Mine, {"momentum_buffer": 0})
    assert state_rule(Yours) is state_rule(Mine) is not state_rule(torch.optim.SGD)
    assert not step_is_linear(Yours)


@pytest.mark.parametrize(
    ("optimizer_class", "rules", "error"),
    [
        (Optimizer, {"x": -1}, TypeError),
        (int, {"x": -1}, TypeError),
        (Unknown, {"x": "-1"}, TypeError),
        (Unknown, {("x", "y"): -1}, TypeError),
        (Unknown, {"x": -1, ("x", "y"): lambda state, w, g: None}, ValueError),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(optimizer_class: Any, rules: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        register_state_rule(optimizer_class, rules)
    assert Unknown not in optimizers._RULES


@pytest.mark.parametrize("case", RICHEST.values(), ids=str)
def test_what_is_called_linear_is_linear(case: Case) -> None:
    """A gradient twice as large from the first step on makes steps twice as large, or it does not."""
    moved = []
    for scale in (1.0, 2.0):
        params = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in case.shapes]
        # Rprop knows no weight decay
        options = {} if case.name == "Rprop" else {"weight_decay": 0.0}
        optimizer = case.build(params, lr=case.lr, **options)
        generator = torch.Generator().manual_seed(0)
        if case.name == "ASGD":
            optimizer.param_groups[0]["lambd"] = 0.0
        for t in range(9):  # RAdam starts with six steps of plain momentum
            grads = [scale * _gradient(shape, case.rank_one, t, generator) for shape in case.shapes]
            _step(optimizer, params, None, grads)
        moved.append(torch.cat([(p.detach() - 1.0).flatten() for p in params]))
    assert step_is_linear(case.optimizer_class) == torch.allclose(2 * moved[0], moved[1], rtol=1e-6)


DECAYED = [
    Case("SGD", {"momentum": 0.9}),
    Case("RMSprop"),
    Case("AdamW"),
    Case("Lion"),
    *(Case(name, {"decoupled_weight_decay": flag}) for name in ("NAdam", "RAdam") for flag in (False, True)),
    *(Case(name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)),
]


@pytest.mark.parametrize("case", DECAYED, ids=str)
def test_decoupled_decay_is_what_the_step_takes_from_the_weight(case: Case) -> None:
    """With and without weight decay, a decoupled step differs by d·w, a coupled one by something else."""
    after = []
    w = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for weight_decay in (0.0, 0.3):
        p = w.clone().requires_grad_()
        optimizer = case.build([p], lr=0.05, weight_decay=weight_decay)
        for t in range(9):  # RAdam starts with six steps of plain momentum
            _step(optimizer, [p], [w], [(w + t).cos()])
        after.append(p.detach())
        d = decoupled_decay(optimizer, optimizer.param_groups[0])
    decoupled = torch.allclose(after[1] - after[0], -0.05 * 0.3 * w, rtol=1e-9)
    assert d == pytest.approx(0.05 * 0.3 if decoupled else 0.0)


def test_decoupled_decay_of_a_tensor_lr_is_a_tensor() -> None:
    p = torch.ones(2, requires_grad=True)
    lr = torch.tensor(0.1, device="meta")  # reading a meta tensor raises, as reading a captured one would
    group = {**torch.optim.AdamW([p], weight_decay=0.5).param_groups[0], "lr": lr}
    decay = decoupled_decay(torch.optim.AdamW([p]), group)
    assert isinstance(decay, Tensor)
    assert decay.device.type == "meta"


# Tensors as they come ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RICHEST.values(), ids=str)
def test_nothing_is_read_on_the_host(case: Case) -> None:
    """On the meta device there is nothing to read: any .item(), bool() or nonzero would raise."""
    params = [torch.zeros(shape, requires_grad=True) for shape in case.shapes]
    optimizer = case.build(params)
    _step(optimizer, params, None, [torch.ones(shape) for shape in case.shapes])
    for p, shape in zip(params, case.shapes, strict=True):
        state = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()}
        q = torch.empty(shape, device="meta")
        optimizer.state[q] = state
        gain = torch.empty((), device="meta")
        carry_state_(optimizer, q, torch.empty(shape, device="meta"), gradient_gain=gain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor_dtype", [torch.float16, torch.float32, torch.float64])
def test_state_keeps_dtype_layout_and_identity(dtype: torch.dtype, factor_dtype: torch.dtype) -> None:
    p = torch.ones(4, 3, 5, 5, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    optimizer = torch.optim.Adam([p], amsgrad=True, foreach=False)
    _step(optimizer, [p], None, [torch.ones_like(p)])
    state = optimizer.state[p]
    before = {key: (value, value.clone(), value.stride()) for key, value in state.items()}
    f = torch.full((4, 1, 1, 1), 2.0**-4, dtype=factor_dtype)
    carry_state_(optimizer, p, f)
    for key, power in {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "step": 0}.items():
        same, value, stride = before[key]
        assert state[key] is same
        assert state[key].dtype == value.dtype
        assert state[key].stride() == stride
        torch.testing.assert_close(state[key], value * 16.0**power)


def test_squares_of_a_half_precision_factor_do_not_overflow() -> None:
    p = torch.ones(2, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.Adagrad([p])
    optimizer.state[p]["sum"] = torch.full((2,), 2.0**-10, dtype=torch.float16)
    carry_state_(optimizer, p, torch.full((2,), 2.0**-9, dtype=torch.float16))  # 1/f² = 2**18 > 65504
    torch.testing.assert_close(optimizer.state[p]["sum"], torch.full((2,), 2.0**8, dtype=torch.float16))


def test_a_single_precision_factor_costs_a_double_state_nothing() -> None:
    p = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([p], momentum=0.9)
    _step(optimizer, [p], None, [torch.ones(2, dtype=torch.float64)])
    f = torch.full((2,), 3.0)
    carry_state_(optimizer, p, f)
    torch.testing.assert_close(
        optimizer.state[p]["momentum_buffer"] * f.double(), torch.ones_like(p), rtol=1e-15, atol=0
    )


def test_complex_parameters_are_carried() -> None:
    p = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    optimizer = torch.optim.Adam([p])
    _step(optimizer, [p], None, [torch.tensor([1 + 2j, 3 - 1j])])
    before = copy.deepcopy(optimizer.state[p])
    carry_state_(optimizer, p, torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], before["exp_avg"] / torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], before["exp_avg_sq"] / torch.tensor([4.0, 16.0]))


def test_adafactor_without_gradients_yet_stays_zero() -> None:
    p = torch.ones(2, 3, requires_grad=True)
    optimizer = torch.optim.Adafactor([p])
    _step(optimizer, [p], None, [torch.zeros(2, 3)])
    carry_state_(optimizer, p, torch.full((2, 1), 3.0))
    assert torch.equal(optimizer.state[p]["row_var"], torch.zeros(2, 1))


@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_adafactor_holds_the_means_of_the_rescaled_reconstruction(seed: int) -> None:
    """For squares of any rank: what Adafactor reads after the carry has the row and column means of V·g²."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adafactor([p])
    _step(optimizer, [p], None, [torch.randn(3, 4, generator=generator, dtype=torch.float64)])
    state = optimizer.state[p]
    f = _factor((3, 4), 3, generator)
    V = state["row_var"] * state["col_var"] / state["col_var"].mean() / f.square()
    carry_state_(optimizer, p, f)
    torch.testing.assert_close(state["row_var"], V.mean(1, keepdim=True))
    torch.testing.assert_close(state["col_var"], V.mean(0, keepdim=True))


@pytest.mark.parametrize("case", RICHEST.values(), ids=str)
def test_state_dict_round_trip_after_a_carry(case: Case) -> None:
    def fresh() -> tuple[list[Tensor], Optimizer]:
        params = [torch.ones(shape, requires_grad=True) for shape in case.shapes]
        return params, case.build(params, lr=0.01)

    params, optimizer = fresh()
    _step(optimizer, params, None, [torch.ones(shape) for shape in case.shapes])
    for p in params:
        carry_state_(optimizer, p, torch.full((1,), 2.0))
    restored_params, restored = fresh()
    for p, q in zip(params, restored_params, strict=True):
        q.data.copy_(p.data)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    check_optimizer(restored, restored_params)
    for ps, o in ((params, optimizer), (restored_params, restored)):
        _step(o, ps, None, [torch.full(shape, 0.5) for shape in case.shapes])
    for p, q in zip(params, restored_params, strict=True):
        assert torch.equal(p, q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", RICHEST.values(), ids=str)
def test_carrying_can_be_captured_in_a_cuda_graph(case: Case) -> None:
    options = {k: v for k, v in case.options.items() if k not in ("foreach", "fused")}
    optimizer_class = case.optimizer_class
    params = [torch.ones(shape, device="cuda", requires_grad=True) for shape in case.shapes]
    optimizer = optimizer_class(params, lr=0.01, **options)
    _step(optimizer, params, None, [torch.rand(shape, device="cuda") for shape in case.shapes])
    factors = [torch.rand(shape, device="cuda") + 0.5 for shape in case.shapes]
    expected = copy.deepcopy(optimizer)
    for p, f in zip(expected.param_groups[0]["params"], factors, strict=True):
        carry_state_(expected, p, f)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for p, f in zip(params, factors, strict=True):
            carry_state_(optimizer, p, f)
    graph.replay()
    torch.cuda.synchronize()
    _assert_same_state(optimizer, expected)


# Path-SGD ---------------------------------------------------------------------------------------------------


def _mlp(*sizes: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def _kappa_by_enumeration(model: nn.Sequential) -> dict[str, Tensor]:
    """Walk every path, edge by edge: the definition, and nothing clever."""
    linears = [(name, m) for name, m in model.named_children() if isinstance(m, nn.Linear)]
    widths = [linears[0][1].in_features, *(m.out_features for _, m in linears)]
    kappa = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def walk(edges: list[tuple[str, tuple[int, ...], float]], depth: int, unit: int) -> None:
        if depth == len(linears):
            for k, (name, index, _) in enumerate(edges):
                product = 1.0
                for j, (_, _, weight) in enumerate(edges):
                    if j != k:
                        product *= weight**2
                kappa[name][index] += product
            return
        name, linear = linears[depth]
        for out in range(widths[depth + 1]):
            edge = (f"{name}.weight", (out, unit), linear.weight[out, unit].item())
            walk([*edges, edge], depth + 1, out)

    for unit in range(widths[0]):
        walk([], 0, unit)
    for depth, (name, linear) in enumerate(linears):
        for out in range(widths[depth + 1] if linear.bias is not None else 0):
            walk([(f"{name}.bias", (out,), linear.bias[out].item())], depth + 1, out)
    return kappa


@pytest.mark.parametrize("bias", [False, True])
@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_kappa_is_the_sum_over_paths(bias: bool, sizes: list[int], seed: int) -> None:
    model = _mlp(*sizes, bias=bias, seed=seed)
    kappa = path_kappa(model, torch.randn(7, sizes[0], dtype=torch.float64))
    expected = _kappa_by_enumeration(model)
    assert kappa.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(kappa[name], expected[name], msg=lambda m, name=name: f"{name}: {m}")


def test_one_step_by_hand() -> None:
    model = _mlp(3, 4, 2)
    kappa = _kappa_by_enumeration(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(5, 3, dtype=torch.float64)
    optimizer = PathSGD(model, x, lr=0.1, weight_decay=0.2)
    model(x).square().sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), 0.98 * before[name] - 0.1 * p.grad / kappa[name])


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 3, 3, stride=2)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(self.first(x).relu(), 2)
        return self.last(self.second(x).relu().mean((2, 3)))


def _rescale_(layers: list[nn.Module], seed: int) -> None:
    """A random scale on every hidden unit: rows and biases of its layer by s, columns of the next by 1/s."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for before, after in itertools.pairwise(layers):
            s = torch.exp2(4 * torch.rand(before.weight.shape[0], generator=generator, dtype=torch.float64) - 2)
            before.weight.mul_(s.view(-1, *[1] * (before.weight.ndim - 1)))
            before.bias.mul_(s)
            after.weight.div_(s.view(1, -1, *[1] * (after.weight.ndim - 2)))


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_path_sgd_commutes_with_rescaling(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    model: nn.Module = _mlp(3, 5, 4, 2, seed=seed) if kind == "mlp" else ConvNet().double()
    x = torch.randn(6, 3, dtype=torch.float64) if kind == "mlp" else torch.randn(6, 2, 8, 8, dtype=torch.float64)

    def layers(net: nn.Module) -> list[nn.Module]:
        return [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]

    twin = copy.deepcopy(model)
    _rescale_(layers(twin), seed)
    for net in (model, twin):
        optimizer = PathSGD(net, x, lr=0.01, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (net(x) - 1).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model(x), twin(x), rtol=1e-7, atol=1e-10)
    _rescale_(layers(model), seed)  # step, then rescale = rescale, then step
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-10)


def test_sgd_does_not_commute_with_rescaling() -> None:
    """What the property above can fail on."""
    model = _mlp(3, 5, 2)
    twin = copy.deepcopy(model)
    _rescale_([model[0], model[2]], 0)
    x = torch.randn(6, 3, dtype=torch.float64)
    for net in (model, twin):
        (net(x) - 1).square().mean().backward()
        torch.optim.SGD(net.parameters(), lr=0.01).step()
    assert not torch.allclose(model(x), twin(x), rtol=1e-5)


def test_a_weight_that_no_path_uses_stays() -> None:
    model = _mlp(3, 4, 2)
    with torch.no_grad():
        model[2].weight[:, 1] = 0.0  # unit 1 leads nowhere: κ of its incoming weights is 0
    before = model[0].weight.detach().clone()
    x = 9 * torch.cat([torch.eye(3), -torch.eye(3)]).double()  # every unit is open for some of these
    optimizer = PathSGD(model, x, lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight[1], before[1])
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(model[0].weight[0], before[0])


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(4),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.GELU(),
        nn.Softmax(-1),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_models_without_paths_are_refused(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 4), module, nn.Linear(4, 2))
    with pytest.raises(ValueError, match="'1'"):
        PathSGD(model, torch.randn(2, 3))


class Odd(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize("function", [lambda y: -y, lambda y: y / 0.0, lambda y: y * float("inf")])
def test_kappa_negative_or_not_finite_is_refused_by_name(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"layer\.weight"):
        PathSGD(Odd(function), torch.randn(2, 3))


def test_diverged_weights_are_refused_before_any_moves() -> None:
    model = _mlp(3, 4, 2)
    x = torch.randn(5, 3, dtype=torch.float64)
    optimizer = PathSGD(model, x, lr=0.1)
    model(x).sum().backward()
    with torch.no_grad():
        model[2].weight[0, 0] = float("inf")
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="have diverged"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_integer_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        path_kappa(nn.Embedding(3, 4), torch.zeros(2, dtype=torch.long))


def test_the_model_is_left_as_it_was() -> None:
    """Dropout is off for the run, modes come back one by one, weights and gradients are not touched."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.9), nn.Linear(4, 2))
    model[0].eval()
    modes = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    kappa = path_kappa(model, torch.randn(2, 3))
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    for name, value in path_kappa(model.eval(), torch.randn(2, 3)).items():
        assert torch.equal(kappa[name], value)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": self.a(x) + self.b(y), "first": self.a(x)}


def test_inputs_may_be_a_tuple_or_a_dict() -> None:
    x, y = torch.randn(5, 2), torch.randn(5, 4)
    model = TwoInputs()
    for inputs in ((x, y), {"x": x, "y": y}):
        kappa = path_kappa(model, inputs)
        assert torch.equal(kappa["a.weight"], torch.full((3, 2), 2.0))
        assert torch.equal(kappa["b.weight"], torch.ones(3, 4))


def test_path_sgd_is_a_torch_optimizer() -> None:
    model = _mlp(3, 4, 2)
    model[0].bias.requires_grad_(False)
    x = torch.randn(5, 3, dtype=torch.float64)
    optimizer = PathSGD(model, x, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first, frozen = closure().item(), model[0].bias.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(first)
    assert closure().item() < first
    assert torch.equal(model[0].bias, frozen)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    restored = PathSGD(model, x)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.param_groups[0]["lr"] == pytest.approx(0.05)
    assert step_is_linear(restored)
    check_optimizer(restored, model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_path_sgd_in_half_precision_sums_paths_in_single(dtype: torch.dtype) -> None:
    model = _mlp(3, 4, 2).to(dtype)
    x = torch.randn(5, 3, dtype=dtype)
    optimizer = PathSGD(model, x, lr=0.01)
    assert path_kappa(model, x)["0.weight"].dtype == torch.float32
    model(x).sum().backward()
    optimizer.step()
    assert all(p.isfinite().all() and p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"weight_decay": -1.0}])
def test_path_sgd_refuses_negative_rates(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        PathSGD(_mlp(2, 2), torch.randn(1, 2, dtype=torch.float64), **options)
