"""The picture on the first screen: every number that a paper prints, and how far ours is from it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from .results import Number, Result, Verdict
from .style import COLOURS, canvas

__all__ = ["draw"]

_FARTHEST = 4.0
"""Points; what is farther off stands at the edge."""
_LOOKS: tuple[tuple[Verdict, str, str, str], ...] = (
    ("reproduced", "green", "o", "within the tolerance"),
    ("higher", "blue", "^", "higher than printed"),
    ("not reproduced", "vermillion", "v", "lower"),
)


def draw(results: Sequence[Result]) -> Figure | None:
    """A line for each table or figure with accuracies that the paper prints; None if there is none."""
    lines = [(result, [n for n in result.numbers if _counts(n)]) for result in results if not result.toy]
    lines = [(result, numbers) for result, numbers in lines if numbers]
    if not lines:
        return None
    made = canvas(5.6, 1.2 + 0.25 * len(lines))  # narrow, so that a phone shows it legibly
    axes = made.subplots()
    for height, (_, numbers) in enumerate(lines):
        for verdict, colour, marker, _ in _LOOKS:
            chosen = [number for number in numbers if number.verdict == verdict]
            places = [max(-_FARTHEST, min(_FARTHEST, number.difference or 0.0)) for number in chosen]
            axes.scatter(
                places, [height] * len(chosen), s=34, color=COLOURS[colour], marker=marker, alpha=0.75, linewidths=0
            )
    for _, colour, marker, label in _LOOKS:
        axes.scatter([], [], s=34, color=COLOURS[colour], marker=marker, label=label)
    axes.axvline(0.0, color=COLOURS["black"], linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(lines)), [result.artifact.name for result, _ in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(-_FARTHEST - 0.3, _FARTHEST + 0.3)
    axes.set_xlabel(f"points of accuracy (at the edge: {_FARTHEST:g} or more)")
    axes.set_title("Our accuracies minus the papers'", loc="left", fontsize=11)
    made.legend(loc="outside lower left", frameon=False, ncols=3, fontsize=9, handletextpad=0.2, columnspacing=1.2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    return made


def _counts(number: Number) -> bool:
    return number.difference is not None and number.artifact.metric.partition("@")[0].endswith("accuracy")
