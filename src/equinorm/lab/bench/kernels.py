"""Where the time of an ENorm step goes: every kernel by itself, and other sizes of what its programs work on.

    equinorm bench kernels                                             # on a CUDA device, a minute
    python -m equinorm.lab.bench.kernels --tune --only contiguous      # with other sizes
    python -m equinorm.lab.bench.kernels --toy                         # tiny nets, interpreted: does it run?

What ENorm adds to a training step, beside other norms and beside the bytes it moves, is measured by
`equinorm bench steps`. Here are optimizer steps alone, captured ten in a row; before each the cache is overwritten, as
the rest of a training step does, and the time of that is taken off. Medians over replays that take turns.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import ENorm, ENormSGD, trace
from ...enorm.steps import structure
from .. import nets as models

Action = Callable[[], object]
REPEATS = 10

# -- networks ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    example: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format


def chain(*widths: int, bias: bool = True) -> nn.Sequential:
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cases(toy: bool) -> Iterator[Case]:
    size, width, classes = (32, 4, 10) if toy else (64, 64, 1000)

    def resnet() -> nn.Module:
        return models.build("resnet18", classes=classes, in_shape=(3, size, size), norm="none", width=width)

    fc, big = ([48, 10, 10, 3], [16] * 4) if toy else ([3072] + [500] * 20 + [10], [4096] * 19)
    yield Case("ResNet-18, contiguous", resnet, (1, 3, size, size))
    yield Case("ResNet-18, channels last", resnet, (1, 3, size, size), memory_format=torch.channels_last)
    yield Case("FC-19", lambda: chain(*fc), (1, fc[0]))
    yield Case("bfloat16 linears", lambda: chain(*big, bias=False), (1, big[0]), torch.bfloat16)


NAMES = tuple(case.name for case in cases(toy=True))


def ways(case: Case, device: str) -> dict[str, Callable[[], Action]]:
    """What makes an optimizer's step: without ENorm, with it, and fused with it; all from the same start."""
    torch.manual_seed(0)
    start = case.make().to(device, case.dtype).to(memory_format=case.memory_format)  # type: ignore[call-overload]
    symmetry = trace(start, torch.zeros(case.example, dtype=case.dtype, device=device))

    def with_gradients() -> nn.Module:
        model = copy.deepcopy(start)
        for q in model.parameters():
            q.grad = torch.randn_like(q).mul_(1e-3)
        return model

    def sgd(early: bool | None = None, **options: Any) -> Action:
        model = with_gradients()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        if options:
            enorm = ENorm(model, optimizer, symmetry=symmetry, c=1.2, gradients=False, **options)
            if early is not None:
                enorm.prepared.early = early  # type: ignore[attr-defined]
            enorm.attach()
        return optimizer.step

    def fused() -> Action:
        return ENormSGD(with_gradients(), symmetry=symmetry, lr=1e-3, momentum=0.9, c=1.2, backend="triton").step

    return {
        "SGD": sgd,
        "SGD, ENorm": partial(sgd, backend="triton"),
        "SGD, ENorm, no early start": partial(sgd, backend="triton", early=False),
        "ENorm fused with SGD": fused,
    }


# -- measuring ---------------------------------------------------------------------------------------------------------


def captured(*actions: Action) -> torch.cuda.CUDAGraph:
    """The actions one after the other, ten times, as one graph."""
    for _ in range(2):
        for action in actions:
            action()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            for action in actions:
                action()
    return graph


def cold_times(actions: dict[str, Action], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, in a cache that is full of something else."""
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    graphs = {name: captured(lambda: cache.fill_(1), action) for name, action in actions.items()}
    graphs[""] = captured(lambda: cache.fill_(1))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) / REPEATS)
    nothing = statistics.median(times.pop(""))
    return {name: [value - nothing for value in values] for name, values in times.items()}


def kernel_times(action: Action, times: int = 10) -> list[str]:
    """Every kernel: launches and microseconds per launch, the longest in all first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(times):
            action()
        torch.cuda.synchronize()
    rows = [
        (event.self_device_time_total, event.count, event.key)
        for event in found.key_averages()
        if event.self_device_time_total and str(event.device_type).endswith("CUDA")
    ]
    return [f"{count // times:4} x {spent / count:8.2f} us  {key[:60]}" for spent, count, key in sorted(rows)[::-1]]


def measure(case: Case, rounds: int) -> None:
    actions = {name: make() for name, make in ways(case, "cuda").items()}
    for name, values in cold_times(actions, rounds).items():
        low, high = statistics.quantiles(values, n=20)[::18]
        print(f"  {name:27} {statistics.median(values):.4f} ms (5-95 %: {low:.4f}-{high:.4f})")
    for name in ("SGD, ENorm", "ENorm fused with SGD"):
        print(f"  {name}:", *kernel_times(actions[name]), sep="\n    ", flush=True)


TUNED: dict[str, dict[str, int]] = {
    "as it is": {},
    "4 rows of kernels": {"filters": 4},
    "1 row of kernels": {"filters": 1},
    "32 channels of kernels": {"channels": 32},
    "smaller shares": {"share": 4096},
    "larger shares": {"share": 16384},
    "wider tiles": {"rows": 8, "columns": 256},
    "lower tiles": {"rows": 8},
    "nothing alone": {"alone": 0},
    "longer chunks": {"chunk": 8192},
    "shorter chunks": {"chunk": 2048},
}


def tune(case: Case, rounds: int) -> None:
    """The same with other sizes."""
    default = structure.DEFAULT
    actions: dict[str, Action] = {}
    for name, sizes in TUNED.items():
        structure.DEFAULT = replace(default, **sizes)
        made = ways(case, "cuda")
        actions |= {f"{way}; {name}": made[way]() for way in ("SGD, ENorm", "ENorm fused with SGD")}
    structure.DEFAULT = default
    for name, values in cold_times(actions, rounds).items():
        print(f"  {name:45} {statistics.median(values):.4f} ms", *kernel_times(actions[name])[:3], sep="\n      ")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--toy", action="store_true", help="tiny nets on the CPU, by the interpreter")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name contains one of these")
    parser.add_argument("--tune", action="store_true", help="compare sizes of what programs work on")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    if options.toy:
        os.environ["TRITON_INTERPRET"] = "1"  # triton is imported when the first kernel is asked for
    if not options.toy:
        import triton

        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for case in cases(options.toy):
        if options.only and not any(word.lower() in case.name.lower() for word in options.only):
            continue
        print(f"\n{case.name}", flush=True)
        if options.toy:
            for name, make in ways(case, "cpu").items():
                step = make()
                step(), step()
                print(f"  {name}")
        elif options.tune:
            tune(case, options.rounds)
        else:
            measure(case, options.rounds)


if __name__ == "__main__":
    main()
