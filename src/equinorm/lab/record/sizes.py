"""Accuracy against batch size: what is chosen on held-out images, for every method alike, and what is run with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import METHODS, Config, method
from .log import mean
from .runner import Runner

__all__ = ["SECOND_NET", "batch", "choose", "chosen_rates", "chosen_setting", "lengths", "second_net", "settings"]

ORDER = ("unit", "batchnorm", "groupnorm", "ws_agc", "msr", "equinorm")
DECIDING = ("unit", "batchnorm", "groupnorm")
SIZES = (1024, 128, 32, 8, 4, 2)
SMALL = 32
"""Up to this size steps are bound by the number of their kernels, so they are compiled."""
TOGETHER = 8
"""Up to this size all seeds go side by side: steps on few images leave most of the device idle."""
CHOSEN_AT = (512, 32)
SHORT, LONG = 3.0, 10.0
"""Epochs."""
LONG_SIZES = (128, 32, 2)

SECOND_NET: dict[str, Any] = {
    "net": "resnet20",
    "widths": (16, 32, 64),
    "groups": 8,
    "whitening_epochs": 1e9,
    "dirac": False,  # the identity of a channel of zeros is a filter that BatchNorm divides by zero
}
SECOND_NET_SIZES = (128, 2)

FACTORS = (1.0, 0.5, 2.0)
RULES = ("root", "sum")
NOISES = (0.0, 0.1, 0.2)
OWN_START = ("msr", "equinorm")
"""Methods that draw their filters as they must, whatever `dirac` says."""

Setting = dict[str, Any]


# -- rates, over one epoch ---------------------------------------------------------------------------------------------


def choose(run: Runner) -> None:
    """The factor of all rates, and which of the two rules, for every method alike: one epoch, two sizes, held out.

    Where the best factor is the first or the last of the grid, the grid goes on by one, twice at most.
    """
    for rule in RULES:
        for factor in FACTORS:
            for size in CHOSEN_AT:
                runs = [(_name(norm, factor, rule), _chosen_run(norm, size, factor, rule), 0) for norm in ORDER]
                run.side_by_side("choose", runs, "held-out")
    for _ in range(2):
        for norm in ORDER:
            best = chosen_rates(run, norm)
            tried = {row["config"]["factor"] for row in run.log.of("choose", method=norm)}
            beyond = {min(tried): best["factor"] / 2, max(tried): best["factor"] * 2}.get(best["factor"])
            for size in CHOSEN_AT if beyond else ():
                config = _chosen_run(norm, size, beyond or 1.0, best["rule"])
                run.side_by_side("choose", [(_name(norm, beyond or 1.0, best["rule"]), config, 0)], "held-out")
    run.forget()
    for norm in ORDER:
        run.say(f"chosen for {norm}: {chosen_rates(run, norm)}")


def _name(norm: str, factor: float, rule: str) -> str:
    return f"{norm}, factor {factor:g}, {rule}"


def _chosen_run(norm: str, size: int, factor: float, rule: str) -> Config:
    return method(norm, batch=size, epochs=1.0, factor=factor, rule=rule)


def chosen_rates(run: Runner, norm: str) -> Setting:
    """The factor and the rule with the best mean accuracy over the two sizes; 1 and "root" if nothing was tried."""
    return _best(run, "choose", norm, ("factor", "rule")) or {"factor": 1.0, "rule": "root"}


def _best(run: Runner, part: str, norm: str, fields: Sequence[str]) -> Setting | None:
    """The values of these fields with the best mean accuracy, of those that were run at both sizes."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in run.log.of(part, method=norm, images="toy" if run.toy else "cifar10"):
        values = tuple(row["config"].get(field, getattr(Config(), field)) for field in fields)  # older rows have fewer
        found.setdefault(values, []).append(row["accuracy"])
    complete = {values: mean(both) for values, both in found.items() if len(both) == len(CHOSEN_AT)}
    if not complete:
        return None
    best = max(complete, key=lambda values: complete[values])
    return dict(zip(fields, best, strict=True))


# -- settings, over three epochs ---------------------------------------------------------------------------------------


def settings(run: Runner) -> None:
    """Rates, noise and the start of the filters over three epochs, around what `choose` found.

    One change at a time, then what gained together. All methods have the same tries, but for changes that a method
    does not know.
    """
    _try_all(run, "settings", {norm: _tries(norm, chosen_rates(run, norm)) for norm in ORDER}, {})


def _tries(norm: str, base: Setting) -> dict[str, Setting]:
    own = METHODS[norm]
    tries = {"as chosen": base} | _rates_around(base)
    for noise in NOISES:
        if noise != own.noise:
            tries[f"noise {noise:g}"] = {**base, "noise": noise}
    if norm not in OWN_START:
        tries["random filters" if own.dirac else "filters from the identity"] = {**base, "dirac": not own.dirac}
    return tries


def _rates_around(base: Setting) -> dict[str, Setting]:
    return {
        "half the rates": {**base, "factor": base["factor"] / 2},
        "twice the rates": {**base, "factor": base["factor"] * 2},
    }


def _try_all(run: Runner, part: str, tries: dict[str, dict[str, Setting]], net: Setting) -> None:
    """Every try of every method at both sizes; then the changes that gained together, and rates beyond the last."""
    wait = run.compile_ahead(
        [
            _setting_run(run, norm, setting, min(CHOSEN_AT), net)
            for norm, own in tries.items()
            for name, setting in own.items()
            if name in ("as chosen", f"noise {NOISES[-1]:g}" if not METHODS[norm].noise else "noise 0")
        ],
        "held-out",
    )
    names = list(dict.fromkeys(name for own in tries.values() for name in own))
    for size in CHOSEN_AT:
        if size <= SMALL:
            wait()
        for name in names:
            _try(run, part, name, {norm: own[name] for norm, own in tries.items() if name in own}, size, net)
    together = {norm: _together(run, part, norm, own, net) for norm, own in tries.items()}
    for size in CHOSEN_AT:
        _try(run, part, "what gained together", {norm: new for norm, new in together.items() if new}, size, net)
        run.forget()
    for norm in tries:
        run.say(f"{part}: chosen for {norm}: {chosen_setting(run, norm, part)}")


def _try(run: Runner, part: str, name: str, by_norm: dict[str, Setting], size: int, net: Setting) -> None:
    runs = [(f"{norm}, {name}", _setting_run(run, norm, setting, size, net), 0) for norm, setting in by_norm.items()]
    run.side_by_side(part, runs, "held-out")


def _setting_run(run: Runner, norm: str, setting: Setting, size: int, net: Setting, epochs: float = SHORT) -> Config:
    mode = "compiled" if size <= SMALL and not run.toy else "captured"
    return method(norm, batch=size, epochs=epochs, mode=mode, **{**setting, **net})


def _together(run: Runner, part: str, norm: str, tries: dict[str, Setting], net: Setting) -> Setting | None:
    """The best value of each thing that was tried alone, in one setting; rates go on by one if nothing else gained."""
    base = tries["as chosen"]

    def accuracy(setting: Setting) -> float:
        rows = [
            row
            for size in CHOSEN_AT
            for row in [run.log.get(run.key(run.adapted(_setting_run(run, norm, setting, size, net)), 0, "held-out"))]
            if row is not None and "accuracy" in row
        ]
        return mean(row["accuracy"] for row in rows) if len(rows) == len(CHOSEN_AT) else float("-inf")

    new = dict(base)
    for field in ("factor", "noise", "dirac"):
        values = [setting for setting in tries.values() if setting.get(field) != base.get(field)]
        best = max([base, *values], key=accuracy)
        if best is not base:
            new[field] = best[field]
    if list(new) == list(base) and new["factor"] != base["factor"]:  # nothing but the rates: one further on
        new["factor"] *= new["factor"] / base["factor"]
    return new if new not in tries.values() else None


def chosen_setting(run: Runner, norm: str, part: str = "settings") -> Setting:
    """What was best over three epochs; what `choose` found if nothing was tried."""
    return _best(run, part, norm, ("factor", "rule", "noise", "dirac", "pixels")) or chosen_rates(run, norm)


# -- what is shown -----------------------------------------------------------------------------------------------------


def batch(run: Runner, seeds: int = 3) -> None:
    """Every method at every size, three epochs, on the test set."""
    chosen = {norm: chosen_setting(run, norm) for norm in ORDER}
    _sizes(run, "batch", chosen, SIZES, SHORT, seeds, {})


def lengths(run: Runner, seeds: int = 3) -> None:
    """Ten epochs for the methods that decide."""
    chosen = {norm: chosen_setting(run, norm) for norm in DECIDING}
    _sizes(run, "batch-long", chosen, LONG_SIZES, LONG, seeds, {})


def second_net(run: Runner, seeds: int = 3) -> None:
    """A ResNet-20: rates around what the first net has, chosen as there, then two sizes on the test set."""
    first = {norm: {**chosen_setting(run, norm), "pixels": norm == "equinorm"} for norm in ORDER}
    tries = {norm: {"as chosen": setting} | _rates_around(setting) for norm, setting in first.items()}
    _try_all(run, "settings-resnet20", tries, SECOND_NET)
    chosen = {norm: chosen_setting(run, norm, "settings-resnet20") for norm in ORDER}
    _sizes(run, "batch-resnet20", chosen, SECOND_NET_SIZES, SHORT, seeds, SECOND_NET)


def _sizes(
    run: Runner,
    part: str,
    chosen: dict[str, Setting],
    sizes: Sequence[int],
    epochs: float,
    seeds: int,
    net: Setting,
) -> None:
    small = [size for size in sizes if size <= SMALL]
    wait = run.compile_ahead(
        [_setting_run(run, norm, setting, size, net, epochs) for size in small for norm, setting in chosen.items()],
        "test",
    )
    for size in sizes:
        if small and size == small[0]:
            wait()
        groups = [list(range(seeds))] if size <= TOGETHER else [[seed] for seed in range(seeds)]
        for group in groups:
            runs = [
                (f"{norm}, batch {size}, {epochs:g} epochs", _setting_run(run, norm, setting, size, net, epochs), seed)
                for norm, setting in chosen.items()
                for seed in group
            ]
            run.side_by_side(part, runs, "test", fresh_statistics=True)
        run.forget()
