"""Optimizers of other libraries with ENorm: trained, stopped, resumed; their state against state gathered anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.enorm.optimizer_state import carry_state_, check_optimizer, state_rule
from support.short_training import Short, assert_resumes, dense, with_enorm

# -- what is carried is what would have been gathered ------------------------------------------------------------------

SHAPES = ((24, 20), (18, 17, 3, 3), (20,))


def gathered(build: Any, factors: list[Tensor] | None, steps: int, size: float = 1e-6) -> tuple[Any, list[Tensor]]:
    """An optimizer after some steps with gradients of rank one, in coordinates multiplied by the factors.

    The learning rate is next to nothing, so that both stay at the same weights, and the gradients are too small to be
    clipped.
    """
    made = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=made, dtype=torch.float64)) for shape in SHAPES]
    directions = [size * rank_one(shape, made) for shape in SHAPES]
    if factors is not None:
        for p, f in zip(params, factors, strict=True):
            p.data.mul_(f)
    optimizer = build(params)
    for _ in range(steps):
        for i, p in enumerate(params):
            p.grad = directions[i] * (1 + torch.rand((), generator=made, dtype=torch.float64))
            if factors is not None:
                p.grad.div_(factors[i])
        optimizer.step()
    return optimizer, params


def rank_one(shape: tuple[int, ...], made: torch.Generator) -> Tensor:
    found = torch.ones(shape, dtype=torch.float64)
    for axis, n in enumerate(shape):
        along = 0.5 + torch.rand(n, generator=made, dtype=torch.float64)
        found = found * along.view([-1 if i == axis else 1 for i in range(len(shape))])
    return found


def some_factors() -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    found = []
    for shape in SHAPES:
        out = torch.exp(torch.randn(shape[0], generator=made, dtype=torch.float64)).view(-1, *(1,) * (len(shape) - 1))
        if len(shape) > 1:
            into = torch.exp(torch.randn(shape[1], generator=made, dtype=torch.float64))
            out = out / into.view(1, -1, *(1,) * (len(shape) - 2))
        found.append(out)
    return found


def assert_carried(build: Any, steps: int = 12, size: float = 1e-6, but: tuple[str, ...] = ()) -> None:
    factors = some_factors()
    carried, params = gathered(build, None, steps, size)
    anew, others = gathered(build, factors, steps, size)
    check_optimizer(carried, params)
    compared = 0
    for p, other, f in zip(params, others, factors, strict=True):
        carry_state_(carried, p, f)
        assert carried.state[p].keys() == anew.state[other].keys()
        for key, expected in anew.state[other].items():
            if isinstance(expected, Tensor) and key not in but:
                torch.testing.assert_close(carried.state[p][key], expected, rtol=1e-6, atol=1e-30, msg=key)
                compared += 1
    assert compared


# -- schedule-free -----------------------------------------------------------------------------------------------------


def schedulefree(name: str, **options: Any) -> Any:
    import schedulefree

    def build(parameters: Any) -> Any:
        optimizer = getattr(schedulefree, name)(parameters, **{"lr": 0.02, **options})
        optimizer.train()
        return optimizer

    return build


SCHEDULE_FREE = ["SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"]


@pytest.mark.parametrize("name", SCHEDULE_FREE)
@pytest.mark.shows("schedulefree", "ENorm with safe biases, resumed bitwise", "schedulefree")
def test_schedule_free_resumes(name: str, tmp_path: Path) -> None:
    assert_resumes(lambda: make(schedulefree(name)), tmp_path)


@pytest.mark.parametrize("name", SCHEDULE_FREE)
@pytest.mark.shows("schedulefree", "a cycle keeps what is computed in training and in evaluation", "schedulefree")
def test_both_modes_keep_their_function(name: str) -> None:
    model = dense().double()
    optimizer = schedulefree(name)(model.parameters())
    Short(model, optimizer, prepare=lambda x: x.double()).train()
    x, found = torch.randn(8, 6, dtype=torch.float64), {}
    for mode in ("train", "eval"):
        getattr(optimizer, mode)()
        found[mode] = model(x)
    assert not torch.allclose(found["train"], found["eval"], rtol=1e-3)
    example = torch.zeros(2, 6, dtype=torch.float64)
    for acting in ("eval", "train"):
        getattr(optimizer, acting)()
        before = model[0].weight.clone()
        equinorm.ENorm(model, optimizer, example, c=1.5, cycles=3).step()
        assert not torch.allclose(model[0].weight, before, rtol=1e-3)
        for mode in ("eval", "train"):
            getattr(optimizer, mode)()
            torch.testing.assert_close(model(x), found[mode], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.shows("schedulefree", "safe biases: z takes t of its step, x and y follow", "schedulefree")
def test_safe_biases_of_schedule_free(decay: float) -> None:
    """Against the equations: z ← z - lr(t·g/√v + d·y), x ← (1 - c)x + c·z, y = (1 - β)z + βx."""
    lr, beta, (b1, b2) = 0.1, 0.9, (0.9, 0.99)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    optimizer = schedulefree("AdamWScheduleFree", lr=lr, betas=(b1, b2), weight_decay=decay, eps=0.0)(
        model.parameters()
    )
    enorm = equinorm.ENorm(model, optimizer, torch.zeros(1, 3, dtype=torch.float64), c=1.2)
    enorm.load_state_dict({**enorm.state_dict(), "log_t": torch.linspace(-3, 0, len(enorm.log_t))})
    bias, t = model[2].bias, enorm.biases.gains.t_of["2.bias"]
    assert float(t) < 0.5
    z = x = y = bias.detach().clone()
    squares, made = torch.zeros_like(y), torch.Generator().manual_seed(0)
    for k in range(1, 6):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=made, dtype=torch.float64)
        g = bias.grad.clone()
        squares = b2 * squares + (1 - b2) * g**2
        z = z - lr * (t * g / (squares / (1 - b2**k)).sqrt() + decay * y)
        x = (1 - 1 / k) * x + z / k
        y = (1 - beta) * z + beta * x
        enorm.before_step()
        optimizer.step()
        enorm.biases.after_step()
        torch.testing.assert_close(bias.detach(), y)
        torch.testing.assert_close(optimizer.state[bias]["z"], z)
    optimizer.eval()
    torch.testing.assert_close(bias.detach(), x)


@pytest.mark.parametrize("name", ["SGDScheduleFree", "AdamWScheduleFree"])
@pytest.mark.shows("schedulefree", "twelve layers, c = 1.2: the loss ends below 0.1 in both modes", "schedulefree")
def test_a_deep_net_ends_well_in_both_modes(name: str) -> None:
    """Guards against steps of safe biases that are shortened in y only: z then runs away, and x with it."""
    torch.manual_seed(0)
    layers = [m for width in [6, *[16] * 10] for m in (nn.Linear(width, 16), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    for layer in model[::2]:
        nn.init.kaiming_normal_(layer.weight)
    x = torch.randn(128, 6)
    y = x[:, :3].argmax(1)
    optimizer = schedulefree(name, lr=0.1 if name[0] == "S" else 0.003)(model.parameters())
    equinorm.ENorm(model, optimizer, x[:2], c=1.2).attach()
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for mode in ("train", "eval"):
        getattr(optimizer, mode)()
        assert float(nn.functional.cross_entropy(model(x), y)) < 0.1, mode


# -- Lion, Adafactor, 8 bits -------------------------------------------------------------------------------------------


def make(build: Any, **options: Any) -> Short:
    model = dense(options.pop("width", 12))
    return with_enorm(model, build(model.parameters()), **options)


def lion(parameters: Any, lr: float = 3e-3, **options: Any) -> Any:
    from lion_pytorch import Lion

    return Lion(parameters, lr=lr, **{"weight_decay": 0.01, **options})


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.shows("lion-pytorch", "ENorm, resumed bitwise; state carried as if gathered anew", "lion-pytorch")
def test_lion(decoupled: bool, tmp_path: Path) -> None:
    assert_resumes(lambda: make(lambda p: lion(p, decoupled_weight_decay=decoupled)), tmp_path)
    assert_carried(lambda p: lion(p, lr=1e-20))
    p = nn.Parameter(torch.ones(3))
    optimizer = lion([p], lr=0.1, weight_decay=0.5, decoupled_weight_decay=decoupled)
    p.grad = torch.zeros(3)
    optimizer.step()
    from equinorm.enorm.optimizer_state import decoupled_decay

    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - decoupled_decay(optimizer, optimizer.param_groups[0])))


def adafactor(parameters: Any, lr: float = 1e-2, **options: Any) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=lr, relative_step=False, scale_parameter=False, **options)


@pytest.mark.parametrize("options", [{}, {"beta1": 0.9}, {"weight_decay": 0.1}])
@pytest.mark.shows(
    "transformers", "its Adafactor with ENorm, resumed bitwise; state as if gathered anew", "transformers"
)
def test_adafactor(options: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(lambda: make(lambda p: adafactor(p, **options)), tmp_path)
    assert_carried(lambda p: adafactor(p, lr=1e-20), but=("RMS",))


def test_adafactor_without_a_learning_rate(tmp_path: Path) -> None:
    from transformers.optimization import Adafactor

    assert_resumes(lambda: make(Adafactor), tmp_path)


EIGHT_BITS = ["Adam8bit", "AdamW8bit", "Lion8bit", "RMSprop8bit", "Adagrad8bit", "SGD8bit", "AdEMAMix8bit", "LAMB8bit"]


def bitsandbytes(name: str, lr: float = 1e-2, **options: Any) -> Any:
    import bitsandbytes

    kind = getattr(bitsandbytes.optim, name)
    given = {"momentum": 0.9} if name.startswith("SGD") else {}

    return lambda parameters: kind(parameters, lr=lr, min_8bit_size=16, **given, **options)


@pytest.mark.parametrize("name", [*EIGHT_BITS, "Adam", "AdEMAMix", "RMSprop"])
@pytest.mark.shows(
    "bitsandbytes", "ENorm with its 8-bit and 32-bit optimizers on the CPU, resumed bitwise", "bitsandbytes"
)
def test_bitsandbytes_resumes(name: str, tmp_path: Path) -> None:
    whole = assert_resumes(lambda: make(bitsandbytes(name), width=20), tmp_path)
    codes = [state["state1"].dtype for state in whole.optimizer.state.values()]
    assert (torch.uint8 in codes) == name.endswith("8bit")


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.shows(
    "bitsandbytes", "8-bit state read, multiplied and written: within the error of 8 bits", "bitsandbytes"
)
def test_eight_bits_are_carried(name: str) -> None:
    from bitsandbytes.functional import dequantize_blockwise

    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(30, 41))  # blocks that end in the middle
    f = torch.exp(torch.randn(30, 1))
    optimizer = bitsandbytes(name)([p])
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
    state = optimizer.state[p]

    def read(number: int) -> Tensor:
        codes, sizes = state[f"state{number}"], state[f"absmax{number}"]
        parts = [
            dequantize_blockwise(part.contiguous(), absmax=size, code=state[f"qmap{number}"], blocksize=256)
            for part, size in zip(codes.view(-1, *p.shape), sizes.view(codes.numel() // p.numel(), -1), strict=True)
        ]
        return torch.stack(parts)

    squares = name.startswith(("RMSprop", "Adagrad"))
    powers = {1: 2 if squares else 1, **({2: 2} if "state2" in state else {})}
    before = {number: read(number) for number in powers}
    check_optimizer(optimizer, [p])
    carry_state_(optimizer, p, f)
    for number, power in powers.items():
        expected = before[number] / f**power
        largest = expected.flatten(1).abs().amax()
        assert float((read(number) - expected).abs().max() / largest) < 0.02
    codes = {number: state[f"state{number}"].clone() for number in powers}
    carry_state_(optimizer, p, torch.full((1, 1), 3.0))
    for number, kept in codes.items():
        assert state[f"state{number}"].equal(kept)  # a factor for all changes sizes only


# -- several optimizers ------------------------------------------------------------------------------------------------


class Both:
    """Two optimizers that are stepped one after the other."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def state_dict(self) -> Any:
        return [each.state_dict() for each in self.optimizers]

    def load_state_dict(self, states: Any) -> None:
        for each, state in zip(self.optimizers, states, strict=True):
            each.load_state_dict(state)


@pytest.mark.parametrize("muon_first", [True, False])
@pytest.mark.shows("torch.optim", "Muon for matrices and AdamW for the rest, one ENorm, resumed bitwise")
def test_muon_and_adamw(muon_first: bool, tmp_path: Path) -> None:
    def made() -> Short:
        model = dense()
        muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
        adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-2)
        both = Both(muon, adamw) if muon_first else Both(adamw, muon)
        enorm = equinorm.ENorm(model, [muon, adamw], torch.zeros(2, 6), c=1.2)
        enorm.attach()
        return Short(model, both, [enorm])

    assert assert_resumes(made, tmp_path).methods[0].calls == 6


# -- timm --------------------------------------------------------------------------------------------------------------

NEEDS_A_GPU = ("bnb", "fused")  # bitsandbytes' and Apex'
WHOLE_LAYERS = {"lars", "larc", "nlars", "nlarc", "novograd"}
MATRICES = {"kron", "kronc", "kronw"}


def timm_names(on_a_gpu: bool = False) -> list[str]:
    from timm.optim import list_optimizers

    return [name for name in list_optimizers() if name.startswith(NEEDS_A_GPU) == on_a_gpu]


def timm(name: str, **options: Any) -> Any:
    from timm.optim import create_optimizer_v2

    given = {"lr": 1e-2, **options}
    return lambda parameters: create_optimizer_v2(parameters, opt=name, **given)


class Generator:
    """Where AdaHessian has its random vectors from, which its own state leaves out."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["state"])


@pytest.mark.parametrize("name", [n for n in timm_names() if n not in WHOLE_LAYERS | MATRICES])
@pytest.mark.shows("timm", "its element-wise and factored optimizers with ENorm, resumed bitwise", "timm")
def test_timm(name: str, tmp_path: Path) -> None:
    def made() -> Short:
        short = make(timm(name, weight_decay=0.01), width=20, create_graph=name == "adahessian")
        if name == "adahessian":
            short.methods.append(Generator(short.optimizer.generator))
        return short

    assert_resumes(made, tmp_path)


@pytest.mark.parametrize("name", timm_names(on_a_gpu=True))
@pytest.mark.shows("timm", "bitsandbytes' and Apex' optimizers by its names, which it makes with CUDA only", "timm")
def test_timm_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name.startswith("fused"):
        pytest.importorskip("apex")
    model, x = dense(64).cuda(), torch.randn(8, 6, device="cuda")
    optimizer = timm(name)(model.parameters())
    enorm = equinorm.ENorm(model, optimizer, x, c=1.2)
    with enorm.attach():
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert enorm.calls == 3


@pytest.mark.parametrize("name", [n for n in timm_names() if n not in {*WHOLE_LAYERS, *MATRICES, "adahessian"}])
@pytest.mark.shows("timm", "state of its optimizers carried as if gathered anew", "timm")
def test_timm_state_is_carried(name: str) -> None:
    probe = timm(name)([nn.Parameter(torch.ones(2))])
    options = {"eps": 1e-30} if isinstance(probe.defaults.get("eps"), float) and "madgrad" not in name else {}
    left = {"RMS", "x0"} | ({"exp_avg_sq"} if "adamuon" in name else set())
    if not state_rule(probe).powers.keys() - left and not state_rule(probe).together:
        pytest.skip("keeps no state")
    if name in ("sgd", "momentum", "nesterov"):
        options["momentum"] = 0.9
    # the squares of rmsproptf begin at 1, which must be forgotten first
    steps, size = (500, 1.0) if "rmsproptf" in name else (12, 1e-6)
    assert_carried(timm(name, **{"lr": 1e-20, **options}), steps, size, tuple(left))


def test_madgrad_stays_where_it_is() -> None:
    """A step without a gradient leads where it would have led: z·f, though x₀ and the sums do not follow alike."""
    from timm.optim.madgrad import MADGRAD

    for momentum in (0.0, 0.9):
        f, ends = torch.tensor([[3.0], [0.2]], dtype=torch.float64), []
        for moved in (False, True):
            torch.manual_seed(0)
            p = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
            optimizer = MADGRAD([p], lr=0.1, momentum=momentum)
            for _ in range(4):
                p.grad = torch.randn_like(p)
                optimizer.step()
            if moved:
                p.data.mul_(f)
                carry_state_(optimizer, p, f)
            p.grad = torch.zeros_like(p)
            optimizer.step()
            ends.append(p.detach() / f if moved else p.detach())
        torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.parametrize("name", sorted(WHOLE_LAYERS | MATRICES))
@pytest.mark.shows("timm", "Kron, LARS and NovoGrad are refused, with the reason", "timm")
def test_what_is_refused(name: str) -> None:
    reason = "mixed: the matrices of the rescaled weights cannot be had" if name in MATRICES else "for a whole layer"
    model = dense()
    optimizer = timm(name)(model.parameters())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=reason):
        equinorm.ENorm(model, optimizer, torch.zeros(2, 6))
    assert all(p.equal(q) for p, q in zip(model.parameters(), before, strict=True))


# -- compiled steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [1.0, 1.2])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.shows("torch.compile", "a compiled optimizer.step() with an attached ENorm: as eager, resumed bitwise")
def test_a_compiled_step(kind: str, c: float, tmp_path: Path) -> None:
    def made(compiled: bool = True) -> Short:
        torch._dynamo.reset()
        model = dense()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=torch.tensor(1e-2))
        short = with_enorm(model, optimizer, c=c)
        if compiled:
            short.step = torch.compile(optimizer.step)
        return short

    whole, eager = assert_resumes(made, tmp_path), made(compiled=False)
    eager.train()
    assert whole.methods[0].calls == eager.methods[0].calls == 6
    for name, expected in eager.model.state_dict().items():
        torch.testing.assert_close(whole.model.state_dict()[name], expected, rtol=1e-4, atol=1e-5)
