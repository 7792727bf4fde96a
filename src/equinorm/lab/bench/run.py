"""The parts of `equinorm bench`: measure, show, save."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ...errors import UserError
from ...files import write_text
from ..training.trainer import chosen_device
from . import balance, checkpoint, floors, instruments, kernels, quantization, scaling, sharded, steps, throughput
from .facts import facts, save
from .output import show

__all__ = ["PARTS", "run"]


def run(
    parts: tuple[str, ...],
    out: Path,
    *,
    device: str | None = None,
    only: tuple[str, ...] = (),
    variants: tuple[str, ...] = (),
    mode: str = "both",
    quick: bool = False,
    repeats: int = 7,
    minutes: float = float("inf"),
    data_dir: Path | None = None,
) -> list[Path]:
    """Measure, print and save; the files written. Parts that do not fit into the time are left out, with a word."""
    where = chosen_device(device)
    networks = steps.networks(where, quick)
    _check("part", parts, [*PARTS, *ON_REQUEST])
    names = {
        "steps": networks,
        "scaling": ["scaling"],
        "balance": {**balance.NETWORKS, **floors.NETWORKS},
        "lab": throughput.CASES,
        "kernels": kernels.NAMES,
        "instruments": ["cost", *instruments.PARTS],
        "checkpoint": checkpoint.NAMES,
        "sharded": sharded.NAMES,
        "quantization": quantization.NETWORKS,
    }
    _check("network or run", only, dict.fromkeys(name for part in parts or PARTS for name in names[part]))
    _check("variant", variants, dict.fromkeys(v.name for network in networks.values() for v in network.variants))
    bench = _Bench(where, out, only, variants, mode, quick, repeats, time.monotonic() + 60 * minutes, data_dir)
    if quick:
        bench.console.print("quick: " + bench.about["quick"], highlight=False)
    for name in parts or PARTS:
        (PARTS | ON_REQUEST)[name](bench)
    return bench.written


def _check(what: str, asked: Iterable[str], known: Iterable[str]) -> None:
    known = tuple(known)
    for name in asked:
        if name not in known:
            raise UserError(f"bench has no {what} {name!r} here; it has " + ", ".join(map(repr, known)))


class _Bench:
    def __init__(
        self,
        device: torch.device,
        out: Path,
        only: tuple[str, ...],
        variants: tuple[str, ...],
        mode: str,
        quick: bool,
        repeats: int,
        end: float,
        data_dir: Path | None,
    ) -> None:
        self.device, self.out, self.only, self.variants = device, out, only, variants
        self.mode, self.quick, self.repeats, self.end, self.data_dir = mode, quick, repeats, end, data_dir
        tag = {"quick": "tiny sizes, to see that it runs: these are no measurements"} if quick else {}
        self.about = facts(device) | tag  # as it is before the work begins
        self.about_cpu = facts(torch.device("cpu")) | tag
        self.console = Console()
        self.written: list[Path] = []

    def wanted(self, name: str) -> bool:
        if self.only and name not in self.only:
            return False
        if time.monotonic() > self.end:
            self.console.print(f"no time left for {name}", highlight=False)
            return False
        return True

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """Says what is going on, on a terminal."""
        terminal = Console(stderr=True)
        if not terminal.is_terminal:
            yield lambda text: None
            return
        with terminal.status("") as line:
            yield lambda text: line.update(text)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """What cannot be measured here is left out, with a word."""
        try:
            with self.status() as say:
                say(name)
                yield
        except (UserError, torch.OutOfMemoryError) as error:  # torchvision is not installed, say
            self.console.print(f"{name} is left out: {error}", highlight=False, markup=False)

    @property
    def suffix(self) -> str:
        return "_gpu" if self.device.type == "cuda" else "_cpu"


def _steps(bench: _Bench) -> None:
    """A file for every network and mode, so that one can be measured anew without the others."""
    for name, network in steps.networks(bench.device, bench.quick).items():
        heavy = network.accumulate > 1
        known = tuple(variant.name for variant in network.variants)
        variants = tuple(name for name in known if not bench.variants or name in bench.variants)
        for mode in ("eager", "compiled"):
            if not variants or bench.mode not in ("both", mode) or not bench.wanted(name):
                continue
            with bench.status() as say:
                found = steps.measure(
                    network,
                    bench.device,
                    compiled=mode == "compiled",
                    only=variants,
                    repeats=min(3, bench.repeats) if heavy else bench.repeats,
                    steps=1 if bench.quick else None,
                    say=say,
                )
            text = show([steps.table(found), *steps.sentences(found)], bench.console)
            bench.written += save(bench.out, f"bench_steps_{name}_{mode}{bench.suffix}", text, found, bench.about)


def _scaling(bench: _Bench) -> None:
    if not bench.wanted("scaling"):
        return
    with bench.status() as say:
        found = scaling.measure(bench.device, bench.quick, bench.repeats, say)
    text = show([scaling.table(found)], bench.console)
    bench.written += save(bench.out, f"bench_scaling{bench.suffix}", text, found, bench.about)
    picture = bench.out / f"bench_scaling{bench.suffix}{'_quick' * bench.quick}.png"
    scaling.draw(found, picture, bench.about["hardware"])
    bench.written.append(picture)


def _balance(bench: _Bench) -> None:
    """What tracing and balancing cost on the device, beside what is aimed at; on a CPU also beside plain cycles."""
    _floors(bench)
    if bench.device.type != "cpu":
        return
    rows = []
    small = [name for name in balance.NETWORKS if " x " in name]
    names = [name for name in (small if bench.quick and not bench.only else balance.NETWORKS) if bench.wanted(name)]
    try:
        for name in names:
            with bench.trying(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows.append(balance.measure(name, bench.repeats, 1.0 if bench.quick else 60.0))
    finally:  # an interrupt loses nothing
        if rows:
            text = show([balance.table_of(rows)], bench.console, width=170)
            bench.written += save(bench.out, "bench_balance", text, rows, bench.about_cpu)


def _floors(bench: _Bench) -> None:
    rows: list[floors.FloorCost] = []
    names = [] if bench.quick else floors.network_names(bench.device, bench.only)
    for name in filter(bench.wanted, names):
        with bench.trying(name), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not rows:
                floors.warm_up(bench.device)
            rows.append(floors.measure(name, bench.device, bench.repeats))
    if rows:
        text = show([floors.table(rows)], bench.console, width=170)
        bench.written += save(bench.out, f"bench_floors_{bench.device.type}", text, rows, bench.about)


def _lab(bench: _Bench) -> None:
    gpu = bench.device.type == "cuda"
    data = throughput.random_images(bench.device, 50_000 if gpu else 512)
    found: list[throughput.Speed] = []
    try:
        for name, run_ in throughput.CASES.items():
            if not bench.wanted(name):
                continue
            with bench.trying(name):
                chosen = run_ if gpu and not bench.quick else throughput.smaller(run_)
                together = (1, 4, 8) if gpu else (1, 2)
                found += throughput.measure(name, chosen, data, together, 40 if gpu else 2, 5 if gpu else 2)
    finally:
        if found:
            text = show([_speeds(found)], bench.console)
            bench.written += save(bench.out, f"bench_lab{bench.suffix}", text, found, bench.about)


def _kernels(bench: _Bench) -> None:
    """Printed, not written."""
    if bench.device.type != "cuda" and not bench.quick:
        raise UserError("bench kernels needs a CUDA device; --quick interprets the kernels of tiny nets on a CPU")
    chosen = [name for name in kernels.NAMES if bench.wanted(name)]
    kernels.main([*["--toy"] * bench.quick, "--rounds", str(bench.repeats), *(["--only", *chosen] if chosen else [])])


def _instruments(bench: _Bench) -> None:
    """Logs and figures, in a folder of their own."""
    out = bench.out / "diagnostics"
    chosen = [name for name in ("cost", *instruments.PARTS) if bench.wanted(name)]
    if chosen:
        left = f"{(bench.end - time.monotonic()) / 60}"
        options = ["--out", str(out), "--device", str(bench.device), "--minutes", left, *["--toy"] * bench.quick]
        instruments.main([*options, "--only", *chosen])
        bench.written += sorted(out.glob("*.jsonl"))


def _checkpoint(bench: _Bench) -> None:
    if not bench.wanted(checkpoint.NAMES[0]):
        return
    with bench.status() as say:
        say("checkpoint")
        found = [checkpoint.measure(bench.quick)]
    text = show([checkpoint.table_of(found)], bench.console)
    bench.written += save(bench.out, "bench_checkpoint", text, found, bench.about_cpu)


def _sharded(bench: _Bench) -> None:
    chosen = [name for name in sharded.NAMES if bench.wanted(name)]
    if not chosen:
        return
    with bench.status() as say:
        found = sharded.measure(chosen, bench.repeats, bench.quick, say)
    text = show([sharded.table_of(found)], bench.console, width=170)
    bench.written += save(bench.out, "bench_sharded", text, found, bench.about_cpu)


def _quantization(bench: _Bench) -> None:
    """A log with a line for each row, and a table of it."""
    chosen = [name for name in quantization.NETWORKS if bench.wanted(name)]
    if bench.data_dir is None:
        raise UserError("bench quantization needs --data-dir: a folder with Imagenette's val224.tar and train160.tar")
    log = bench.out / "bench_quantization.jsonl"
    with bench.status() as say:
        found = quantization.measure(chosen, bench.data_dir, log, bench.about_cpu, bench.end, say)
    text = show([quantization.table_of(found)], bench.console, width=200)
    head = "".join(f"{key}: {value}\n" for key, value in bench.about_cpu.items())
    write_text(bench.out / "bench_quantization.txt", f"{head}\n{text}")
    bench.written += [log, bench.out / "bench_quantization.txt"]


def _speeds(found: list[throughput.Speed]) -> Table:
    title = "Time per run, several runs side by side (median; spread of the middle half)"
    shown = Table(title=title, title_justify="left")
    shown.add_column("run")
    for head in ("at once", "ms a step", "s an epoch", "s in all", "set-up, s"):
        shown.add_column(head, justify="right", no_wrap=True)
    for speed in found:
        step = f"{speed.step:.3f} ({speed.spread:.3f})"
        numbers = (str(speed.side_by_side), step, f"{speed.epoch:.2f}", f"{speed.whole:.1f}", f"{speed.set_up:.2f}")
        shown.add_row(speed.name, *numbers)
    return shown


PARTS: dict[str, Callable[[_Bench], None]] = {
    "steps": _steps,
    "scaling": _scaling,
    "balance": _balance,
    "lab": _lab,
}
ON_REQUEST: dict[str, Callable[[_Bench], None]] = {
    "kernels": _kernels,
    "instruments": _instruments,
    "checkpoint": _checkpoint,
    "sharded": _sharded,
    "quantization": _quantization,
}
"""Parts that are left out unless they are named."""
