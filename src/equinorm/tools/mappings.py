"""Mappings of a model as patterns over its layers, in the form that llm-compressor reads.

families = found(symmetry)
print(recipe(families))
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError, counted
from ..symmetry import Mapping, Symmetry, TraceError, trace
from . import sources

__all__ = ["Family", "families", "of_model", "proved", "recipe", "table"]

LAYER, OTHER = "\0", "\1"
"""In the place of a layer's number in a name, and of an expert's."""


@dataclass(eq=False)
class Family:
    """The same mapping in several layers."""

    smooth: str  # with LAYER and OTHER in the place of numbers
    balance: tuple[str, ...]
    why_not: str
    layers: list[int] = field(default_factory=list)
    every: bool = True  # whether these are all layers of that name
    count: int = 0
    scales: int = 0  # of one of them
    plus: float = 0.0
    change: float | None = None  # of the outputs, where some of them were moved in float64

    @property
    def patterns(self) -> tuple[str, list[str]]:
        """What to smooth and what to balance, as regular expressions of llm-compressor.

        >>> smooth, balance = family.patterns
        """
        number = r"\d+" if self.every else f"({'|'.join(map(str, sorted(set(self.layers))))})"

        def pattern(name: str) -> str:
            return "re:" + re.escape(name).replace(LAYER, number).replace(OTHER, r"\d+") + "$"

        return pattern(self.smooth), [pattern(name) for name in self.balance]

    def __str__(self) -> str:
        smooth, balance = (name.replace(LAYER, "*").replace(OTHER, "*") for name in (self.smooth, self.short))
        return f"{smooth} -> {balance}"

    @property
    def short(self) -> str:
        """The balanced layers without what they have in common with the smoothed one."""
        shared = 0
        for own, *others in zip(*(name.split(".") for name in (self.smooth, *self.balance)), strict=False):
            if any(other != own for other in others):
                break
            shared += 1
        return ", ".join(".".join(name.split(".")[shared:]) for name in self.balance)


def families(found: Sequence[Mapping], names: Iterable[str]) -> list[Family]:
    """Mappings that differ only by the numbers of layers and experts; `names` are those of the model's modules.

    >>> families(symmetry.mappings(), (name for name, _ in model.named_modules()))
    """
    made: dict[tuple[Any, ...], Family] = {}
    for mapping in found:
        whole = ((", ".join(mapping.smooth), mapping.balance),)
        entries = mapping.entries or whole
        for smooth, balance in entries:
            layer = _first_number(smooth)
            key = _general(smooth, layer), tuple(dict.fromkeys(_general(name, layer) for name in balance))
            why_not = re.sub(r"\d[\d.,]*(?=\.)|(?<=\.)\d+", "*", mapping.why_not)
            family = made.setdefault(
                (*key, why_not), Family(*key, why_not, scales=mapping.scales // len(entries), plus=mapping.plus)
            )
            family.count += 1
            if layer is not None:
                family.layers.append(layer)
    known = {_general(name, _first_number(name)): set[int]() for name in names}
    for name in names:
        if (layer := _first_number(name)) is not None:
            known[_general(name, layer)].add(layer)
    for family in made.values():
        place = family.smooth
        while place and place not in known:  # experts that are stacked have no modules
            place = place.rpartition(".")[0]
        family.every = set(family.layers) == known.get(place, set())
    return list(made.values())


def _first_number(name: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(found[1]) if found else None


def _general(name: str, layer: int | None) -> str:
    """A name with the layer's number, and others behind it, replaced."""
    parts, seen = name.split("."), False
    for i, part in enumerate(parts):
        if part.isdigit():
            parts[i] = OTHER if seen or int(part) != layer else LAYER
            seen = True
    return ".".join(parts)


def proved(
    every: Sequence[Family], symmetry: Symmetry, inputs: Any, say: Callable[[str], object] = lambda text: None
) -> None:
    """Move each mapping of a (small) model with values by itself, in float64, and note the largest change by family."""
    by_key = {(family.smooth, family.balance, family.why_not): family for family in every}
    names = [name for name, _ in symmetry.model.named_modules()]
    for mapping in symmetry.mappings():
        say(str(mapping.smooth[0]))
        change = symmetry.prove(mapping, inputs)
        for own in families([mapping], names):
            family = by_key.get((own.smooth, own.balance, own.why_not))
            if family is not None:
                family.change = max(change, family.change or 0.0)


def of_model(
    spec: str, arguments: Iterable[str], inputs: Sequence[str], step: Callable[[str], Any]
) -> tuple[list[Family], str]:
    """The families of a model that a user names, and a sentence about how they were proved.

    A folder of transformers is traced as a whole on the meta device; what is moved are a few of its layers, with random
    weights.
    """
    kind, _, folder = spec.partition(":")
    given = tuple(sources.parse_input(text) for text in inputs)
    with step(f"building {spec}"):
        if kind == "hf":
            empty = sources.empty_transformer(folder, arguments)
            model, own, choices, make = empty.model, empty.inputs, empty.choices, empty.make
        else:
            source = sources.load(spec, arguments)
            model, own, choices, make = source.model, source.inputs, [[()]], lambda layers: source.model
    own = given or own
    if not own:
        raise UserError(f"what does {spec} take? Give the shape of its input, such as --input 1,3,224,224")
    examples = sources.example_inputs(sources.fitting(own, model), model)
    with step("tracing"):
        try:
            traced = sources.without_values(examples) if kind == "hf" else examples
            symmetry = trace(model, traced, invariances=True, verify=False)
        except (TraceError, ValueError) as error:
            raise UserError(str(error)) from error
    found = families(symmetry.mappings(), [name for name, _ in model.named_modules()])
    if not found:
        raise UserError(f"no diagonal can move between layers of {spec}. `equinorm trace` says why")
    with step("proving") as going_on:
        for layers in choices[-1 if kind != "hf" else 0] if choices else []:
            small = make(layers)
            values = sources.example_inputs(sources.fitting(own, small), small)
            proved(found, trace(small, values, invariances=True), values, going_on)
    shown = [family.change for family in found if family.change is not None]
    if not shown:
        return found, f"{counted(len(found), 'kind')} of mappings, none moved: the model is large"
    rest = len(found) - len(shown)
    more = f", {rest} not moved" if rest else ""
    return (
        found,
        f"{counted(len(shown), 'kind')} of mappings moved in float64: outputs by {_change(max(shown))} at most{more}",
    )


def usable(every: Iterable[Family]) -> Iterator[Family]:
    """Those that have the form of other tools."""
    return (family for family in every if not family.why_not)


def _change(change: float) -> str:
    return f"{change:.0e}" if change else "0"


def recipe(every: Iterable[Family]) -> str:
    """A recipe of llm-compressor with these mappings, as YAML (whose strings may be written as in JSON)."""
    lines = ["AWQModifier:", "  mappings:"]
    for family in usable(every):
        smooth, balance = family.patterns
        lines.append(f"    - smooth_layer: {json.dumps(smooth)}")
        lines.append("      balance_layers:")
        lines += [f"        - {json.dumps(name)}" for name in balance]
    return "\n".join(lines)


def table(every: Sequence[Family]) -> str:
    """All mappings for people, those without the form of other tools with the reason."""
    lines = []
    for family in every:
        times = f"{family.count} x " if family.count > 1 else ""
        of = f"{times}{family.scales:,} scale{'' if family.scales == 1 else 's'}"
        moved = "" if family.change is None else f", outputs move by {_change(family.change)}"
        lines.append(f"{family}\n    {of}{moved}" + (f"; not for other tools: {family.why_not}" * bool(family.why_not)))
    return "\n".join(lines)
