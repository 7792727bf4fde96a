"""The campaign: the papers' headlines on CIFAR-10, cheap and decisive first, in sittings of limited time.

The list below says what is wanted, in order. A sitting trains what the store does not have and what it can finish; the
results add up in the store, wherever they were made.

    print(table(standing(Store("results"))))                                  # what is done and what is left
    work(Store("results"), minutes=9.5, sitting=25, data_dir=Path("data"))    # needs torch, numpy and Pillow
    write_chosen(Store("results"))                                            # what the tuning runs say is best

Items that wait for a tuning are made with what its runs in the store decided, so that one command can tune and go on.
`equinorm campaign --choose` then writes the decision into the recipe's `chosen.json`, for everyone else.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError, counted, meant
from ...files import write_text
from ..training.runs import Run
from ..training.store import Record, Store
from ..training.trainer import Outcome, chosen_device, in_words, load_checkpoint, train_all
from . import deep, federated, imagenette, private, rivals, ruff2020, stock2019
from .artifacts import Artifact, all_artifacts
from .common import Candidate, Chosen, choose, chosen_text, committed, score

__all__ = [
    "CHOSEN",
    "ITEMS",
    "Estimate",
    "Item",
    "Sitting",
    "Speeds",
    "Standing",
    "decide",
    "named",
    "plan",
    "standing",
    "table",
    "work",
    "write_chosen",
]

CHOSEN = Path(stock2019.__file__).with_name("chosen.json")
Records = Mapping[str, Record]  # by the key of their run

# -- what is wanted ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """Some cells of an artifact, each with so many seeds."""

    name: str
    artifact: str
    rows: tuple[str, ...] = ()  # none named: all
    columns: tuple[str, ...] = ()
    n: int | None = None  # seeds of each cell; None: all that the recipe has
    after: str = ""  # the item that decides the settings of this one
    note: str = ""
    best: int = 0  # so many rows in each column: those that are best in the runs of `after`; 0: all

    def runs(
        self, artifacts: Mapping[str, Artifact], toy: bool = False, records: Records | None = None
    ) -> tuple[Run, ...]:
        """Its runs, the first seed of every cell before the second, so that a cut leaves a balanced grid."""
        part = self.part(artifacts, records or {}, toy)
        return (part.toy() if toy else part).runs()

    def part(self, artifacts: Mapping[str, Artifact], records: Records, toy: bool = False) -> Artifact:
        """Its cells, with as many seeds as it wants."""
        part = artifacts[self.artifact].part(self.rows, self.columns)
        cells = part.cells
        if self.best:
            (first,) = (item for item in ITEMS if item.name == self.after)
            ranking = _ranking(first.part(artifacts, records, toy), records, toy)
            cells = tuple(cell for cell in cells if cell.row in ranking.get(cell.column, [])[: self.best])
        return replace(part, cells=tuple(replace(cell, runs=cell.runs[: self.n]) for cell in cells))


def _ranking(part: Artifact, records: Records, toy: bool) -> dict[str, list[str]]:
    """The rows of each column, the best mean of test accuracies first; in their order while any is missing."""
    by_column: dict[str, list[tuple[float, str]]] = {}
    for cell in (part.toy() if toy else part).cells:
        found = [_accuracy(records, None, run) for run in cell.runs]
        known = [score(value) for value in found if value is not None]
        whole = statistics.fmean(known) if len(known) == len(found) else math.nan
        by_column.setdefault(cell.column, []).append((whole, cell.row))
    return {
        column: [
            row for _, row in (cells if any(math.isnan(v) for v, _ in cells) else sorted(cells, key=lambda c: -c[0]))
        ]
        for column, cells in by_column.items()
    }


EXPLICIT, IMPLICIT = stock2019.NV_ROWS[:5], stock2019.NV_ROWS[5:]
HEADLINES = (ruff2020.BEST, ruff2020.BN, ruff2020.Z98, ruff2020.SILENT)
OTHERS = tuple(row.name for row in ruff2020.ROWS if row.name not in HEADLINES)

ITEMS = (
    Item("tuning-fc", stock2019.FC_TUNING, note="learning rates, groups and penalties for figures 4, 8 and 10"),
    Item("figure4", "stock2019/figure4", n=3, after="tuning-fc", note="deep MLPs, nine methods"),
    Item("figure8", "stock2019/figure8", n=3, after="tuning-fc", note="the same, implicit ENorm"),
    Item(
        "figure4-variants",
        "stock2019/variants",
        n=3,
        after="tuning-fc",
        note="what figure 4 leaves open, one thing at a time",
    ),
    Item(
        "figure4-tuned",
        "stock2019/figure4-tuned",
        n=3,
        after="tuning-fc",
        note="the same with chosen learning rates for ENorm",
    ),
    Item("figure10", "stock2019/figure10", n=3, after="tuning-fc", note="the norm in training"),
    Item("repro-figure2", "repro2019/figure2", n=5, note="deep MLPs as repro2019 has them"),
    Item("repro-figure3", "repro2019/figure3", n=5, note="the same with biases"),
    Item("tuning-nv", stock2019.NV_TUNING, rows=stock2019.nv_tuning_rows(EXPLICIT), note="for tables 2 and 3"),
    Item("table3-128", "stock2019/table3", columns=("128",), n=3, after="tuning-nv", note="momentum, batch 128"),
    Item(
        "table3-rates",
        "stock2019/variants-cifar-nv",
        rows=tuple(stock2019.NV_RATE_VARIANTS),
        after="tuning-nv",
        note="its learning rates at full length",
    ),
    Item("tuning-small", stock2019.SMALL_TUNING, after="tuning-nv", note="learning rates for small batches"),
    Item("table3-32", "stock2019/table3", columns=("32",), n=1, after="tuning-small", note="momentum, batch 32"),
    Item("table2-128", "stock2019/table2", columns=("128",), n=1, after="tuning-nv", note="no momentum, batch 128"),
    Item("table2-32", "stock2019/table2", columns=("32",), n=1, after="tuning-nv", note="no momentum, batch 32"),
    Item("table3-8", "stock2019/table3", columns=("8",), n=1, after="tuning-small", note="momentum, batch 8"),
    Item("defazio-figure3", "defazio2018/figure3", note="WRN, 30 epochs: BN and EquiNorm n = 5, GN n = 2"),
    Item("defazio-variants", "defazio2018/variants", note="what figure 3 leaves open, one thing at a time"),
    Item("defazio-mixup", "defazio2018/variants-mixup", note="figure 3 with less mixup"),
    Item("ruff-headlines", "ruff2020/table1", rows=HEADLINES, n=2, note="ResNet-110, the four first rows"),
    Item("tuning-nv-implicit", stock2019.NV_TUNING, rows=stock2019.nv_tuning_rows(IMPLICIT), note="for tables 5 and 6"),
    Item("table6-128", "stock2019/table6", IMPLICIT, ("128",), n=1, after="tuning-nv-implicit", note="implicit ENorm"),
    Item("table5-128", "stock2019/table5", IMPLICIT, ("128",), n=1, after="tuning-nv-implicit", note="no momentum"),
    Item("defazio-figure2", "defazio2018/figure2", note="WRN, 300 epochs, and the quarter-batch claim"),
    Item("ruff-others", "ruff2020/table1", rows=OTHERS, n=1, note="the other rows of table 1"),
    Item("ruff-loss", "ruff2020/table1-loss", note="table 1 with LUMA as a part of the loss"),
    Item("ruff-long", "ruff2020/variants-long", note="what ruff2020 leaves open, at full length"),
    Item(
        "table3-variants",
        "stock2019/variants-cifar-nv",
        after="tuning-nv",
        note="what tables 2 and 3 leave open, one thing at a time",
    ),
    Item("ruff-variants", "ruff2020/variants", note="what ruff2020 leaves open, one thing at a time"),
    # the authors' own programs, what was missing and today's rivals, in the order in which they settle most
    Item("ruff-program", "ruff2020/program", note="ResNet-110 as the authors' program has it, 200 epochs"),
    Item("ruff-program-z1", "ruff2020/program-z1", note="its claim that zmg 1 diverges at lr 0.4"),
    Item("ruff-program-back", "ruff2020/program-differences", note="back to ours, one difference at a time"),
    Item(
        "figure4-released",
        "stock2019/figure4-released",
        rows=stock2019.RELEASED_ROWS,
        n=3,
        after="tuning-fc",
        note="figure 4 as the authors' program has it: six methods, ten depths",
    ),
    Item(
        "figure4-released-cycles",
        "stock2019/figure4-released",
        rows=(stock2019.KEPT, *stock2019.PAPERS_CYCLE),
        n=3,
        after="tuning-fc",
        note="the same with the classifier named in keep=, and with the paper's cycle",
    ),
    Item("nv-released", "stock2019/cifar-nv-released", n=3, note="CIFAR-NV with the released head, ENorm c = 1.1"),
    Item("biases", "stock2019/biases", n=5, note="biases that are not balanced, beside plain and safe ones"),
    Item("tuning-gn-8", stock2019.GN_TUNING, note="GN's rate at batch 8, chosen anew for table 3"),
    Item("repro-notebook", "repro2019/notebook", n=5, note="uniform start and negative rates of its notebook"),
    Item("defazio-normalized", "defazio2018/normalized", n=2, note="normalized inputs, alpha = 2: four settings each"),
    Item(
        "defazio-normalized-4",
        "defazio2018/normalized",
        n=4,
        after="defazio-normalized",
        best=1,
        note="the best setting of each method, n = 4",
    ),
    Item("arpit-weight-norm", "arpit2019/weight-norm-short", note="ConvPool-CNN-C, five parametrizations, 40 epochs"),
    Item("arpit-scaled", "arpit2019/scaled-weight-norm-mnist", note="scaled weight norm on MNIST"),
    Item("arpit-recurrent", "arpit2019/recurrent", note="an LSTM that reads MNIST row by row, three norms"),
    Item("rivals", "rivals/resnet110", note="what is used today: ResNet-110, 60 epochs, n = 2"),
    Item("pathcond", "rivals/pathcond", note="PathCond's protocol: CIFAR-NV with BN, 128 epochs, n = 3"),
    Item("tuning-g-sgd", rivals.G_SGD_TUNING, note="learning rates for SGD on paths"),
    Item("mlp-once", "rivals/mlp", after="tuning-g-sgd", note="deep MLPs: rescaled once, SGD on paths"),
    Item(
        "rivals-long",
        "rivals/resnet110-long",
        after="rivals",
        best=rivals.LONGEST,
        note="the best three rivals for 200 epochs",
    ),
    Item("tuning-imagenette", imagenette.TUNING, note="learning rates for ResNet-18 on Imagenette"),
    Item("imagenette", "imagenette/resnet18", after="tuning-imagenette", note="in ImageNet's place, six methods"),
    # training without batch statistics: Imagenette, private, federated, deep
    Item("tuning-imagenette-fast", imagenette.FAST_TUNING, note="learning rates for 5 and 20 epochs"),
    Item(
        "imagenette-fast",
        "imagenette/without-statistics",
        after="tuning-imagenette-fast",
        note="5 and 20 epochs without batch statistics, beside twins, n = 5",
    ),
    Item("tuning-private", private.TUNING, note="learning rates for private training"),
    Item("private", "private/cifar10", after="tuning-private", note="epsilon 8: GN + WS, unit filters, MSR, n = 3"),
    Item("tuning-federated", federated.TUNING, note="learning rates for federated training"),
    Item("federated", "federated/cifar10", after="tuning-federated", note="four skewed clients: BN, GN, unit filters"),
    Item("tuning-deep", deep.TUNING, note="learning rates for SGD, AdamW and Muon on deep MLPs"),
    Item("deep", "deep/optimizers", after="tuning-deep", note="does balance help AdamW and Muon? 19 to 50 layers"),
)


def named(names: Iterable[str]) -> tuple[Item, ...]:
    """Items by name, or by the name of their artifact or paper; none named: all."""
    names = tuple(names)
    for name in names:
        if not any(_matches(item, name) for item in ITEMS):
            there = [item.name for item in ITEMS]
            raise UserError(f"the campaign has no item {name!r}{meant(name, there) or '.'} It has {', '.join(there)}")
    return tuple(item for item in ITEMS if not names or any(_matches(item, name) for name in names))


def _matches(item: Item, name: str) -> bool:
    return name in (item.name, item.artifact, item.artifact.split("/")[0])


# -- what the tunings decide -------------------------------------------------------------------------------------------


TUNED = (stock2019, rivals, imagenette, private, federated, deep)
"""The recipes that choose settings on held-out images: `artifacts(chosen)` makes theirs with what was decided."""


def tunings() -> dict[str, tuple[Candidate, ...]]:
    """The candidates of every tuning, by the name of its artifact; later ones decide anew."""
    return {name: tried for recipe in TUNED for name, tried in recipe.TUNINGS.items()} | stock2019.LATER_TUNINGS


def decide(store: Store | Records, toy: bool = False) -> Chosen:
    """What the tuning runs in a store decide and, where some of them are missing, what `chosen.json` says."""
    records = store.scan().records if isinstance(store, Store) else store
    before = committed()
    found: dict[str, Any] = {}
    for name, candidates in tunings().items():
        shrink = all_artifacts()[name].shrink if toy else None
        rows = {**before.get(name, {}), **choose(candidates, partial(_accuracy, records, shrink))}
        if rows:
            found[name] = rows
    return found


def _accuracy(records: Records, shrink: Callable[[Run], Run] | None, run: Run) -> float | None:
    record = records.get((shrink(run) if shrink else run).key)
    if record is None:
        return None
    return float(record.final["test_accuracy"]) if record.status == "finished" else math.nan


def write_chosen(store: Store, path: Path = CHOSEN) -> bool:
    """Write what the tuning runs decide into the recipe; whether that changed it."""
    text = chosen_text(decide(store))
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. It should read\n{text}") from error
    return True


# -- how long it takes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Seconds that a run takes by itself, and what each of very many side by side would take of the device.

    In between, one of k takes floor + (alone - floor) / k. On an H200 that is within a fifth of what was measured for
    a fully connected net, a wide ResNet and ResNet-110, with 1, 4 and 8 at once.
    """

    alone: float
    floor: float

    def of(self, k: int) -> float:
        """Its part of the device, one of k at once."""
        return self.floor + (self.alone - self.floor) / k


# Seconds per step on an H200 as (alone, floor), roughly as measured, with their batch. They serve until the store has
# runs of the same kind.
STEP = {
    "fc": (9.0e-4, 1.6e-4, 256),
    "cifar_nv": (1.6e-3, 1.2e-3, 128),
    "wrn_20_96": (5.2e-3, 4.0e-3, 128),
    "resnet110": (5.6e-3, 1.7e-3, 128),
    # not measured yet
    "resnet18": (3.0e-2, 2.4e-2, 256),
    "convpool_cnn_c": (2.5e-3, 1.8e-3, 100),
    "row_lstm": (8.0e-3, 1.5e-3, 128),
    "resnet_cifar": (2.0e-3, 6.0e-4, 128),
    "wrn": (1.5e-1, 1.2e-1, 1024),
}
UNKNOWN = (1.0e-2, 5.0e-3, 128)
# What a step with very few images takes of one with a usual batch, alone (a guess) and side by side (measured for
# CIFAR-NV): it is bound by latency.
SMALLEST = (0.35, 0.15)
SET_UP = 0.5  # seconds to build, trace and capture a run
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 604_388, "imagenet": 1_281_167, "digits": 1_437}
IMAGES |= {"imagenette": 9_469, "mnist": 60_000}
TOY = Estimate(1.0, 1.0)


def steps(run: Run) -> float:
    """Optimizer steps of a run."""
    images = run.data.train or IMAGES.get(run.data.name, 50_000)
    return run.epochs * math.ceil((images - run.data.held_out) / run.batch)


class Speeds:
    """Estimates from the runs that a store holds, and from a table where it holds none of the kind.

    Runs count whose part of the device was measured by their pace: an even part of a device that others shared says
    little, and less how many might have.
    """

    def __init__(self, records: Iterable[Record] = (), hardware: str | None = None) -> None:
        """`hardware`: the runs of which device count, by the beginning of its name; None: of any GPU."""
        self._floors: dict[Any, list[float]] = {}
        for record in records:
            seconds, device = record.final.get("device_seconds"), str(record.about.get("hardware", ""))
            fits = device.startswith(hardware) if hardware is not None else not device.startswith("CPU")
            if record.status == "finished" and seconds and fits and (record.final.get("pace") or record.together == 1):
                k, times = record.together, _alone_to_floor(record.run)
                floor = seconds / (1 + (times - 1) / k) / steps(record.run) / _size(record.run)
                for kind in _kinds(record.run):
                    self._floors.setdefault(kind, []).append(floor)

    def __call__(self, run: Run) -> Estimate:
        if run.data.name == "digits":
            return TOY
        for kind in _kinds(run):
            if kind in self._floors:
                floor = statistics.median(self._floors[kind]) * steps(run) * _size(run)
                return Estimate(floor * _alone_to_floor(run) + SET_UP, floor + SET_UP)
        alone, floor = (seconds * steps(run) * _size(run) for seconds in _step(run))
        return Estimate(alone + SET_UP, floor + SET_UP)


def _kinds(run: Run) -> Iterator[tuple[Any, ...]]:
    """What makes two runs equally fast: first the same in all, then the same network and batch."""
    same = (run.model.name, run.batch, run.precision)
    options = run.model.options
    yield (*same, *map(options.get, ("hidden", "bias", "norm")), run.method.name, run.data.mixup > 0)
    yield (*same, options.get("norm"), run.method.name)
    yield same


def _size(run: Run) -> float:
    """How much longer a step takes than in the largest net of its name: fully connected nets go by their depth."""
    return (run.model.options["hidden"] + 2) / 21 if "hidden" in run.model.options else 1.0


def _step(run: Run) -> tuple[float, float]:
    """Seconds of a step in the largest net of the run's kind, alone and as one of very many."""
    *seconds, batch = STEP.get(run.model.name, UNKNOWN)
    alone, floor = (s * max(run.batch / batch, least) for s, least in zip(seconds, SMALLEST, strict=True))
    return alone, floor


def _alone_to_floor(run: Run) -> float:
    alone, floor = _step(run)
    return alone / floor


# -- what is done, and what fits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """An item, what it wants and what of it is missing."""

    item: Item
    wanted: tuple[Run, ...]
    missing: tuple[Run, ...]
    seconds: float  # of the device, for what is missing here and in no item before
    waits: bool = False  # for the item that decides its settings; what it wants is not final


def standing(
    store: Store | Records,
    items: Sequence[Item] = ITEMS,
    *,
    toy: bool = False,
    speeds: Speeds | None = None,
    side_by_side: int = 8,
) -> list[Standing]:
    """How far each item is."""
    records = store.scan().records if isinstance(store, Store) else store
    speeds = Speeds(records.values()) if speeds is None else speeds
    decided = decide(records, toy)
    artifacts = {**all_artifacts(), **{a.name: a for recipe in TUNED for a in recipe.artifacts(decided)}}
    by_name = {item.name: item for item in ITEMS}
    found: list[Standing] = []
    seen: set[str] = set()
    for item in items:
        wanted = item.runs(artifacts, toy, records)
        missing = tuple(run for run in wanted if run.key not in records)
        first = by_name[item.after].runs(artifacts, toy, records) if item.after else ()
        waits = any(run.key not in records for run in first)
        seconds = sum(speeds(run).of(side_by_side) for run in missing if run.key not in seen)
        found.append(Standing(item, wanted, missing, seconds, waits))
        seen |= {run.key for run in missing}
    return found


def table(standings: Sequence[Standing]) -> str:
    """The list as text: item, runs done and wanted, minutes left."""
    lines = [("item", "artifact", "done", "minutes left", "")]
    for s in standings:
        note = f"{s.item.note} (after {s.item.after})" if s.waits and s.missing else s.item.note
        done = f"{len(s.wanted) - len(s.missing)}/{len(s.wanted)}"
        lines.append((s.item.name, s.item.artifact, done, _minutes(s.seconds), note))
    wanted, missing = ({run.key for s in standings for run in getattr(s, name)} for name in ("wanted", "missing"))
    total = _minutes(sum(s.seconds for s in standings))
    lines.append(("all", "", f"{len(wanted) - len(missing)}/{len(wanted)}", total, "each run counted once"))
    a, b, c, d = (max(len(line[i]) for line in lines) for i in range(4))
    return "\n".join(
        f"{item:<{a}}  {artifact:<{b}}  {done:>{c}}  {minutes:>{d}}  {note}".rstrip()
        for item, artifact, done, minutes, note in lines
    )


def _minutes(seconds: float) -> str:
    return "-" if not seconds else f"{seconds / 60:.1f}"


MARGIN = 1.2  # estimates are off by some, and every start of the program takes a while


def plan(
    runs: Iterable[Run],
    seconds: float,
    estimate: Callable[[Run], Estimate],
    side_by_side: int = 8,
    begun: Mapping[str, float] | None = None,
) -> list[Run]:
    """Which of the runs, in order, can be finished side by side in so many seconds.

    A run that does not fit is passed over, and a smaller one behind it may take its place. `begun`: the part that is
    done of runs with a checkpoint, by key; they go first, and always: they can be resumed here and nowhere else.
    """
    begun = begun or {}
    chosen: list[Run] = []
    floor = extra = longest = 0.0
    for run in sorted({run.key: run for run in runs}.values(), key=lambda run: run.key not in begun):
        one, left = estimate(run), 1 - begun.get(run.key, 0.0)
        least, more = floor + left * one.floor, extra + left * (one.alone - one.floor)
        slowest = max(longest, left * one.alone)
        whole = max(slowest, least + more / min(len(chosen) + 1, side_by_side))
        if run.key in begun or MARGIN * whole <= seconds:
            chosen.append(run)
            floor, extra, longest = least, more, slowest
    return chosen


# -- a sitting ---------------------------------------------------------------------------------------------------------


@dataclass
class Sitting:
    """What `work` did."""

    trained: list[Record] = field(default_factory=list)
    unfinished: list[Run] = field(default_factory=list)  # in progress, or not begun, when time was up
    interrupted: bool = False
    left: list[Standing] = field(default_factory=list)
    waiting: list[Item] = field(default_factory=list)  # items whose settings are not decided yet

    def sentence(self) -> str:
        parts = [in_words(self.trained)]
        if self.unfinished:
            parts.append(f"{len(self.unfinished)} in progress or not begun: the same command goes on")
        missing = len({run.key for s in self.left for run in s.missing})
        parts.append(
            f"{missing} left, about {sum(s.seconds for s in self.left) / 60:.0f} minutes" if missing else "done"
        )
        for first in dict.fromkeys(item.after for item in self.waiting):
            names = ", ".join(item.name for item in self.waiting if item.after == first)
            parts.append(f"{names} {'waits' if ', ' not in names else 'wait'} for {first}")
        return "; ".join(parts) + "."


def work(
    store: Store,
    items: Sequence[Item] = ITEMS,
    *,
    minutes: float = math.inf,
    sitting: float | None = None,
    toy: bool = False,
    data_dir: Path | None = None,
    device: str | None = None,
    side_by_side: int | None = None,
    train: Callable[..., Outcome] = train_all,
    say: Callable[[str], None] = print,
) -> Sitting:
    """Train what is missing and can be finished, in order.

    After `minutes` what is in progress is saved, and the same command goes on with it. `sitting`: minutes until this
    disk is lost, where that is later; only what fits into them is begun. `train` does the work, as `train_all` does.
    """
    start = time.monotonic()
    where = chosen_device(device)
    hardware = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    width = side_by_side or (8 if where.type == "cuda" else 1)
    done = Sitting()
    while True:
        gone = time.monotonic() - start
        records = store.scan().records
        speeds = Speeds(records.values(), hardware)
        found = standing(records, items, toy=toy, speeds=speeds, side_by_side=width)
        left = 60 * (minutes if sitting is None else max(minutes, sitting)) - gone
        todo = _round(found, store, left, speeds, width)
        done.left, done.waiting = found, [s.item for s in found if s.waits and s.missing]
        if not todo or gone >= 60 * minutes:
            return done
        share = sum(speeds(run).of(min(width, len(todo))) for run in todo) / 60
        say(f"{counted(len(todo), 'run')} of {', '.join(_of(found, todo))}: about {share:.1f} minutes")
        one = train(
            todo, store, data_dir=data_dir, device=device, side_by_side=side_by_side, minutes=minutes - gone / 60
        )
        done.trained += one.trained
        done.unfinished, done.interrupted = one.unfinished, one.interrupted
        if one.interrupted or not one.trained:
            done.left = standing(store, items, toy=toy, side_by_side=width)
            return done


def _round(found: Sequence[Standing], store: Store, seconds: float, speeds: Speeds, width: int) -> list[Run]:
    """What to train next: what comes before the first item that waits or, if none of that fits, whatever does."""
    for several in (takewhile(lambda s: not s.waits, found), found):
        missing = {run.key: run for s in several if not s.waits for run in s.missing}
        begun = {key: part for key, run in missing.items() if (part := _part_done(store, run)) is not None}
        if todo := plan(missing.values(), seconds, speeds, width, begun):
            return todo
    return []


def _part_done(store: Store, run: Run) -> float | None:
    """How much of a run its checkpoint holds; None if there is none."""
    state = load_checkpoint(store.checkpoint(run))
    return None if state is None else min(1.0, state["training"]["done"] / steps(run))


def _of(found: Sequence[Standing], todo: Sequence[Run]) -> list[str]:
    keys = {run.key for run in todo}
    return [s.item.name for s in found if any(run.key in keys for run in s.missing)]
