"""How the figures of the report look: a colour per method everywhere, and the same bytes every time.

Palette and finish are those of all pictures (`equinorm.diagnostics.style`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...diagnostics import style as shared

__all__ = ["COLOURS", "Look", "canvas", "looks", "svg_and_png"]

COLOURS = {**shared.COLOURS, "olive": "#A89B00"}  # for GroupNorm: Okabe and Ito's yellow, dark enough for white paper
_MARKERS = "osD^vPX<>p"
_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "equinorm", "svg.fonttype": "none"}


Line = Literal["-", "--", ":", "-."]


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    colour: str
    marker: str
    line: Line = "-"


# The methods of the papers, in any figure: pattern, colour, marker, line. What is added ("+ BN") changes the line only.
_KNOWN: tuple[tuple[str, str, str, Line], ...] = (
    (r"baseline|none|no norm\w*|standard|normal( parameterization)?", "black", "o", "-"),
    (r"bn|batch ?norm\w*", "blue", "s", "-"),
    (r"mean-only (bn|batch ?norm\w*)", "sky", "s", "-"),
    (r"gn|group ?norm\w*", "olive", "p", "-"),
    (r"ln|layer ?norm\w*", "olive", "h", "--"),
    (r"wn|weight ?norm\w*", "orange", "P", "-"),
    (r"scaled (wn|weight ?norm\w*)", "vermillion", "P", "-"),
    (r"path-?sgd", "purple", "X", "-"),
    (r"enorm-1(\.0)?", "sky", "v", "-"),
    (r"enorm-1\.1", "green", "D", "-"),
    (r"enorm(-1\.2)?", "vermillion", "^", "-"),
    (r"enorm-impl(-1(\.0)?)?", "sky", "v", "--"),
    (r"enorm-impl-1\.1", "green", "D", "--"),
    (r"enorm-impl-1\.2", "vermillion", "^", "--"),
    (r"equinorm", "green", "D", "-"),
    (r"msr|mean shift rejection|czmig", "vermillion", "^", "-"),
    (r"unit filters", "purple", "o", "-"),
    (r"scaled ws with agc", "orange", "X", "-"),
)
_LINES: tuple[Line, ...] = ("-", "--", ":", "-.")
_NAMES = {colour: name for name, colour in COLOURS.items()}
_SETTING = r"(\s+\w+\s*=?\s*[\d.]+)+$"  # the end of "BatchNorm lr 0.1"


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A look for each method: the same one in every figure as far as possible, and no two alike in this one."""
    names = list(dict.fromkeys(methods))
    chosen: dict[str, Look] = {}
    # a method alone has the first choice of its colour, before its variants
    for name in sorted(names, key=lambda name: len(_parts(name))):
        taken = {(look.colour, look.line) for look in chosen.values()}
        wanted = _wanted(name)
        chosen[name] = next((look for look in wanted if (look.colour, look.line) not in taken), wanted[0])
    return {name: chosen[name] for name in names}


def _parts(name: str) -> list[str]:
    """A method and what is added to it: "ENorm + bias, plain" is enorm, bias and plain; settings are left out."""
    first, *others = re.split(r"\s*[+,(]\s*", name.strip().lower())
    return [re.sub(_SETTING, "", first), *(part for part in others if not re.search(r"\d", part))]


def _wanted(name: str) -> list[Look]:
    """All looks, those that suit the method best first."""
    first, *additions = _parts(name)
    known = [
        Look(COLOURS[colour], marker, line) for pattern, colour, marker, line in _KNOWN if re.fullmatch(pattern, first)
    ]
    if re.search(rf"{_SETTING}|,.*\d", name) and not {"black", "blue"} & {_NAMES[look.colour] for look in known}:
        known = []  # settings of one method side by side are told apart by colour
    number = sum(ord(letter) * (i + 1) for i, letter in enumerate(name))  # hash() differs between processes
    free = [colour for key, colour in COLOURS.items() if key not in ("black", "blue")]
    others = [Look(free[(number + i) % len(free)], _MARKERS[(number + i) % len(_MARKERS)]) for i in range(len(free))]
    start = min(len(additions) + sum(_LINES.index(look.line) for look in known[:1]), len(_LINES) - 1)
    lines = (*_LINES[start:], *_LINES[:start])
    pairs = [(look, line) for look in known for line in lines] + [(look, line) for line in lines for look in others]
    return [Look(look.colour, look.marker, line) for look, line in pairs]


def canvas(width: float = 7.0, height: float = 4.3) -> Figure:
    """An empty figure without a display and without global state."""
    made = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(made)
    return made


def svg_and_png(made: Figure) -> tuple[bytes, bytes]:
    """The figure in both formats; the same figure always gives the same bytes."""
    vector, raster = io.BytesIO(), io.BytesIO()
    with rc_context(_SETTINGS):
        made.savefig(vector, format="svg")
        made.savefig(raster, format="png", metadata={"Software": None})
    # without the date and other metadata
    text = re.sub(rb"\s*<metadata>.*?</metadata>", b"", vector.getvalue(), flags=re.S)
    return re.sub(rb"[ \t]+\n", b"\n", text), raster.getvalue()
