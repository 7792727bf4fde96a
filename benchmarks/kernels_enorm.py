"""GPU time of one ENorm cycle, captured as a graph: torch operations, fused kernels, and a copy of the same bytes.

    python benchmarks/kernels_enorm.py                 # on a CUDA device, under a minute
    python benchmarks/kernels_enorm.py --tune --only contiguous     # the same with other tile sizes
    python benchmarks/kernels_enorm.py --cpu           # the torch versions on a CPU, by the clock on the wall
    python benchmarks/kernels_enorm.py --toy           # tiny nets on a CPU, the kernels through Triton's interpreter

Every number is a median over replays of ten steps that take turns; before each step the cache is overwritten, as a
training step would do ("cold", the time of that taken off), or not ("warm"). The floor is a copy that reads and writes
the bytes of weights and momentum once.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

if "--toy" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equinorm

T = TypeVar("T")

# -- networks ----------------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, a: int, b: int, stride: int, bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(a, b, 3, stride, 1, bias=bias)
        self.conv2 = nn.Conv2d(b, b, 3, 1, 1, bias=bias)
        self.skip = nn.Conv2d(a, b, 1, stride, bias=bias) if stride > 1 or a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.conv2(F.relu(self.conv1(x))))


class ResNet18(nn.Module):
    """ResNet-18 without its norms."""

    def __init__(self, width: int = 64, bias: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=bias)
        blocks, a = [], width
        for b, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [BasicBlock(a, b, stride, bias), BasicBlock(b, b, 1, bias)]
            a = b
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(a, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)).mean((2, 3)))


def chain(*widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Case(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    example: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format


def cases(toy: bool) -> list[Case]:
    width, fc = (4, [48] + [10] * 5 + [3]) if toy else (64, [3072] + [500] * 20 + [10])
    big = [16] * 4 if toy else [4096] * 19
    image = (1, 3, 32, 32) if toy else (1, 3, 64, 64)
    last = torch.channels_last
    return [
        Case("ResNet-18, contiguous", lambda: ResNet18(width), image),
        Case("ResNet-18, channels last", lambda: ResNet18(width), image, memory_format=last),
        Case("ResNet-18, channels last, biases", lambda: ResNet18(width, bias=True), image, memory_format=last),
        Case("FC-19", lambda: chain(*fc), (1, fc[0])),
        Case("300 M of bfloat16 linears", lambda: chain(*big, bias=False), (1, big[0]), torch.bfloat16),
    ]


class Trained(NamedTuple):
    """A model one step into its training, with an ENorm on it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    enorm: equinorm.ENorm


def trained(case: Case, start: nn.Module, device: str, **options: object) -> Trained:
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    example = torch.zeros(case.example, dtype=case.dtype, device=device)
    enorm = equinorm.ENorm(model, optimizer, example, c=1.2, **options)
    draw = torch.Generator(device).manual_seed(1)
    for q in model.parameters():
        q.grad = torch.randn(q.shape, generator=draw, device=device).to(q).mul_(1e-3).contiguous(
            memory_format=case.memory_format if q.ndim == 4 else torch.contiguous_format
        )  # fmt: skip
    optimizer.step()
    return Trained(model, optimizer, enorm)


def started(case: Case, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = case.make().to(device, case.dtype).to(memory_format=case.memory_format)
    with torch.no_grad():
        for q in model.parameters():
            q.mul_(torch.randn(q.shape[0], *[1] * (q.ndim - 1), device=device).mul_(0.3).exp().to(q))
    return model


# -- measuring ---------------------------------------------------------------------------------------------------------


def difference(a: Trained, b: Trained) -> float:
    """The largest difference between weights and momentum of two models, over the largest value of each tensor."""
    worst = 0.0
    for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True):
        held = [(x, y)] + [(o.state[x][k], b.optimizer.state[y][k]) for o in [a.optimizer] for k in o.state[x]]
        for u, v in held:
            worst = max(worst, float((u.detach() - v.detach()).abs().max() / u.detach().abs().max()))
    return worst


REPEATS = 10


def captured(*actions: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The actions one after the other, ten times, as one graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            for action in actions:
                action()
    return graph


def replayed(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of one of the ten, for each replay; the graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 2:
                times[name].append(start.elapsed_time(end) / REPEATS)
    return times


def attempt(action: Callable[[], T]) -> T | None:
    """What an action gives, or None and a traceback: the rest is still worth its time."""
    try:
        return action()
    except Exception:
        traceback.print_exc()
        return None


def kernel_times(action: Callable[[], None], steps: int = 10) -> list[tuple[str, int, float]]:
    """Name, launches and microseconds per launch of every kernel of an action."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            action()
        torch.cuda.synchronize()
    rows = []
    for event in found.key_averages():
        spent = getattr(event, "self_device_time_total", None) or getattr(event, "self_cuda_time_total", 0.0)
        if spent and str(event.device_type).endswith("CUDA"):
            rows.append((event.key[:60], event.count // steps, spent / event.count))
    return sorted(rows, key=lambda row: -row[1] * row[2])


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {"backend": "plain", "gradients": False},
    "triton": {"backend": "triton", "gradients": False},
    "triton, no early start": {"backend": "triton", "gradients": False, "early": False},
    "triton, gradients too": {"backend": "triton"},
}


def prepared(name: str, case: Case, start: nn.Module, size: int, options: dict[str, object]) -> Trained:
    """A model with its ENorm after three steps; prints what they took."""
    early = options.pop("early", None)
    before = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    run = trained(case, start, "cuda", **options)
    if early is not None:
        run.enorm._fused.early = early
    made = time.perf_counter() - begun
    kept = torch.cuda.memory_allocated() - before - 3 * size  # weights, gradients and momentum of the copy itself
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run.enorm.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    run.enorm.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    run.enorm.step()
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    print(
        f"  {name:23} made in {made:.1f} s, first step {first:.1f} s, host time of the next {host * 1e3:.2f} ms, "
        f"tables {kept / 2**20:.1f} MiB, peak of a step {peak / 2**20:.2f} MiB"
    )
    return run


def measure_on_gpu(case: Case, rounds: int) -> None:
    start = started(case, "cuda")
    size = sum(q.numel() * q.element_size() for q in start.parameters())
    print(f"\n{case.name}: {sum(q.numel() for q in start.parameters()) / 1e6:.1f} M parameters, {size / 2**20:.0f} MiB")
    tried = {name: attempt(partial(prepared, name, case, start, size, dict(o))) for name, o in VARIANTS.items()}
    runs = {name: run for name, run in tried.items() if run is not None}
    for name in [name for name in runs if name.startswith("triton")]:
        print(f"  {name}: largest difference from plain after three steps {difference(runs['plain'], runs[name]):.1e}")
    one, two = (torch.empty(2 * size, dtype=torch.int8, device="cuda") for _ in range(2))
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    def copy_bytes() -> None:
        two.copy_(one)

    def overwrite_cache() -> None:
        cache.fill_(1)

    actions = {"copy of the bytes": copy_bytes} | {name: run.enorm.step for name, run in runs.items()}
    for cold in (True, False):
        before = [overwrite_cache] if cold else []
        chosen = {name: action for name, action in actions.items() if cold or name != "plain"}
        made = {name: attempt(partial(captured, *before, action)) for name, action in chosen.items()}
        graphs = {name: graph for name, graph in made.items() if graph is not None}
        times = replayed(graphs | ({"nothing": captured(*before)} if cold else {}), rounds)
        nothing = statistics.median(times.pop("nothing", [0.0]))
        floor = statistics.median(times["copy of the bytes"]) - nothing
        for name, values in times.items():
            middle, low, high = statistics.median(values), *statistics.quantiles(values, n=20)[::18]
            print(
                f"  {'cold' if cold else 'warm'} {name:23} {middle - nothing:.4f} ms "
                f"(5-95 %: {low - nothing:.4f}-{high - nothing:.4f}), {(middle - nothing) / floor:.2f} x floor"
            )
    fused = runs["triton"].enorm
    plan = fused._fused.plan
    print(
        f"  {len(plan.first)} blocks, {len(plan.tiles)} tiles, {len(plan.chunks)} chunks, {plan.index.shape[1]} entries"
    )
    for name, count, micro in kernel_times(fused.step):
        print(f"    {count:4} x {micro:8.2f} us  {name}")


TUNED = {
    "as it is": {},
    "4 rows of kernels": {"filters": 4},
    "1 row of kernels": {"filters": 1},
    "32 channels of kernels": {"channels": 32},
    "smaller shares": {"share": 4096},
    "larger shares": {"share": 16384},
    "wider tiles": {"rows": 8, "columns": 256},
    "nothing alone": {"alone": 0},
    "longer chunks": {"chunk": 8192},
    "shorter chunks": {"chunk": 2048},
}


def tune_on_gpu(case: Case, rounds: int) -> None:
    """Time and kernels of a step with other sizes of what programs work on."""
    from equinorm.kernels import enorm_plan

    start, default = started(case, "cuda"), enorm_plan.DEFAULT
    print(f"\n{case.name}")
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    before = [lambda: cache.fill_(1)]
    graphs, kernels = {"nothing": captured(*before)}, {}
    for name, sizes in TUNED.items():
        enorm_plan.DEFAULT = replace(default, **sizes)
        run = attempt(partial(trained, case, start, "cuda", backend="triton", gradients=False))
        if run is not None and attempt(run.enorm.step) is None:
            run.enorm.step()
            graphs[name] = captured(*before, run.enorm.step)
            kernels[name] = kernel_times(run.enorm.step)
    enorm_plan.DEFAULT = default
    times = {name: statistics.median(values) for name, values in replayed(graphs, rounds).items()}
    nothing = times.pop("nothing")
    for name, total in times.items():
        parts = ", ".join(f"{key} {count} x {micro:.1f}" for key, count, micro in kernels[name][:6])
        print(f"  {name:23} {total - nothing:.4f} ms: {parts}")


def measure_on_cpu(case: Case, backends: Sequence[str], rounds: int) -> None:
    start = started(case, "cpu")
    runs = {name: trained(case, start, "cpu", backend=name, gradients=False) for name in backends}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            begun = time.perf_counter()
            run.enorm.step()
            if i:
                times[name].append(time.perf_counter() - begun)
    middle = {name: statistics.median(values) for name, values in times.items()}
    print(f"{case.name}, {torch.get_num_threads()} threads, n = {rounds}:")
    for name, seconds in middle.items():
        off = f", largest difference {difference(runs['plain'], runs[name]):.1e}" if name != "plain" else ""
        print(f"  {name:8} {seconds * 1e3:8.2f} ms, {middle['plain'] / seconds:.2f} times as fast as plain{off}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpu", action="store_true", help="the torch versions on the CPU")
    parser.add_argument("--toy", action="store_true", help="tiny nets on the CPU, by the interpreter")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name contains one of these")
    parser.add_argument("--tune", action="store_true", help="compare sizes of what programs work on")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not (options.toy or options.cpu):
        import triton

        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for case in cases(options.toy):
        if options.only and not any(word.lower() in case.name.lower() for word in options.only):
            continue
        if options.toy:
            attempt(partial(measure_on_cpu, case, ("plain", "foreach", "triton"), 2))
        elif options.tune:
            attempt(partial(tune_on_gpu, case, options.rounds))
        elif options.cpu:
            attempt(partial(measure_on_cpu, case, ("plain", "foreach"), options.rounds))
        else:
            attempt(partial(measure_on_gpu, case, options.rounds))
        sys.stdout.flush()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
