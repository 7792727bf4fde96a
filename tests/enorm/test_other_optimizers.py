"""Rules for optimizers of other libraries, with stand-ins of the same names; tests/integrations has the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import equinorm
from equinorm.enorm.optimizer_state import carry_state_, check_optimizer, decoupled_decay, state_rule
from equinorm.enorm.other_optimizers import KNOWN, REFUSED


def named(qualified: str, base: type = Optimizer, **content: Any) -> type:
    """A class that has this name and comes, as it says, from that module."""
    module, _, name = qualified.rpartition(".")
    return type(name, (base,), {"__module__": module, "__qualname__": name, **content})


def holding(qualified: str, p: nn.Parameter, state: dict[str, Any], **group: Any) -> Any:
    """An optimizer with that state and those entries in its group."""
    optimizer = named(qualified)([p], {"lr": 0.1, **group})
    optimizer.state[p].update(state)
    return optimizer


class ScheduleFree(Optimizer):
    """Schedule-free AdamW without warm-up, from its equations: z takes the steps, x is their average, y is trained."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        group = {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99), "k": 0, "r": 0.0}
        super().__init__(params, {**group, "weight_sum": 0.0, "weight_lr_power": 2.0, "lr_max": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta, b2 = group["betas"]
            group["k"] += 1
            group["weight_sum"] += group["lr_max"] ** 2
            for y in group["params"]:
                state = self.state[y]
                z = state.setdefault("z", y.clone())
                squares = state.setdefault("exp_avg_sq", torch.zeros_like(y)).lerp_(y.grad.square(), 1 - b2)
                x = (y - (1 - beta) * z) / beta
                step = y.grad / ((squares / (1 - b2 ** group["k"])).sqrt() + 1e-12) + group["weight_decay"] * y
                z.sub_(step, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                y.copy_((1 - beta) * z + beta * x)


AdamWScheduleFree = named("schedulefree.adamw_schedulefree.AdamWScheduleFree", ScheduleFree)


def net(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    ).double()


X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_safe_biases_of_schedule_free_shorten_the_step_of_z(decay: float) -> None:
    """As if z had made t of its step: x and y then are what they are of that z. Decay is not shortened."""
    model, lr, beta = net(), 0.1, 0.9
    optimizer = AdamWScheduleFree(model.parameters(), lr=lr, weight_decay=decay)
    enorm = equinorm.ENorm(model, optimizer, X, c=1.2)
    enorm.load_state_dict({**enorm.state_dict(), "log_t": torch.linspace(-3, 0, len(enorm.log_t))})
    bias, t = model[2].bias, enorm.biases.gains.t_of["2.bias"]
    assert float(t) < 0.5
    z = x = y = bias.detach().clone()
    squares, made = torch.zeros_like(y), torch.Generator().manual_seed(0)
    for k in range(1, 6):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=made, dtype=torch.float64)
        squares = 0.99 * squares + 0.01 * bias.grad**2
        z = z - lr * (t * bias.grad / (squares / (1 - 0.99**k)).sqrt() + decay * y)
        x = (1 - 1 / k) * x + z / k
        y = (1 - beta) * z + beta * x
        enorm.before_step()
        optimizer.step()
        enorm.biases.after_step()
        torch.testing.assert_close(bias.detach(), y)
        torch.testing.assert_close(optimizer.state[bias]["z"], z)


def test_schedule_free_keeps_both_functions() -> None:
    model = net()
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.05)
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()

    def average() -> nn.Module:
        twin = net()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.data = (p.detach() - 0.1 * optimizer.state[p]["z"]) / 0.9
        return twin

    trained, averaged, weight = model(X), average()(X), model[0].weight.clone()
    equinorm.ENorm(model, optimizer, X, c=1.5, bias="plain").step()
    assert not torch.allclose(model[0].weight, weight, rtol=1e-3)
    torch.testing.assert_close(model(X), trained)
    torch.testing.assert_close(average()(X), averaged)


# -- eight bits --------------------------------------------------------------------------------------------------------

BOOK = torch.cat([-torch.logspace(-4, 0, 127).flip(0) * 0.99, torch.zeros(1), torch.logspace(-4, 0, 128)])


def quantized(values: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % 256)).view(-1, 256)
    sizes = blocks.abs().amax(1) / book.abs().min().clamp_min(0.99)
    codes = (blocks[:, :, None] / sizes[:, None, None] - book).abs().argmin(-1)
    return codes.flatten()[: values.numel()].view(values.shape).to(torch.uint8), sizes


def read(codes: Tensor, sizes: Tensor, book: Tensor) -> Tensor:
    return book[codes.long()] * sizes.repeat_interleave(256)[: codes.numel()].view(codes.shape)


@pytest.mark.parametrize("kind", ["optimizer.Optimizer2State", "rmsprop.RMSprop8bit", "lion.Lion8bit"])
def test_state_in_eight_bits_is_read_multiplied_and_written(kind: str) -> None:
    torch.manual_seed(0)
    p, f = nn.Parameter(torch.randn(20, 41)), torch.exp(torch.randn(20, 1))
    unsigned = torch.cat([torch.zeros(1), torch.logspace(-6, 0, 255)])
    squares = kind.startswith("rmsprop")
    first = unsigned if squares else BOOK
    state: dict[str, Any] = {"step": 1, "qmap1": first, "qmap2": unsigned}
    state["state1"], state["absmax1"] = quantized(p.detach().square() if squares else p.detach(), first)
    powers = {1: 2 if squares else 1}
    if "2State" in kind:
        state["state2"], state["absmax2"] = quantized(p.detach().square(), unsigned)
        powers[2] = 2
    optimizer = holding(f"bitsandbytes.optim.{kind}", p, state)
    held = optimizer.state[p]
    before = {i: read(held[f"state{i}"], held[f"absmax{i}"], held[f"qmap{i}"]) for i in powers}
    check_optimizer(optimizer, [p])
    carry_state_(optimizer, p, f)
    for i, power in powers.items():
        expected, found = before[i] / f**power, read(held[f"state{i}"], held[f"absmax{i}"], held[f"qmap{i}"])
        assert held[f"state{i}"].dtype == torch.uint8
        within = 0.08 * expected.abs() + 2e-4 * expected.abs().amax()  # neighbours in the book are 7 % apart
        assert bool(((found - expected).abs() <= within).all())
    codes = held["state1"].clone()
    carry_state_(optimizer, p, torch.full((1, 1), 3.0))
    assert held["state1"].equal(codes)  # a factor for all changes sizes only


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_follow_is_refused_with_the_reason(name: str) -> None:
    model = net()
    optimizer = named(f"anyone.{name}", torch.optim.SGD)(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=f"^{name} cannot follow a rescaling of the weights: it .* Use "):
        equinorm.ENorm(model, optimizer, X)
    assert all(p.equal(q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_rule_of_ones_own_goes_before() -> None:
    own = named("anyone.SOAP", torch.optim.SGD)
    equinorm.register_state_rule(own, {"momentum_buffer": -1}, linear=True)
    assert state_rule(own).linear


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_rules_are_found_by_name_and_by_subclasses(name: str) -> None:
    kind = named(name)
    rule = state_rule(kind)
    assert rule.powers.keys() | {key for keys in rule.together for key in keys}
    assert state_rule(type("Mine", (kind,), {})) == rule
    with pytest.raises(TypeError, match="has no rule for how the state"):
        state_rule(named(f"elsewhere.{name.rpartition('.')[2]}x"))


def test_decay_as_these_libraries_have_it() -> None:
    p = nn.Parameter(torch.ones(2))
    lion = holding("lion_pytorch.lion_pytorch.Lion", p, {}, weight_decay=0.5)
    lion._init_lr, lion.decoupled_wd = 0.2, False
    assert decoupled_decay(lion, lion.param_groups[0]) == pytest.approx(0.05)
    lion.decoupled_wd = True
    assert decoupled_decay(lion, lion.param_groups[0]) == pytest.approx(0.25)
    adafactor = holding("transformers.optimization.Adafactor", p, {}, weight_decay=0.5)
    adafactor.param_groups[0]["lr"] = None  # it makes its own
    assert decoupled_decay(adafactor, adafactor.param_groups[0]) == 0.0
    timms = holding("timm.optim.adamw.AdamWLegacy", p, {}, weight_decay=0.5, corrected_weight_decay=True)
    timms.param_groups[0]["lr"] = 0.05
    assert decoupled_decay(timms, timms.param_groups[0]) == pytest.approx(0.05**2 / 0.1 * 0.5)
    belief = holding("timm.optim.adabelief.AdaBelief", p, {}, weight_decay=0.5, decoupled_decay=False)
    assert decoupled_decay(belief, belief.param_groups[0]) == 0.0


def test_dtypes_are_checked_before_anything_moves() -> None:
    """Guards against weights that have moved when the state of a later one cannot be multiplied."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, X, c=1.5, bias="plain")
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
    optimizer.state[model[4].weight]["momentum_buffer"] = torch.ones(2, 4, dtype=torch.int8)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"state 'momentum_buffer' of SGD has dtype torch.int8, which cannot"):
        enorm.step()
    assert all(p.equal(q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.state[model[0].weight]["momentum_buffer"].eq(1).all()


def test_an_error_lists_the_state_that_is_there() -> None:
    p = nn.Parameter(torch.ones(2))
    unknown = holding("anyone.Unknown", p, {"curvature": p.detach(), "trace": p.detach()})
    with pytest.raises(TypeError, match=r"state of Unknown follows.*It keeps 'curvature', 'trace'\. Tell it with"):
        check_optimizer(unknown, [p])
    adam = torch.optim.Adam([p])
    adam.state[p].update({"step": torch.ones(()), "odd": p.detach()})
    with pytest.raises(ValueError, match=r"Adam keeps a state 'odd' .* \(it keeps 'step', 'odd'\)"):
        check_optimizer(adam, [p])
