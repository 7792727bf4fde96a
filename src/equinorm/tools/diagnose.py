"""One page about one model: what can be rescaled, how balanced it is, how far its signals get, and what to try.

>>> diagnose(model, torch.randn(16, 3, 224, 224), Path("model.html"))

The page is a single file of HTML with its pictures inside; it loads nothing.
"""

from __future__ import annotations

import copy
import html
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from .. import diagnostics
from ..balance import BalanceReport, balance_
from ..diagnostics import style
from ..errors import UserError
from ..files import write_text
from ..symmetry import Symmetry, TraceError, trace
from . import verify
from .checkpoints import first_line
from .sources import Input
from .sources import example_inputs as example_inputs_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- what is measured --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Findings:
    """Everything the page shows, measured on copies: the model itself is not touched."""

    name: str
    parameters: int
    real_inputs: bool
    samples: int
    symmetry: Symmetry
    frozen: diagnostics.FrozenScales
    dead: diagnostics.DeadUnits
    forward: diagnostics.ForwardNorms
    means: diagnostics.ChannelMeans
    energy_before: diagnostics.LayerEnergy
    backward: diagnostics.GradientNorms | None = None
    imbalance: diagnostics.Imbalance | None = None
    energy_after: diagnostics.LayerEnergy | None = None
    report: BalanceReport | None = None
    output_change: float | None = None  # relative, by balancing
    forward_after: diagnostics.ForwardNorms | None = None
    backward_after: diagnostics.GradientNorms | None = None
    notes: list[str] = field(default_factory=list)  # what could not be measured, and why


def measure(
    model: nn.Module, example_inputs: Any, *, name: str = "", data: Any = None, symmetry: Symmetry | None = None
) -> Findings:
    """Put every instrument on a copy of the model, in evaluation mode, and on a balanced copy."""
    try:
        found = trace(model, example_inputs) if symmetry is None else symmetry
    except (TraceError, ValueError) as error:
        raise UserError(str(error)) from error
    twin = _exact(copy.deepcopy(model).eval())
    inputs = _cast(example_inputs if data is None else data, twin)
    example = [(inputs,) if isinstance(inputs, Tensor) else inputs]
    outputs, _ = verify.outputs(twin, example)
    if not outputs:
        raise UserError("the model returns no tensor on these inputs, so there is nothing to look at")
    try:
        findings = Findings(
            name=name or type(model).__name__,
            parameters=sum(p.numel() for p in model.parameters()),
            real_inputs=data is not None,
            samples=_samples(inputs),
            symmetry=found,
            frozen=diagnostics.frozen_scales(found),
            dead=diagnostics.dead_units(twin, inputs),
            forward=diagnostics.forward_norms(twin, inputs),
            means=diagnostics.channel_means(twin, inputs),
            energy_before=diagnostics.layer_energy(twin),
        )
    except ValueError as error:
        raise UserError(f"{type(model).__name__} cannot be diagnosed: {error}") from error
    batch = (inputs, None)
    findings.backward = _or_note(findings, "gradients", lambda: diagnostics.gradient_norms(twin, _projection, batch))
    if found.num_scales:
        balanced = copy.deepcopy(twin)
        findings.imbalance = diagnostics.imbalance_by_layer(twin, symmetry=found.bind(twin))
        findings.report = balance_(balanced, symmetry=found.bind(balanced))
        findings.energy_after = diagnostics.layer_energy(balanced)
        after, _ = verify.outputs(balanced, example)
        findings.output_change = _or_note(findings, "outputs", lambda: verify.relative_change(outputs, after))
        findings.forward_after = diagnostics.forward_norms(balanced, inputs)
        if findings.backward is not None:
            findings.backward_after = diagnostics.gradient_norms(balanced, _projection, batch)
    return findings


def _exact(model: nn.Module) -> nn.Module:
    """In float32 at least, and with gradients for everything that can have them."""
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        model = model.float()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model


def _cast(inputs: Any, model: nn.Module) -> Any:
    """The inputs in the model's precision."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, inputs)


def _projection(outputs: Any, _: Any) -> Tensor:
    """A loss for models without one: the outputs times fixed random numbers, so that every output is heard."""
    total = None
    draw = torch.Generator().manual_seed(0)
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            weights = torch.randn(leaf.shape, generator=draw).to(leaf)
            part = (leaf * weights).sum() / max(leaf.shape[0] if leaf.ndim else 1, 1)
            total = part if total is None else total + part
    if total is None:
        raise ValueError("no output of the model depends on its parameters in a differentiable way")
    return total


def _or_note(findings: Findings, what: str, measurement: Any) -> Any:
    try:
        return measurement()
    except (RuntimeError, ValueError, UserError) as error:
        findings.notes.append(f"{what} could not be measured: {first_line(error)}")
        return None


def _samples(inputs: Any) -> int:
    first = next((t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim), None)
    return 0 if first is None else len(first)


# -- what to try -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """One thing that was seen and what may help; `serious` comes first."""

    serious: bool
    seen: str
    advice: str


_ENOUGH = 8  # samples, before anything is said about units and channels
_BEARABLE = 1e3  # by how much activations may grow or shrink over all layers
_DEEP = 20  # convolutions


def what_to_try(f: Findings) -> list[Advice]:
    """Plain words from the measurements. Every rule has its threshold in its own sentence."""
    found = [*_about_signals(f), *_about_units(f), *_about_balance(f), *_about_means(f)]
    if not found:
        found = [Advice(False, "Nothing stands out.", "No rule fired; the pictures of the page show the numbers.")]
    return sorted(found, key=lambda item: not item.serious)


def _about_signals(f: Findings) -> list[Advice]:
    found = []
    rms = f.forward.rms
    if not bool(torch.isfinite(rms).all()):
        where = f.forward.names[int((~torch.isfinite(rms)).nonzero()[0])]
        return [
            Advice(
                True,
                f"The output of {where} is not finite.",
                "Look for weights that are not finite, or a scale that overflows.",
            )
        ]
    growth = _per_layer(rms)
    if growth is not None and not 0.5 < growth < 2.0:
        verb = "grow" if growth > 1 else "shrink"
        rate, layers = max(growth, 1 / growth), len(rms)
        overall = rate ** (layers - 1)
        deep = overall > _BEARABLE
        found.append(
            Advice(
                deep,
                f"Activations {verb} by a factor of {rate:.1f} per layer on average, over {layers} layers by "
                f"{_round(overall)}.",
                "Such a network cannot be trained as it is. "
                "Start it from data: equinorm.weight_norm_(model), then equinorm.data_dependent_init_(model, x)."
                if deep
                else f"{layers} layers bear that. If training starts slowly, begin from data: "
                "equinorm.weight_norm_(model), then equinorm.data_dependent_init_(model, x).",
            )
        )
    if f.backward is not None:
        spread = f.backward.norm[f.backward.norm > 0]
        ratio = float(spread.amax() / spread.amin()) if len(spread) else 1.0
        if ratio > 1e3:
            found.append(
                Advice(
                    False,
                    f"The gradient differs by a factor of {_round(ratio)} between layers.",
                    "One learning rate does not fit all layers. Take an optimizer that normalizes its steps "
                    "(torch.optim.AdamW), or a norm: equinorm.convert(model, 'groupnorm', x).",
                )
            )
    return found


def _about_units(f: Findings) -> list[Advice]:
    found: list[Advice] = []
    if f.samples < _ENOUGH:
        return found  # on a few samples every unit that is off looks dead
    total = float(f.dead.total) if f.dead.names else 0.0
    if total > 0.05:
        worst = f.dead.names[int(f.dead.dead.argmax())]
        noise = "" if f.real_inputs else " These are random inputs: measure on real data before you act on it."
        found.append(
            Advice(
                f.real_inputs,
                f"{100 * total:.0f} % of all units are dead on these inputs, most of them in {worst}.{noise}",
                "Dead units neither compute nor learn. Before training: lower the learning rate or warm up. After it: "
                "prune them."
                if f.real_inputs
                else "Save a batch with torch.save(x, 'batch.pt') and run this again with --data batch.pt.",
            )
        )
    if f.dead.names and float(f.dead.saturated.amax()) > 0.1:
        worst = f.dead.names[int(f.dead.saturated.argmax())]
        share = 100 * float(f.dead.saturated.amax())
        found.append(
            Advice(
                False,
                f"{share:.0f} % of the units of {worst} sit at their bound.",
                "No gradient passes there. Make the weights before it smaller, or put a norm there: "
                "equinorm.convert(model, 'groupnorm', x).",
            )
        )
    return found


def _about_balance(f: Findings) -> list[Advice]:
    if f.report is None or f.imbalance is None or not f.imbalance.names:
        why = "; ".join(f.symmetry.explain().summary.splitlines()[1:2])
        return [
            Advice(
                False,
                f"No scale of this network is free ({why or 'see the plan below'}).",
                "ENorm has nothing to do here. To train without batch statistics change the layers: "
                "equinorm.convert(model, 'unit_filters', x).",
            )
        ]
    found = []
    overall, report = float(f.imbalance.overall), f.report
    saved = 100 * (1 - (report.norm_after / report.norm_before) ** 2)
    worst = f.imbalance.names[int(f.imbalance.largest.argmax())]
    if saved > 10:  # a single unit far from balance is no reason to do anything
        found.append(
            Advice(
                saved > 50,
                f"The network is out of balance: at {worst} a unit's incoming and outgoing energy differ by a factor "
                f"of {_round(math.exp(overall))}. Balanced, the same function has {saved:.0f} % less squared norm.",
                "equinorm.balance_(model, x) before fine-tuning, quantization or weight decay; equinorm.ENorm(...) "
                "keeps it balanced in training.",
            )
        )
    if report.held:
        found.append(
            Advice(
                False,
                f"{report.held:,} scales could not be balanced (in {', '.join(report.held_in[:3])}).",
                "They belong to units without incoming or outgoing weight: dead by their weights, safe to prune.",
            )
        )
    if f.frozen.share > 0.5:
        found.append(
            Advice(
                False,
                f"{100 * f.frozen.share:.0f} % of the units are frozen: what follows them fixes their scale.",
                "The plan below says why for each. Norms hide the scale of what is before them, so weight decay acts "
                "there as a learning rate.",
            )
        )
    return found


def _about_means(f: Findings) -> list[Advice]:
    modules = list(f.symmetry.model.modules())
    normed = any(isinstance(m, _BatchNorm) for m in modules)
    if normed or f.samples < _ENOUGH or not f.means.share:
        return []
    share = {name: float(value) for name, value in f.means.share.items()}
    high = [name for name, value in share.items() if value > 0.9]
    if len(high) < max(2, len(share) // 4):
        return []
    convolutions = sum(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in modules)
    return [
        Advice(
            False,
            f"In {len(high)} of {len(share)} layers more than 90 % of the output's energy is a constant per channel.",
            "The mean shift drowns the signal. In training, take it off: equinorm.convert(model, "
            + ("'msr', x), which is for deep nets of convolutions." if convolutions > _DEEP else "'equinorm', x)."),
        )
    ]


def _per_layer(sizes: Tensor) -> float | None:
    """The average factor from layer to layer, from the first to the last but one (a classifier has its own scale)."""
    inner = sizes[:-1] if len(sizes) > 3 else sizes
    if len(inner) < 3 or float(inner[0]) <= 0 or float(inner[-1]) <= 0:
        return None
    return float(inner[-1] / inner[0]) ** (1 / (len(inner) - 1))


def _round(number: float) -> str:
    return f"{number:,.0f}" if number < 1e6 else f"{number:.0e}"


# -- the page ----------------------------------------------------------------------------------------------------------


def read_data(path: Path) -> Any:
    """Real inputs from a .pt file: a tensor, a tuple of arguments, or a dict of arguments by name."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path} cannot be read: {first_line(error)}. Save a tensor with torch.save(x, file)"
        ) from error
    if isinstance(data, list):
        data = tuple(data)
    leaves = pytree.tree_leaves(data)
    if not isinstance(data, Tensor | tuple | dict) or not leaves or not all(isinstance(x, Tensor) for x in leaves):
        raise UserError(f"{path} must hold a tensor, a tuple of tensors or a dict of tensors, the arguments of forward")
    return data


def random_batch(inputs: Sequence[Input], model: nn.Module, samples: int = 16, seed: int = 0) -> Any:
    """Random inputs as `sources.example_inputs` makes them, with more samples where one was asked for and the model
    takes more."""
    one = example_inputs_of(inputs, model, seed)
    if any(i.shape[:1] != (1,) for i in inputs):
        return one
    many = example_inputs_of([replace(i, shape=(samples, *i.shape[1:])) for i in inputs], model, seed)
    try:
        with torch.no_grad():
            diagnostics.forward_norms(model, many)
    except Exception:  # whatever a model that was made for one sample does not like
        return one
    return many


def diagnose(
    model: nn.Module,
    example_inputs: Any,
    out: Path,
    *,
    name: str = "",
    origin: str = "",
    data: Any = None,
    symmetry: Symmetry | None = None,
) -> Findings:
    """Measure a model and write the page; returns what was measured.

    Args:
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        out: the file to write; replaced atomically.
        name, origin: what the page calls the model, and where its weights came from.
        data: real inputs, in the form of `example_inputs`; without them the example inputs are taken, and the page says
            that they are random.
        symmetry: from `equinorm.trace`, to save tracing again.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("the page needs matplotlib: pip install 'equinorm[lab]'") from error
    findings = measure(model, example_inputs, name=name, data=data, symmetry=symmetry)
    write_text(out, page(findings, origin))
    return findings


def page(f: Findings, origin: str = "") -> str:
    """The page as text."""
    body = [
        _header(f, origin),
        _cards(f),
        _section("What to try", _advice(f)),
        _section("Balance", _balance(f)),
        _section("Signals", _signals(f)),
        _section("Units", _units(f)),
        _section("What can be rescaled, and why not", _plan(f)),
        _footer(f),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(f.name)}: diagnosis</title>\n<style>{_CSS}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _header(f: Findings, origin: str) -> str:
    where = f"<p class=lead>{_text(origin)}</p>" if origin else ""
    return f"<header><p class=kicker>equinorm diagnose</p><h1>{_text(f.name)}</h1>{where}</header>"


def _cards(f: Findings) -> str:
    numbers = [
        (_compact(f.parameters), "parameters"),
        (f"{f.symmetry.num_scales:,}", "free scales"),
        (f"{100 * f.frozen.share:.0f} %", "of units frozen"),
    ]
    if f.report is not None and f.imbalance is not None:
        factor = math.exp(float(f.imbalance.overall))
        numbers += [
            (f"{_round(factor) if factor >= 10 else f'{factor:.1f}'} : 1", "largest imbalance"),
            (f"-{100 * (1 - (f.report.norm_after / f.report.norm_before) ** 2):.0f} %", "squared norm by balancing"),
        ]
    if f.dead.names and f.samples >= _ENOUGH:
        numbers.append((f"{100 * float(f.dead.total):.1f} %", "of units dead"))
    cells = "".join(
        f"<div class=card><b>{_text(value)}</b><span>{_text(label)}</span></div>" for value, label in numbers
    )
    return f"<div class=cards>{cells}</div>"


def _advice(f: Findings) -> str:
    items = [
        f"<li class={'serious' if item.serious else 'mild'}><b>{_text(item.seen)}</b><br>{_text(item.advice)}</li>"
        for item in what_to_try(f)
    ]
    notes = "".join(f"<p class=note>{_text(note)}</p>" for note in f.notes)
    return f"<ul class=advice>{''.join(items)}</ul>{notes}"


def _balance(f: Findings) -> str:
    if f.report is None or f.energy_after is None or f.imbalance is None:
        return "<p>No scale is free, so this network cannot be balanced: every network of its function is this one.</p>"
    text = (
        "A hidden unit's incoming weights can be multiplied by a number and its outgoing ones divided by it without "
        "any change of the function. Balanced is the network of least norm among all of these. "
        f"Here: {str(f.report).replace(' -> ', ' to ')}."
    )
    if f.output_change is not None:
        text += f" Outputs of the balanced network differ by {f.output_change:.0e} (relative)."
    energies = {"as it is": f.energy_before, "balanced, same function": f.energy_after}
    return (
        f"<p>{_text(text)}</p>"
        + _picture(
            diagnostics.plot_layer_energy(energies, title="Energy of each layer, before and after balancing"),
            "Squared norm of every weight, in the order in which the model registers its layers. Where the line of the "
            "balanced network covers the other one, nothing had to move.",
        )
        + _picture(
            diagnostics.plot_imbalance(f.imbalance),
            "For the units that each layer writes: the logarithm of the energy that comes in over the energy that goes "
            "out. 0.69 is a factor of 2, 2.3 one of 10; balancing makes it 0.",
        )
    )


def _signals(f: Findings) -> str:
    kind = "real inputs" if f.real_inputs else "random inputs"
    names = {"as it is": f.forward}
    backward = {"as it is": f.backward} if f.backward is not None else None
    if f.forward_after is not None:
        names["balanced"] = f.forward_after
    if backward is not None and f.backward_after is not None:
        backward["balanced"] = f.backward_after
    figure = diagnostics.plot_propagation(names, backward, title="Activations and gradients by depth")
    caption = (
        f"On {f.samples} {kind}, in evaluation mode, in the order in which the layers run. Gradients are those of the "
        "outputs times fixed random numbers, since a checkpoint has no loss. Flat lines are good; a straight slope on "
        "this logarithmic axis is growth or decay by a factor per layer."
    )
    if f.samples < _ENOUGH:
        return _picture(figure, caption) + f"<p class=note>Channel means need {_ENOUGH} samples or more.</p>"
    means = diagnostics.plot_channel_means({"as it is": f.means}, title="How much of each layer's output is mean")
    return _picture(figure, caption) + _picture(
        means, "Energy of the channel means over all energy: at 100 % a layer passes on a constant and no information."
    )


def _units(f: Findings) -> str:
    if not f.dead.names:
        return "<p>No activation of this model can be dead or saturated, or none was found.</p>"
    kind = "real" if f.real_inputs else "random"
    if f.samples < _ENOUGH:
        return f"<p class=note>Whether units are dead needs {_ENOUGH} samples or more; there were {f.samples}.</p>"
    caption = (
        f"A unit is dead if its activation is zero for all {f.samples} {kind} inputs at all positions, saturated if it "
        "sits at its bound. About half of all values are zero after a ReLU at initialization."
    )
    return _picture(diagnostics.plot_dead_units(f.dead), caption)


def _plan(f: Findings) -> str:
    explanation = f.symmetry.explain()
    lines = "".join(f"<p>{_text(line)}</p>" for line in explanation.summary.splitlines())
    rows, last = [], None
    for row in explanation.rows:
        again = row.parameter == last
        last = row.parameter
        state = "free" if row.free == row.total else "part" if row.free else "frozen"
        free = f"{row.free:,}" if row.free == row.total else f"{row.free:,} of {row.total:,}"
        rows.append(
            f"<tr class={'again' if again else 'first'}><td>{'' if again else _text(row.parameter)}</td>"
            f"<td>{'' if again else _text(' x '.join(map(str, row.shape)) or 'scalar')}</td><td>{_text(row.axis)}</td>"
            f"<td class={state}>{free}</td><td>{_text(row.because)}</td></tr>"
        )
    table = (
        "<table><thead><tr><th>parameter</th><th>shape</th><th>axis</th><th>free</th><th>frozen because</th></tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )
    parameters = len({row.parameter for row in explanation.rows})
    opened = " open" if len(rows) <= 60 else ""
    return (
        f"{lines}<details{opened}><summary>All {parameters} parameters</summary><div class=wide>{table}</div></details>"
    )


def _footer(f: Findings) -> str:
    versions = f"equinorm {version('equinorm')}, torch {torch.__version__}, Python {platform.python_version()}"
    inputs = (
        f"{f.samples} real samples" if f.real_inputs else f"{f.samples} random samples (give real ones with --data)"
    )
    return f"<footer>Measured on copies of the model, on {_text(inputs)}. {_text(versions)}.</footer>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>\n{content}</section>"


def _picture(figure: Figure, caption: str) -> str:
    return f"<figure>{style.svg(figure)}<figcaption>{_text(caption)}</figcaption></figure>"


def _text(text: str) -> str:
    return html.escape(str(text))


def _compact(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


_CSS = """
:root { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --tint: #f6f8fa; --blue: #0072B2;
  --vermillion: #D55E00; --green: #009E73; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a0a4a8; --line: #383c41; --paper: #1e2125;
  --tint: #16181b; --blue: #74bdf0; --vermillion: #ff9a52; --green: #4ecfa4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--tint); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
header { margin-bottom: 1.25rem; }
h1 { font-size: 2rem; margin: 0; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 .75rem; }
.kicker { color: var(--blue); font-weight: 600; margin: 0 0 .25rem; letter-spacing: .02em; }
.lead, .note { color: var(--soft); margin: .35rem 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem;
  margin: 0 0 1.25rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1rem; }
.card b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.card span { color: var(--soft); font-size: .88rem; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem 1.4rem;
  margin: 0 0 1.25rem; }
section > p { margin: 0 0 .9rem; }
.advice { list-style: none; margin: 0; padding: 0; }
.advice li { border-left: 4px solid var(--blue); padding: .15rem 0 .15rem .9rem; margin: 0 0 .9rem; }
.advice li.serious { border-color: var(--vermillion); }
.advice li:last-child { margin-bottom: 0; }
figure { margin: 1.1rem 0 0; }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff; border-radius: 6px; }
@media (max-width: 40rem) { main { padding: 1rem .6rem 2rem; } section { padding: .9rem; } figure { overflow-x: auto; }
  figure svg { min-width: 34rem; } }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; }
details summary { cursor: pointer; color: var(--blue); font-weight: 600; }
.wide { overflow-x: auto; margin-top: .75rem; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line);
  padding: .3rem .6rem; }
td { padding: .22rem .6rem; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 16rem; color: var(--soft); }
tr.first td { border-top: 1px solid var(--line); }
td.free { color: var(--green); } td.frozen { color: var(--vermillion); }
footer { color: var(--soft); font-size: .88rem; }
@media print { body { background: #fff; color: #000; } section, .card { break-inside: avoid; border-color: #bbb; } }
"""

__all__ = ["Advice", "Findings", "diagnose", "measure", "page", "random_batch", "read_data", "what_to_try"]
