"""Pictures of what the instruments measure: every `plot_*` function returns a matplotlib Figure.

>>> plot_layer_energy({"as trained": before, "balanced": after}).savefig("energy.svg")

Titles say the message and can be replaced; captions say what was measured. `style.save` writes a figure atomically.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .energy import ColumnEnergy, EnergyByCycle, Imbalance, LayerEnergy
from .landscape import GradientScan
from .learning_rate import FilterNorms
from .propagation import ForwardNorms, GradientNorms
from .shift import ChannelMeans
from .style import COLOURS, GREY, figure, finish, line, save, shades
from .units import DeadUnits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = "layer, from input to output"
_MANY = 24  # names that can still be read along an axis


def plot_gradient_scans(
    runs: Mapping[str, Sequence[tuple[float, GradientScan | Mapping[str, Any]]]],
    *,
    title: str = "How far the gradient can be trusted",
    caption: str = "",
    x_label: str = "training step",
    highest: float | None = None,
) -> Figure:
    """Landscape, predictiveness and smoothness over training: a column for each run, a row for each instrument.

    `runs` maps a name to (step, scan) pairs; a scan may also be the dict that a `Recorder` has written. The first run
    is drawn in grey behind the others. `highest` cuts the loss axis.
    """
    read = {name: [(step, _scan(scan)) for step, scan in scans] for name, scans in runs.items()}
    columns = len(read)
    width = max(2.35 * columns + 0.6, 5.6)
    made, grid = figure(3, columns, title=title, caption=caption, width=width, height=6.6, sharex=True, sharey="row")
    rows = grid if columns > 1 else [[axes] for axes in grid]
    first = next(iter(read))
    for column, name in enumerate(read):
        for shown, is_other in ((first, True), (name, False)):
            if is_other and name == first:
                continue
            colour = GREY if is_other else line(column)["color"]
            _draw_scans([row[column] for row in rows], read[shown], colour, is_other, shown)
        rows[0][column].set_title(name, fontsize=10, color=line(column)["color"], fontweight="bold")
        rows[2][column].set_xlabel(x_label)
    for row, label in zip(rows, ("loss", "change of the gradient", "smoothness β"), strict=True):
        row[0].set_ylabel(label)
        for axes in row:
            axes.set_yscale("log")
            finish(axes)
            if axes.get_legend() is not None and axes is not rows[0][min(1, columns - 1)]:
                axes.get_legend().remove()
    if highest is not None and rows[0][0].get_ylim()[1] > highest:
        losses = (loss for scans in read.values() for _, scan in scans for loss in (scan["loss"], *scan["losses"]))
        rows[0][0].set_ylim(min((loss for loss in losses if 0 < loss < highest), default=highest / 10) / 1.5, highest)
    return made


def _draw_scans(
    panels: Sequence[Any], scans: Sequence[tuple[float, dict[str, Any]]], colour: str, behind: bool, name: str
) -> None:
    steps = [step for step, _ in scans]
    label = f"grey: {name}" if behind else None
    for axes, key in zip(panels[:2], ("losses", "changes"), strict=True):
        low, high = [min(s[key]) for _, s in scans], [max(s[key]) for _, s in scans]
        axes.fill_between(steps, low, high, color=colour, alpha=0.22 if behind else 0.45, linewidth=0, label=label)
        for i in _alone(low):  # neither a band nor a line shows a single moment
            axes.vlines(steps[i], low[i], high[i], color=colour, alpha=0.22 if behind else 0.45, linewidth=3)
    if not behind:
        panels[0].plot(steps, [s["loss"] for _, s in scans], color=colour, linewidth=1.0)
    beta = [s["beta"] for _, s in scans]
    panels[2].plot(steps, beta, color=colour, linewidth=1.0 if behind else 1.6, label=label)
    for i in _alone(beta):
        panels[2].plot(steps[i], beta[i], "o", color=colour, markersize=4)


def _alone(values: Sequence[float]) -> list[int]:
    """Where a number has none beside it, as the first measurement of a run that then diverged."""
    known = [False, *(math.isfinite(value) for value in values), False]
    return [i for i in range(len(values)) if known[i + 1] and not known[i] and not known[i + 2]]


def _scan(scan: GradientScan | Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a scan as lists; what has diverged is NaN and leaves a gap."""
    found = dict(scan) if isinstance(scan, Mapping) else {**scan.to_dict(), "beta": float(scan.smoothness.beta)}

    def number(value: Any) -> Any:
        if isinstance(value, list):
            return [number(item) for item in value]
        return float("nan") if value is None else value

    return {key: number(value) for key, value in found.items()}


def plot_layer_energy(
    energies: Mapping[str, LayerEnergy], *, title: str = "Energy of each layer", caption: str = ""
) -> Figure:
    """‖W‖² of every layer, one line per measurement (before and after balancing, say)."""
    made, (axes,) = figure(title=title, caption=caption, width=7.2)
    for number, (name, energy) in enumerate(energies.items()):
        layers = range(1, len(energy.names) + 1)
        axes.plot(layers, energy.energy.tolist(), label=name, **_behind(number, len(energies)))
    axes.set_yscale("log")
    axes.set_xlabel("layer, in the model's order")
    p = next(iter(energies.values())).p
    axes.set_ylabel(f"energy ‖W‖{'²' if p == 2 else f'_p^p, p = {p:g}'}")
    _whole_numbers(axes)
    finish(axes)
    return made


def plot_column_energy(
    columns: Mapping[str, ColumnEnergy], *, title: str = "Norm of every column", caption: str = ""
) -> Figure:
    """Each dot is the norm of one column of a layer's weight (stock2019, figure 6); one panel per measurement."""
    made, panels = figure(1, len(columns), title=title, caption=caption, width=5.0 * len(columns) + 0.6, sharey=True)
    for number, (axes, (name, energy)) in enumerate(zip(panels, columns.items(), strict=True)):
        for layer, norms in enumerate(energy.columns.values(), start=1):
            draw = torch.Generator().manual_seed(layer)
            spread = (torch.rand(len(norms), generator=draw) - 0.5) * 0.6  # so that dots do not hide each other
            axes.plot(
                (layer + spread).tolist(),
                norms.tolist(),
                ".",
                color=line(number + 1)["color"],
                markersize=2.0,
                alpha=0.5,
                markeredgewidth=0,
                rasterized=len(norms) > 200,
            )
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel(LAYERS)
        _whole_numbers(axes)
        finish(axes)
    panels[0].set_ylabel("norm of a column ‖W[:, j]‖")
    return made


def plot_energy_by_cycle(
    found: EnergyByCycle, *, title: str = "ENorm cycles bring a network into balance", caption: str = ""
) -> Figure:
    """Energy of every layer, a darker line for a later cycle, and the norm of the whole network (figures 7 and 9)."""
    made, (left, right) = figure(1, 2, title=title, caption=caption, width=10.5, width_ratios=[1.4, 1])
    cycles = len(found.energy) - 1
    shown = sorted({0, *(c for c in (1, 2, 3, 5, 10, 20, 50, 100, 200) if c < cycles), cycles})
    for colour, cycle in zip(shades(len(shown)), shown, strict=True):
        label = "before" if cycle == 0 else f"cycle {cycle}"
        layers = range(1, len(found.names) + 1)
        left.plot(
            layers, found.energy[cycle].tolist(), color=colour, marker="o", markersize=3.5, linewidth=1.4, label=label
        )
    left.set_xlabel(LAYERS)
    left.set_ylabel("energy ‖W‖²" if found.p == 2 else f"energy, p = {found.p:g}")
    _whole_numbers(left)
    right.plot(range(cycles + 1), found.norm.tolist(), **line(1, markersize=3.5))
    right.set_xlabel("ENorm cycles")
    right.set_ylabel("norm of the network")
    finish([left, right])
    return made


def plot_propagation(
    forward: Mapping[str, ForwardNorms],
    backward: Mapping[str, GradientNorms] | None = None,
    *,
    title: str = "How far the signal gets",
    caption: str = "",
) -> Figure:
    """Size of activations and of gradients by depth, one line per network."""
    made, panels = figure(1, 2 if backward else 1, title=title, caption=caption, width=9.4 if backward else 6.4)
    for number, (name, norms) in enumerate(forward.items()):
        look = _behind(number, len(forward), markersize=3.5)
        panels[0].plot(range(1, len(norms.names) + 1), norms.rms.tolist(), label=name, **look)
    panels[0].set_ylabel("output, root mean square")
    panels[0].set_title("forward", loc="left", fontsize=10)
    for number, (name, found) in enumerate((backward or {}).items()):
        look = _behind(number, len(forward), markersize=3.5)
        panels[1].plot(range(1, len(found.names) + 1), found.norm.tolist(), label=name, **look)
        panels[1].set_ylabel("gradient at the output, Euclidean norm")
        panels[1].set_title("backward", loc="left", fontsize=10)
    for axes in panels:
        axes.set_yscale("log")
        axes.set_xlabel(LAYERS)
        _whole_numbers(axes)
        _at_least_a_decade(axes)
        finish(axes)
        _without_legend(axes, len(forward))
    return made


def plot_imbalance(
    found: Imbalance, *, title: str = "How far each layer is from balance", caption: str = "", most: int = _MANY
) -> Figure:
    """The imbalance of each layer's output scales, largest and mean; the `most` unbalanced layers if there are many."""
    rows = sorted(zip(found.names, found.largest.tolist(), found.mean.tolist(), strict=True), key=lambda r: r[1])
    if len(rows) > most:
        rows = rows[-most:]
        caption = f"{caption} The {most} layers furthest from balance, of {len(found.names)}.".strip()
    else:
        rows = list(zip(found.names, found.largest.tolist(), found.mean.tolist(), strict=True))[::-1]
    made, (axes,) = figure(title=title, caption=caption, width=7.2, height=1.2 + 0.22 * len(rows))
    places = range(len(rows))
    axes.barh(places, [r[1] for r in rows], color=COLOURS["sky"], label="most unbalanced unit", height=0.7)
    axes.plot([r[2] for r in rows], places, "o", color=COLOURS["black"], markersize=4, label="mean over the units")
    axes.set_yticks(list(places), [shortened(r[0]) for r in rows])
    axes.set_xlabel("|log(incoming / outgoing energy)|")
    _horizontal(axes)
    return made


def plot_dead_units(
    found: DeadUnits, *, title: str = "Units that do nothing", caption: str = "", most: int = _MANY
) -> Figure:
    """The share of dead units and of zeros after each activation; the `most` affected ones if there are many."""
    rows = list(zip(found.names, found.dead.tolist(), found.saturated.tolist(), found.zeros.tolist(), strict=True))
    if len(rows) > most:
        chosen = set(sorted(range(len(rows)), key=lambda i: rows[i][1] + rows[i][2], reverse=True)[:most])
        rows = [row for i, row in enumerate(rows) if i in chosen]
        caption = f"{caption} The {most} activations with most dead units, of {len(found.names)}.".strip()
    rows = rows[::-1]
    made, (axes,) = figure(title=title, caption=caption, width=7.2, height=1.2 + 0.22 * len(rows))
    places = range(len(rows))
    axes.barh(places, [100 * r[1] for r in rows], color=COLOURS["vermillion"], label="dead units", height=0.7)
    if any(r[2] for r in rows):
        left = [100 * r[1] for r in rows]
        axes.barh(places, [100 * r[2] for r in rows], left=left, color=COLOURS["orange"], label="saturated", height=0.7)
    axes.plot(
        [100 * r[3] for r in rows], places, "|", color=COLOURS["black"], markersize=9, label="values that are zero"
    )
    axes.set_yticks(list(places), [shortened(r[0]) for r in rows])
    axes.set_xlim(0, 100)
    axes.set_xlabel("share (%)")
    _horizontal(axes)
    return made


def plot_channel_means(
    found: Mapping[str, ChannelMeans], *, title: str = "How much of the signal is mean", caption: str = ""
) -> Figure:
    """The part of each layer's output that is a constant per channel, one line per network or moment."""
    made, (axes,) = figure(title=title, caption=caption, width=7.2)
    for number, (name, means) in enumerate(found.items()):
        share = [100 * float(value) for value in means.share.values()]
        axes.plot(range(1, len(share) + 1), share, label=name, **line(number))
    axes.set_ylim(-2, 102)
    axes.set_xlabel(LAYERS)
    axes.set_ylabel("energy of the channel means (% of all)")
    _whole_numbers(axes)
    finish(axes)
    _without_legend(axes, len(found))
    return made


def plot_filter_magnitudes(
    runs: Mapping[str, Sequence[tuple[float, FilterNorms | Tensor | Sequence[float]]]],
    *,
    title: str = "Lengths of filters in training",
    caption: str = "",
    x_label: str = "training step",
    y_label: str = "length of a filter ‖w‖",
) -> Figure:
    """How the lengths of all filters spread over time, a panel per run, and their distribution at the end."""
    made, panels = figure(1, len(runs) + 1, title=title, caption=caption, width=3.9 * (len(runs) + 1), height=3.4)
    *over_time, last = panels
    for number, (axes, (name, moments)) in enumerate(zip(over_time, runs.items(), strict=True)):
        colour = line(number + 1)["color"]
        steps = [step for step, _ in moments]
        lengths = [_all(norms).sort().values for _, norms in moments]
        for low, high, alpha in ((0.0, 1.0, 0.15), (0.05, 0.95, 0.25), (0.25, 0.75, 0.45)):
            share = f"{100 * (high - low):.0f} % of filters"
            bands = [[float(x[round(q * (len(x) - 1))]) for x in lengths] for q in (low, high)]
            axes.fill_between(steps, *bands, color=colour, alpha=alpha, linewidth=0, label=share)
        axes.plot(steps, [float(x.median()) for x in lengths], color=COLOURS["black"], linewidth=1.6, label="median")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_yscale("log")
        axes.set_xlabel(x_label)
        _whole_numbers(axes)
        final = lengths[-1]
        share_below = [100 * (i + 1) / len(final) for i in range(len(final))]
        last.plot(final.tolist(), share_below, color=colour, linewidth=1.8, label=name)
    low = min(axes.get_ylim()[0] for axes in over_time)
    high = max(axes.get_ylim()[1] for axes in over_time)
    for axes in over_time:
        axes.set_ylim(low, high)
    over_time[0].set_ylabel(y_label)
    last.set_xscale("log")
    last.set_title("at the end", loc="left", fontsize=10)
    last.set_xlabel(y_label)
    last.set_ylabel("filters no longer than that (%)")
    last.set_yticks(range(0, 101, 20))
    last.set_ylim(-4, 108 + 11 * len(runs))  # room for the names above the curves
    last.legend(frameon=False, fontsize=8.5, loc="upper left")
    finish(panels)
    for axes in over_time[:-1]:  # one legend is enough
        axes.get_legend().remove()
    return made


def _all(norms: FilterNorms | Tensor | Sequence[float]) -> Tensor:
    found = norms.all if isinstance(norms, FilterNorms) else torch.as_tensor(norms)
    return found.detach().double().cpu().reshape(-1)


def shortened(name: str, letters: int = 34) -> str:
    """A long name without its middle."""
    return name if len(name) <= letters else f"{name[: letters // 3]}…{name[-(letters - letters // 3 - 1) :]}"


def _behind(number: int, lines: int, **more: Any) -> dict[str, Any]:
    """The look of the n-th line; the first of several is broad, so that one that covers it does not hide it."""
    look = line(number, **more)
    if number == 0 and lines > 1:
        look |= {"linewidth": 2.8, "markersize": look["markersize"] + 2.5}
    return look


def _without_legend(axes: Any, lines: int) -> None:
    """A single line needs no name."""
    if lines == 1 and axes.get_legend() is not None:
        axes.get_legend().remove()


def _whole_numbers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _at_least_a_decade(axes: Any) -> None:
    """A log axis that spans less than a factor of 10 makes noise look like a trend."""
    low, high = axes.get_ylim()
    if 0 < low < high < 10 * low:
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / 10**0.5, middle * 10**0.5)


def _horizontal(axes: Any) -> None:
    axes.set_ylim(-0.7, len(axes.get_yticks()) - 0.3)
    finish(axes)
    axes.grid(False)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


__all__ = [
    "COLOURS",
    "figure",
    "finish",
    "plot_channel_means",
    "plot_column_energy",
    "plot_dead_units",
    "plot_energy_by_cycle",
    "plot_filter_magnitudes",
    "plot_gradient_scans",
    "plot_imbalance",
    "plot_layer_energy",
    "plot_propagation",
    "save",
]
