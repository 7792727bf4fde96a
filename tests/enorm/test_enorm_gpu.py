"""ENorm on a GPU: fused kernels equal to their plain twin, inside a captured step, the same on every run."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm.enorm.sgd import ENormSGD
from support.never_waiting import never_waiting

pytestmark = pytest.mark.gpu


def net(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in ((12, 32), (32, 32), (32, 32), (32, 5)):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def perturbed(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model out of balance, so that a step has something to do."""
    torch.manual_seed(0)
    with torch.no_grad():
        for q in model.parameters():
            q.mul_(torch.randn_like(q).exp())
    return model.to(dtype)


class Residual(nn.Module):
    """A stream with two kinds of residual branches, one with the stream on both sides; then a flattened image."""

    def __init__(self, width: int = 6, inner: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.a, self.b = nn.Conv2d(width, inner, 3, padding=1), nn.Conv2d(inner, width, 1, bias=False)
        self.c = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.b(F.relu(self.a(F.relu(x))))
        x = x + self.c(F.relu(x))
        return self.head(F.relu(x).flatten(1))


class Groups(nn.Module):
    """Grouped, depthwise and transposed convolutions, a norm's gain and a dense connection."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(8, 12, 3, padding=1, groups=4)
        self.c = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.d = nn.ConvTranspose2d(12, 6, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.e = nn.Conv2d(14, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.a(x))
        x = F.relu(self.norm(self.d(F.relu(self.c(F.relu(self.b(first)))))))
        return self.head(F.relu(self.e(torch.cat([first, x], 1))).mean((2, 3)))


def chain(*widths: int) -> nn.Sequential:
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def batches(n: int, device: str = "cuda") -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 12, generator=draw).to(device), torch.randint(5, (64,), generator=draw).to(device))
        for _ in range(n)
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained(model: nn.Module, optimizer_class: type[torch.optim.Optimizer], steps: int, **options: object) -> nn.Module:
    device = str(next(model.parameters()).device)
    optimizer = optimizer_class(model.parameters(), **options)
    equinorm.ENorm(model, optimizer, torch.zeros(2, 12, device=device), c=1.2).attach()
    for x, y in batches(steps, device):
        step(model, optimizer, x, y)
    return model


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_training_on_the_gpu_equals_training_on_the_cpu(optimizer_class: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 0.05, "momentum": 0.9} if optimizer_class is torch.optim.SGD else {"lr": 1e-3}
    cpu = net().double()
    gpu = copy.deepcopy(cpu).cuda()
    for model in (cpu, gpu):
        device = next(model.parameters()).device
        optimizer = optimizer_class(model.parameters(), **options)
        equinorm.ENorm(model, optimizer, torch.zeros(2, 12, device=device).double(), c=1.2).attach()
        for x, y in batches(5, str(device)):
            step(model, optimizer, x.double(), y)
    for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-8, atol=1e-10)


def test_a_run_is_the_same_every_time() -> None:
    """Copies of a model on several GPUs see the same gradients and must stay the same."""
    first, second = (trained(net().cuda(), torch.optim.SGD, 20, lr=0.05, momentum=0.9) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_step_equals_an_eager_one(fused: bool) -> None:
    data = batches(12)
    models = [net().cuda(), net().cuda()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=fused) for m in models]
    for m, o in zip(models, optimizers, strict=True):
        equinorm.ENorm(m, o, torch.zeros(2, 12, device="cuda"), c=1.2).attach()
    for x, y in data:
        step(models[0], optimizers[0], x, y)
    x, y = (t.clone() for t in data[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes x and y
    with torch.cuda.stream(side):
        step(models[1], optimizers[1], x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(models[1], optimizers[1], x, y)
    for new_x, new_y in data[1:]:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_balance_on_the_gpu() -> None:
    model, x = net().double().cuda(), torch.randn(4, 12, device="cuda").double()
    before = model(x)
    report = equinorm.balance_(model, x)
    assert report.converged
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["residual", "groups"])
def test_scales_that_cancel_are_balanced_on_the_gpu_as_on_the_cpu(name: str) -> None:
    make, shape = NETS[name]
    first = perturbed(make()).double()
    models = [first, copy.deepcopy(first).cuda()]
    for model in models:
        device = next(model.parameters()).device
        assert equinorm.balance_(model, torch.zeros(shape, device=device).double()).converged
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["residual", "groups"])
def test_a_plain_step_is_captured(name: str) -> None:
    make, shape = NETS[name]
    model = perturbed(make()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    enorm = equinorm.ENorm(model, optimizer, torch.zeros(shape, device="cuda"), backend="plain", c=1.2)
    enorm.step()
    twin = copy.deepcopy(enorm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.step()
    graph.replay()
    enorm.step()
    for a, b in zip(model.parameters(), twin.symmetry.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# -- fused kernels -----------------------------------------------------------------------------------------------------


OPTIMIZERS = {
    "momentum": lambda q: torch.optim.SGD(q, lr=0.01, momentum=0.9),
    "AMSGrad": lambda q: torch.optim.Adam(q, lr=0.01, amsgrad=True),
    "Adafactor": lambda q: torch.optim.Adafactor(q, lr=0.01),
}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}
NETS = {
    "chain": (lambda: chain(12, 500, 37, 300, 5), (2, 12)),
    "residual": (lambda: Residual(36, 40), (2, 3, 3, 3)),
    "groups": (Groups, (2, 3, 3, 3)),
}


def moved_by_one_step(
    model: nn.Module, shape: tuple[int, ...], backend: str, optimizer: str, early: bool | None = None, **options: object
) -> dict[str, Tensor]:
    """All that a step from a made-up point in training moves."""
    model = copy.deepcopy(model)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    example = torch.zeros(shape, device="cuda", dtype=next(model.parameters()).dtype)
    enorm = equinorm.ENorm(model, chosen, example, backend=backend, **options)
    assert enorm.backend == backend
    if backend == "triton" and early is not None:
        assert enorm.prepared.early == (torch.cuda.get_device_capability() >= (9, 0))
        enorm.prepared.early = early
    draw = torch.Generator("cuda").manual_seed(1)
    enorm.load_state_dict(
        {"log_t": 0.3 * torch.randn(len(enorm.log_t), generator=draw, device="cuda").double(), "calls": 0}
    )
    for scale in (0.01, 1.0):
        for q in model.parameters():
            q.grad = torch.empty_like(q).copy_(scale * torch.randn(q.shape, generator=draw, device="cuda"))
        if scale < 1:
            enorm.before_step()
            chosen.step()
            enorm.biases.after_step()
    enorm.step()
    moved = {"log_t": enorm.log_t, "t": enorm.biases.gains.t}
    for name, q in model.named_parameters():
        moved |= {name: q.detach(), f"{name}.grad": q.grad}
        moved |= {f"{name}.{k}": v for k, v in chosen.state[q].items() if isinstance(v, Tensor) and v.ndim}
    return moved


def assert_same(fused: dict[str, Tensor], plain: dict[str, Tensor], tolerance: float) -> None:
    for name, expected in plain.items():
        scale = max(float(expected.abs().max()), 1e-30)
        error = float((fused[name].double() - expected.double()).abs().max()) / scale
        assert error < tolerance, f"{name} is off by {error:.1e} of its largest value"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NETS)
def test_the_fused_step_equals_the_plain_one(name: str, dtype: torch.dtype, last: bool) -> None:
    make, shape = NETS[name]
    model = perturbed(make(), dtype).cuda()
    if last:
        model = model.to(memory_format=torch.channels_last)
    plain, fused = (moved_by_one_step(model, shape, b, "momentum", c=1.2) for b in ("plain", "triton"))
    assert_same(fused, plain, TOLERANCE[dtype])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("p", "cycles"), [(1.0, 1), (1.5, 2), (3.0, 1), (7.5, 1)])
def test_any_norm_and_any_state(p: float, cycles: int, optimizer: str) -> None:
    model = perturbed(Residual()).cuda()
    plain, fused = (
        moved_by_one_step(model, (2, 3, 3, 3), b, optimizer, p=p, cycles=cycles) for b in ("plain", "triton")
    )
    assert_same(fused, plain, 1e-5)


@pytest.mark.parametrize("name", NETS)
def test_launches_that_begin_early_change_nothing(name: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs programmatic dependent launch")
    make, shape = NETS[name]
    model = perturbed(make()).cuda()
    late, early = (moved_by_one_step(model, shape, "triton", "momentum", c=1.2, early=e) for e in (False, True))
    for key, expected in late.items():
        assert torch.equal(early[key], expected), key


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_allocates_nothing_and_does_not_wait() -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, torch.zeros(2, 12, device="cuda"), c=1.2)
    with enorm.attach():
        for x, y in batches(2):
            step(model, optimizer, x, y)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with never_waiting():
        for _ in range(3):
            enorm.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_gradients_made_inside_a_capture_are_found() -> None:
    """Whole-step capture as torch's documentation does it: gradients are None before, so they are the graph's own."""
    data = batches(8)
    models = [net().cuda(), net().cuda()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    for m, o in zip(models, optimizers, strict=True):
        equinorm.ENorm(m, o, torch.zeros(2, 12, device="cuda"), c=1.2).attach()
    for x, y in data:
        step(models[0], optimizers[0], x, y)
    x, y = (t.clone() for t in data[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes x and y
    with torch.cuda.stream(side):
        step(models[1], optimizers[1], x, y)
    torch.cuda.synchronize()
    optimizers[1].zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        F.cross_entropy(models[1](x), y).backward()
        optimizers[1].step()
    for new_x, new_y in data[1:]:
        x.copy_(new_x)
        y.copy_(new_y)
        for q in models[1].parameters():
            q.grad.zero_()
        graph.replay()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


# -- fused with SGD ----------------------------------------------------------------------------------------------------


def both_ways(
    model: nn.Module, shape: tuple[int, ...], steps: int = 3, **sgd: object
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and momentum after steps of SGD and ENorm, one after the other in float64, and fused."""
    example = torch.zeros(shape, device="cuda", dtype=next(model.parameters()).dtype)
    symmetry = equinorm.trace(model, example)
    models = copy.deepcopy(model).double(), model
    torchs = torch.optim.SGD(models[0].parameters(), **sgd)
    enorm = equinorm.ENorm(models[0], torchs, symmetry=symmetry, backend="plain", gradients=False, c=1.2)
    ours = ENormSGD(models[1], symmetry=symmetry, c=1.2, **sgd)
    draw = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        for q, twin in zip(*(m.parameters() for m in models), strict=True):
            gradient = torch.randn(q.shape, generator=draw, device="cuda").to(twin.dtype).mul_(0.1)
            q.grad, twin.grad = (torch.empty_like(x).copy_(gradient) for x in (q, twin))
        enorm.before_step()
        torchs.step()
        enorm.step()
        ours.step()
    assert ours.why_not == ""
    plain, fused = (
        {name: x for name, q in m.named_parameters() for x in (q.detach(),)}
        | {f"{name}.momentum": o.state[q]["momentum_buffer"] for name, q in m.named_parameters() if o.state[q]}
        for m, o in zip(models, (torchs, ours), strict=True)
    )
    return plain, fused


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NETS)
def test_both_steps_at_once_equal_one_after_the_other(name: str, dtype: torch.dtype, last: bool) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    model = make().to("cuda", dtype)
    if dtype == torch.float16:  # a scale that would take a weight out of its range is held, in float64 none is
        with torch.no_grad():
            for q in model.parameters():
                q.add_(0.05 * q.sign())
    if last:
        model = model.to(memory_format=torch.channels_last)
    plain, fused = both_ways(model, shape, lr=0.01, momentum=0.9, weight_decay=0.01)
    assert_same(fused, plain, 6 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    "sgd", [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.2}, {"maximize": True}]
)
def test_any_sgd(sgd: dict[str, object]) -> None:
    plain, fused = both_ways(Residual().cuda(), (2, 3, 3, 3), lr=0.01, weight_decay=0.1, **sgd)
    assert_same(fused, plain, 1e-5)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_captured_step_of_both_equals_an_eager_one(fresh: bool) -> None:
    """With a learning rate that changes between replays; gradients are kept, or made inside of the capture."""
    data = batches(12)
    models = [net().cuda(), net().cuda()]
    rates = [torch.tensor(0.05, device="cuda") for _ in models]
    optimizers = [
        ENormSGD(m, torch.zeros(2, 12, device="cuda"), lr=lr, momentum=0.9, c=1.2)
        for m, lr in zip(models, rates, strict=True)
    ]
    for i, (x, y) in enumerate(data):
        rates[0].fill_(0.05 / (i + 1))
        step(models[0], optimizers[0], x, y)
        assert optimizers[0].why_not == ""
    x, y = (t.clone() for t in data[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes x and y
    with torch.cuda.stream(side):
        step(models[1], optimizers[1], x, y)
    torch.cuda.synchronize()
    optimizers[1].zero_grad(set_to_none=fresh)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        F.cross_entropy(models[1](x), y).backward()
        optimizers[1].step()
    assert optimizers[1].why_not == ""
    for i, (new_x, new_y) in enumerate(data[1:], 1):
        x.copy_(new_x)
        y.copy_(new_y)
        rates[1].fill_(0.05 / (i + 1))
        for q in models[1].parameters():
            q.grad.zero_()
        graph.replay()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_both_steps_at_once_allocate_nothing_and_do_not_wait() -> None:
    """Also where the gradients are elsewhere each time and the learning rate is another."""
    model = net().cuda()
    optimizer = ENormSGD(model, torch.zeros(2, 12, device="cuda"), lr=0.05, momentum=0.9, c=1.2)
    gradients = [[torch.randn_like(q) for q in model.parameters()] for _ in range(5)]

    def step_on(number: int) -> None:
        for q, gradient in zip(model.parameters(), gradients[number], strict=True):
            q.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
        optimizer.step()

    for number in range(2):
        step_on(number)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with never_waiting():
        for number in range(2, 5):
            step_on(number)
    assert optimizer.why_not == ""
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
