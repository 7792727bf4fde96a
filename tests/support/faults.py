"""Faults at random writes: whatever is changed in place is changed whole or not at all.

Random nets go through every function that works in place, and at one of its writes, drawn at random, something is
raised, or Ctrl-C arrives. Afterwards the net is the one of before to the last bit, or the one that the function would
have made.

PYTHONPATH=src:tests python -m support.faults 1000 1500 results/faults.txt [MINUTES]
"""

from __future__ import annotations

import copy
import math
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import equinorm
from support.architectures import BARRIERS, HOMOGENEOUS, LAYERS, MIXING, Architecture, example_input
from support.logs import by_name, table, write_log

KINDS = [*LAYERS, *HOMOGENEOUS, *MIXING, *BARRIERS]
METHODS = ("weightnorm", "msr", "unit_filters", "none", "equinorm")
OPTIMIZERS: tuple[Callable[[Iterable[Tensor]], torch.optim.Optimizer], ...] = (
    partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    partial(torch.optim.Adam, lr=0.001),
    partial(torch.optim.Adafactor, lr=0.01),
    partial(torch.optim.AdamW, lr=0.001, amsgrad=True),
)


class FaultError(Exception):
    """What is injected."""


class Faulty(TorchDispatchMode):
    """Raises before the n-th write to one of these tensors, so many times, or sends Ctrl-C; counts the writes."""

    def __init__(self, tensors: Iterable[Tensor], n: int = 0, interrupt: bool = False, times: int = 1) -> None:
        super().__init__()
        self.ours = {t.untyped_storage()._cdata for t in tensors}
        self.n, self.interrupt, self.times, self.writes = n, interrupt, times, 0
        self.came = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, declared in enumerate(func._schema.arguments):
            if declared.alias_info is None or not declared.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(declared.name)
            leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
            if not any(leaf.untyped_storage()._cdata in self.ours for leaf in leaves):
                continue
            self.writes += 1
            if 0 < self.n <= self.writes < self.n + self.times:
                self.came = True
                if not self.interrupt:
                    raise FaultError
                signal.raise_signal(signal.SIGINT)
        return func(*args, **kwargs)


@dataclass
class Work:
    """Something that is done in place: the tensors it may write to, what does it, and everything that it may change."""

    tensors: Callable[[], list[Tensor]]
    do: Callable[[], Any]
    everything: Callable[[], dict[str, Tensor]]
    first_part: Callable[[], Any] | None = None  # is whole by itself


def random_net(seed: int) -> nn.Module:
    rng = random.Random(seed)
    plan = [(rng.choice(KINDS), rng.randrange(12), rng.randrange(12)) for _ in range(rng.randint(2, 7))]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Architecture([("conv", 1, 0), *plan, ("conv", 2, 1)]).double()


def _of_model(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{kind} {name}": t
        for kind, named in (("p", model.named_parameters()), ("b", model.named_buffers()))
        for name, t in named
    }


def _rescaled(model: nn.Module, x: Tensor, symmetry: equinorm.Symmetry, seed: int) -> Work:
    generator = torch.Generator().manual_seed(seed)
    scales = 0.3 * torch.randn(symmetry.num_scales, generator=generator, dtype=torch.float64)
    here = symmetry.bind(model)
    return Work(lambda: list(_of_model(model).values()), lambda: here.rescale_(scales), lambda: _of_model(model))


def _balanced(model: nn.Module, x: Tensor, symmetry: equinorm.Symmetry, seed: int) -> Work:
    do = partial(equinorm.balance_, model, x, symmetry=symmetry)
    return Work(lambda: list(_of_model(model).values()), do, lambda: _of_model(model))


def _converted(model: nn.Module, x: Tensor, symmetry: equinorm.Symmetry, seed: int) -> Work:
    do = partial(equinorm.convert, model, METHODS[seed % len(METHODS)], x, inplace=True)
    return Work(lambda: list(_of_model(model).values()), do, lambda: _of_model(model))


def _folded(model: nn.Module, x: Tensor, symmetry: equinorm.Symmetry, seed: int) -> Work:
    equinorm.convert(model, METHODS[seed % 3], x, inplace=True)
    do = partial(equinorm.fold, model, x, inplace=True)
    return Work(lambda: list(_of_model(model).values()), do, lambda: _of_model(model))


def _stepped(backend: str, model: nn.Module, x: Tensor, symmetry: equinorm.Symmetry, seed: int) -> Work:
    optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)](model.parameters())
    enorm = equinorm.ENorm(
        model,
        optimizer,
        symmetry=symmetry,
        c=1.0 + 0.1 * (seed % 3),
        backend=backend,
        companions=[copy.deepcopy(model)],
    )
    for _ in range(2):
        enorm.before_step()
        model(x).square().mean().backward()
        optimizer.step()
        enorm.step()
    enorm.before_step()
    optimizer.step()

    def everything() -> dict[str, Tensor]:
        found = _of_model(model) | {"log_t": enorm.log_t, "t": enorm.biases.gains.t}
        found |= {f"c {name}": t for name, t in _of_model(enorm.companions[0].model).items()}
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[f"g {name}"] = p.grad
            found |= {f"s {name} {k}": t for k, t in optimizer.state.get(p, {}).items() if isinstance(t, Tensor)}
        return found

    return Work(lambda: list(everything().values()), enorm.step, everything, enorm.biases.after_step)


WORKS: dict[str, Callable[[nn.Module, Tensor, equinorm.Symmetry, int], Work]] = {
    "rescale_": _rescaled,
    "balance_": _balanced,
    "convert": _converted,
    "fold": _folded,
    "ENorm.step, plain": partial(_stepped, "plain"),
    "ENorm.step, foreach": partial(_stepped, "foreach"),
}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def judge(seed: int, name: str, model: nn.Module, x: Tensor, symmetry: equinorm.Symmetry) -> str:
    """How a fault at a random write of one function ended."""
    rng = random.Random(f"{seed} {name}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twins = [WORKS[name](copy.deepcopy(model), x, symmetry, seed) for _ in range(2)]
            with Faulty(twins[0].tensors()) as count:
                twins[0].do()
    except (ValueError, TypeError, OverflowError):
        return "does not apply to this net"
    if not count.writes:
        return "wrote nothing"
    work, interrupt = twins[1], rng.random() < 0.5
    before = _copied(work.everything())
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    try:
        with warnings.catch_warnings(), Faulty(work.tensors(), rng.randint(1, count.writes), interrupt) as fault:
            warnings.simplefilter("ignore")
            work.do()
        # memory of a temporary tensor may lie where one of ours did, so that another time there are fewer writes
        return "the fault was not heard" if fault.came else "the write did not come"
    except (FaultError, KeyboardInterrupt):
        pass
    finally:
        signal.signal(signal.SIGINT, heard)
    if _same(work.everything(), before):
        return "as before"
    # rounding may differ where a thread's share of a sum does
    done = twins[0].everything()
    after = work.everything()
    close = after.keys() == done.keys() and all(torch.allclose(after[k], done[k], 1e-12, 1e-14) for k in done)
    if close:
        return "complete"
    if work.first_part is not None:
        part = WORKS[name](copy.deepcopy(model), x, symmetry, seed)
        assert part.first_part is not None
        part.first_part()
        if _same(after, part.everything()):
            return "the step of safe biases is complete, the balance has not begun"
    return "HALF DONE"


def run(seeds: Iterable[int], minutes: float = math.inf) -> tuple[int, Counter[tuple[str, str]], list[str]]:
    """How many nets were tried in the time, how all ended, and those that are faults."""
    ends: Counter[tuple[str, str]] = Counter()
    faults, count, end_of_time = [], 0, time.monotonic() + 60 * minutes
    for seed in seeds:
        if time.monotonic() > end_of_time:
            break
        count += 1
        model, x = random_net(seed), example_input(seed).double()
        symmetry = equinorm.trace(model, x, verify=False)
        for name in WORKS:
            end = "nothing is free in this net" if not symmetry.num_scales else judge(seed, name, model, x, symmetry)
            ends[name, end] += 1
            if end in ("HALF DONE", "the fault was not heard"):
                faults.append(f"seed {seed}, {name}: {end}")
    return count, ends, faults


if __name__ == "__main__":
    first, last, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    count, ends, faults = run(range(first, last), float(sys.argv[4]) if sys.argv[4:] else math.inf)
    title = f"{count} random nets, each through every function in place, with a fault at a random write"
    write_log("support.faults", out, table(title, by_name(ends), "half done, or not heard", faults))
    sys.exit(bool(faults))
