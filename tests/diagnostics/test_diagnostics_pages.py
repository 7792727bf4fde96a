"""Pictures, the page of `equinorm diagnose`, and the teaching scripts."""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm import diagnostics as d
from equinorm.diagnostics import style
from equinorm.errors import UserError
from equinorm.tools.diagnose import Findings, diagnose, measure, page, random_batch, read_data, what_to_try
from equinorm.tools.sources import Input

EXAMPLES = Path(__file__).parents[2] / "examples"


def mlp(depth: int = 4, width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layer = nn.Linear(width, width)
        nn.init.kaiming_normal_(layer.weight)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def inputs(n: int = 64, width: int = 12) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(2))


# -- pictures ----------------------------------------------------------------------------------------------------------


def scans(model: nn.Module) -> list[tuple[float, Any]]:
    x = inputs()
    batch = (x, torch.arange(64) % 3)
    return [(step, d.gradient_scan(model, F.cross_entropy, batch, [0.1, 0.4])) for step in (0, 100)]


def pictures() -> dict[str, Any]:
    model, x = mlp(), inputs()
    batch = (x, torch.arange(64) % 3)
    recorded = {"loss": 2.0, "losses": [2.0, None], "changes": [1.0, 2.0], "beta": None}  # diverged, from a log
    return {
        "scans": lambda: d.plot_gradient_scans({"mine": scans(model), "theirs": [(0, recorded), (100, recorded)]}),
        "one scan": lambda: d.plot_gradient_scans({"mine": scans(model)}, highest=1.0),
        "energy": lambda: d.plot_layer_energy({"a": d.layer_energy(model), "b": d.layer_energy(model)}),
        "columns": lambda: d.plot_column_energy({"a": d.column_energy(model)}),
        "cycles": lambda: d.plot_energy_by_cycle(d.energy_by_cycle(model, x, 3)),
        "forward": lambda: d.plot_propagation({"a": d.forward_norms(model, x)}),
        "both ways": lambda: d.plot_propagation(
            {"a": d.forward_norms(model, x)}, {"a": d.gradient_norms(model, F.cross_entropy, batch)}
        ),
        "imbalance": lambda: d.plot_imbalance(d.imbalance_by_layer(model, x)),
        "few of many": lambda: d.plot_imbalance(d.imbalance_by_layer(model, x), most=2),
        "dead": lambda: d.plot_dead_units(d.dead_units(model, x)),
        "means": lambda: d.plot_channel_means({"a": d.channel_means(model, x)}),
        "filters": lambda: d.plot_filter_magnitudes({"a": [(0, d.filter_norms(model)), (1, [0.5, 1.0, 2.0])]}),
    }


@pytest.mark.parametrize("name", list(pictures()))
def test_every_axis_has_a_label_and_every_picture_a_title(name: str) -> None:
    from matplotlib.figure import Figure

    figure = pictures()[name]()
    assert isinstance(figure, Figure)
    assert figure.texts, "no title"
    for axes in figure.axes:
        named = axes.yaxis.get_label_text() or (len(axes.get_yticklabels()) and axes.get_yticklabels()[0].get_text())
        shared = axes.get_shared_y_axes().joined(axes, figure.axes[0]) or len(figure.axes) > 3
        assert named or shared, name
    labels = {axes.get_xlabel() for axes in figure.axes}
    assert labels - {""}
    figure.canvas.draw()  # nothing is left to go wrong when it is shown


def test_figures_are_the_same_bytes_twice(tmp_path: Path) -> None:
    for suffix in ("svg", "png"):
        for name in ("one", "two"):
            style.save(d.plot_layer_energy({"a": d.layer_energy(mlp())}), tmp_path / f"{name}.{suffix}")
        one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two
    assert b"<dc:date>" not in (tmp_path / "one.svg").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"one.svg", "two.svg", "one.png", "two.png"}
    with pytest.raises(ValueError, match=r"written as \.svg"):
        style.save(d.plot_layer_energy({"a": d.layer_energy(mlp())}), tmp_path / "one.jpg")


def test_colours_differ_in_grey_too() -> None:
    """Lines can be told apart in print: by marker, and neighbours by lightness or marker."""
    looks = [style.line(i) for i in range(7)]
    assert len({look["color"] for look in looks}) == 7
    assert len({look["marker"] for look in looks}) == 7


def test_the_library_part_needs_no_matplotlib() -> None:
    code = "import sys; import equinorm.diagnostics; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the page ----------------------------------------------------------------------------------------------------------


def advice(model: nn.Module, x: Tensor, **options: Any) -> str:
    return "\n".join(f"{item.serious} {item.seen} {item.advice}" for item in what_to_try(measure(model, x, **options)))


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    model, x = mlp(), inputs()
    before = copy.deepcopy(model.state_dict())
    out = tmp_path / "page.html"
    found = diagnose(model, x, out, name="a <net>", origin="last.pt & co")
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert "<script" not in text
    assert "a &lt;net&gt;" in text
    assert "last.pt &amp; co" in text
    assert text.count("<svg") == text.count("</svg>") == 5
    for row in found.symmetry.explain().rows:
        assert row.parameter in text
    assert "random" in text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert found.output_change is not None
    assert found.output_change < 1e-5


def test_the_page_is_the_same_twice() -> None:
    def text() -> str:
        found = page(measure(mlp(), inputs()))
        return re.sub(r"\d+\.\d+ s\b", "", found)  # how long it took

    assert text() == text()


def test_real_inputs_are_said_to_be_real() -> None:
    assert "64 real samples" in page(measure(mlp(), inputs(2), data=inputs()))
    assert "2 random samples" in page(measure(mlp(), inputs(2)))


def unbalanced(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight.mul_(20)
    return model


def with_dead_units(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].bias.sub_(1e3)
    return model


def growing(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(4)
    return model


RULES: dict[str, tuple[Callable[[nn.Sequential], nn.Sequential], str]] = {
    "unbalanced": (unbalanced, "out of balance"),
    "dead units": (with_dead_units, "are dead on these inputs"),
    "growing": (growing, "Activations grow by a factor of"),
}


@pytest.mark.parametrize("rule", RULES)
def test_advice_is_given_where_it_is_due_and_not_elsewhere(rule: str) -> None:
    spoil, sentence = RULES[rule]
    healthy, x = mlp(depth=4, width=64), inputs(width=64)
    equinorm.balance_(healthy, x)
    assert sentence not in advice(healthy, x)
    assert sentence in advice(spoil(mlp(depth=4, width=64)), x)


def test_advice_on_growth_fits_the_depth() -> None:
    """A factor that a few layers bear stops many from training."""
    x = inputs(width=64)
    shallow, deep = (advice(growing(mlp(depth=depth, width=64)), x) for depth in (4, 24))
    (short,) = (line for line in shallow.splitlines() if "Activations grow" in line)
    (long,) = (line for line in deep.splitlines() if "Activations grow" in line)
    assert short.startswith("False")
    assert "layers bear that" in short
    assert long.startswith("True")
    assert "cannot be trained" in long
    assert all("equinorm.data_dependent_init_(model, x)" in line for line in (short, long))


def test_the_page_is_legible_in_the_dark_and_on_a_phone() -> None:
    text = page(measure(mlp(), inputs()))
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 40rem" in text
    assert 'name="viewport"' in text


def test_balancing_ends_the_advice_to_balance() -> None:
    model, x = unbalanced(mlp()), inputs()
    assert "out of balance" in advice(model, x)
    equinorm.balance_(model, x)
    assert "out of balance" not in advice(model, x)


def test_a_mean_that_drowns_the_signal_is_seen_and_batchnorm_ends_it() -> None:
    model, x = mlp(depth=6), inputs()
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.bias.add_(20)
    assert "constant per channel" in advice(model, x)


def test_nothing_is_said_about_units_from_a_few_samples() -> None:
    found = advice(with_dead_units(mlp()), inputs(3))
    assert "are dead" not in found
    assert "samples or more" in page(measure(mlp(), inputs(3)))


def test_models_of_other_kinds() -> None:
    """No free scale, half precision, no activation that can die, and integers as inputs."""
    frozen = nn.Sequential(nn.Linear(12, 8), nn.Sigmoid(), nn.Linear(8, 3))
    assert "No scale of this network is free" in advice(frozen, inputs())
    assert "cannot be balanced" in page(measure(frozen, inputs()))
    half = mlp().bfloat16()
    assert measure(half, inputs().bfloat16()).report is not None
    assert next(half.parameters()).dtype == torch.bfloat16
    table = nn.Sequential(nn.Embedding(10, 12), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 4))
    assert isinstance(measure(table, torch.arange(10).view(2, 5)), Findings)


def test_what_cannot_be_diagnosed_is_explained(tmp_path: Path) -> None:
    class Strings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).argmax(1)

    with pytest.raises(UserError, match="cannot run on its example inputs"):
        diagnose(
            nn.Linear(3, 2),
            torch.randn(2, 4),
            tmp_path / "page.html",
            symmetry=equinorm.trace(nn.Linear(3, 2), torch.randn(2, 3)),
        )
    assert not (tmp_path / "page.html").exists()
    found = measure(Strings(), torch.randn(9, 3))
    assert found.backward is None
    assert "gradients could not be measured" in page(found)


def test_a_network_that_is_not_finite_gets_its_page() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    found = measure(model, inputs())
    text = page(found)
    assert "The output of 2 is not finite" in text
    assert "outputs could not be measured" in text


def test_real_inputs_from_a_file(tmp_path: Path) -> None:
    torch.save(inputs(), tmp_path / "x.pt")
    assert torch.equal(read_data(tmp_path / "x.pt"), inputs())
    torch.save([inputs()], tmp_path / "x.pt")
    assert isinstance(read_data(tmp_path / "x.pt"), tuple)
    torch.save({"x": 3}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="must hold a tensor"):
        read_data(tmp_path / "x.pt")
    with pytest.raises(UserError, match="cannot be read"):
        read_data(tmp_path / "none.pt")


def test_a_random_batch_is_larger_where_the_model_takes_it() -> None:
    class OnlyOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.view(12))

    assert random_batch([Input((1, 12))], mlp(), samples=16)[0].shape == (16, 12)
    assert random_batch([Input((3, 12))], mlp(), samples=16)[0].shape == (3, 12)
    assert random_batch([Input((1, 12))], OnlyOne(), samples=16)[0].shape == (1, 12)


# -- teaching scripts --------------------------------------------------------------------------------------------------


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(folder: Path) -> set[str]:
    for path in folder.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    return {path.name for path in folder.iterdir()}


def test_quadratics(tmp_path: Path) -> None:
    found = example("quadratics").main(tmp_path)
    assert drawn(tmp_path) == {"quadratics.png"}
    assert found["steepest"] == pytest.approx(10.0)
    for name, path in found["paths"].items():  # v_i <- (1 - ηλ_i) v_i
        factor = 1 - found["step_sizes"][name] * torch.tensor([10.0, 1.0], dtype=torch.float64)
        assert torch.allclose(path[-1], factor**30 * path[0], atol=1e-9)


def test_conditioning(tmp_path: Path) -> None:
    found = example("conditioning").main(tmp_path)
    assert drawn(tmp_path) == {"conditioning.png"}
    raw, normalized, whitened = found["conditions"].values()
    assert raw > 2 * normalized > 4 * whitened
    assert whitened == pytest.approx(1.0)
    raw, normalized, whitened = (float(losses[10]) for losses in found["losses"].values())
    assert raw > 10 * normalized > 10 * whitened


def test_scale_invariance(tmp_path: Path) -> None:
    found = example("scale_invariance").main(tmp_path)
    assert drawn(tmp_path) == {"scale_invariance.png"}
    assert max(found["changes"]["BatchNorm"]) < 1e-12 < 0.5 < found["changes"]["no norm"][-1]
    assert found["alignment"]["BatchNorm"] < 1e-12
    sizes = found["gradients"]["BatchNorm"]
    assert [size * factor for size, factor in zip(sizes, (0.25, 0.5, 1, 2, 4), strict=True)] == pytest.approx(
        [sizes[2]] * 5
    )


def test_weight_norm(tmp_path: Path) -> None:
    found = example("weight_norm").main(tmp_path)
    assert drawn(tmp_path) == {"weight_norm.png"}
    for run in found["runs"].values():
        moving = [c for c, step in zip(run["cosines"], run["path"].diff(dim=0).norm(dim=1), strict=True) if step > 1e-9]
        assert max(map(abs, moving)) < 1e-6  # Δv ⊥ v
        lengths, steps = run["path"].norm(dim=1), run["path"].diff(dim=0).norm(dim=1)
        assert torch.allclose(lengths[1:], (lengths[:-1].square() + steps.square()).sqrt())
        assert bool((lengths.diff() > -1e-12).all())


def test_weight_decay(tmp_path: Path) -> None:
    found = example("weight_decay").main(tmp_path)
    assert drawn(tmp_path) == {"weight_decay.png"}
    without, decayed, growing_rate = found["runs"].values()
    # chaos makes rounding grow once the run has reached its noisy end
    assert decayed["loss"][:100] == pytest.approx(growing_rate["loss"][:100], rel=1e-9)
    assert decayed["rate"][-1] > 4 * without["rate"][-1]


def test_unbalanced_net(tmp_path: Path) -> None:
    found = example("unbalanced_net").main(tmp_path, width=60)
    assert drawn(tmp_path) == {"unbalanced_columns.png", "unbalanced_cycles.png"}
    assert found["change"] < 1e-5
    cycles = found["cycles"]
    assert bool((cycles.norm.diff() <= 1e-6).all())
    assert float(cycles.norm[-1]) == pytest.approx(found["report"].norm_after, rel=1e-3)
    spread = cycles.energy.amax(1) / cycles.energy.amin(1)
    assert float(spread[0]) > 2.0 > 1.1 > float(spread[-1])


def test_equilibrium(tmp_path: Path) -> None:
    found = example("equilibrium").main(tmp_path)
    assert drawn(tmp_path) == {"equilibrium.png"}
    raw, single, double = found["sides"].values()
    assert float((raw[0] + raw[1]).abs().max()) > 1.0
    for positive, negative in (single, double):
        assert torch.allclose(positive + negative, torch.zeros(()), atol=1e-4)  # mean 0
    assert torch.allclose(double[0], torch.ones(()), atol=1e-4)
    assert float(single[0].min()) > 1 - 1e-4
    plain, balanced = (torch.stack(list(means.share.values())) for means in found["means"].values())
    assert float(plain[-1]) > 0.9
    assert float(balanced.max()) < 0.01


def test_propagation(tmp_path: Path) -> None:
    found = example("propagation").main(tmp_path)
    assert drawn(tmp_path) == {"propagation.png"}
    forward, backward = found["forward"], found["backward"]
    assert 0.5 < float(forward["scaled weight norm"][-1] / forward["scaled weight norm"][0]) < 2
    assert 0.5 < float(backward["scaled weight norm"][-1] / backward["scaled weight norm"][0]) < 2
    per_layer = float(forward["weight norm"][-1] / forward["weight norm"][0]) ** (1 / 29)
    assert per_layer == pytest.approx(
        math.sqrt(0.5), rel=0.05
    )  # a ReLU halves the energy, unit filters restore nothing
    ratios = [r for found_ in (found["by_blocks"], found["by_width"]) for rs in found_.values() for r in rs]
    assert 1 / math.e < min(ratios) <= max(ratios) < math.e


def test_every_example_is_run_here() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    elsewhere = {"timm_training", "sharded_training"}  # tests/integrations, tests/test_sharded.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested | elsewhere
