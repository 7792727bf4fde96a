"""What is run, in the order of importance: the ladder to the record, the final, and accuracy against batch size."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from .config import METHODS, Config, method
from .log import Log, Row, mean
from .runner import OutOfTimeError, Runner

__all__ = ["OPTIONS", "batch", "choose", "chosen_rates", "final", "ladder", "record_config"]

EPOCHS = (8, 10, 12, 14, 16, 18, 20, 24)
TRIED_AT = 12
"""Epochs of the runs in which options are compared."""
TARGET = 94.0
RESERVED = 230.0
"""Seconds for what comes after the options: their best ones anew and together, and the compiled runs."""

OPTIONS: dict[str, dict[str, Any]] = {
    "batch 500": {"batch": 500},
    "batch 2000": {"batch": 2000},
    "random filters at the start": {"dirac": False},
    "zero-mean filters": {"centred": True},
    "noise 0.2": {"noise": 0.2},
    "noise 0.1": {"noise": 0.1},
    "whitening bias for 3 epochs": {"whitening_epochs": 3.0},
    "mix 0.5": {"mix": 0.5},
    "mix 0.2": {"mix": 0.2},
    "filters' rate 0.16": {"filters_rate": 0.16},
    "filters' rate 0.09": {"filters_rate": 0.09},
    "filters' momentum 0.7": {"filters_momentum": 0.7},
    "offsets' rate 0.006": {"offsets_rate": 0.006},
    "offsets' rate 0.0015": {"offsets_rate": 0.0015},
    "warm-up 25 %": {"warmup": 0.25},
    "warm-up 5 %": {"warmup": 0.05},
    "head's rate 1.0": {"head_rate": 1.0},
    "GELU": {"activation": "gelu"},
    "smoothing 0.1": {"smoothing": 0.1},
    "no clipping": {"clip": None},
    "running average of weights": {"average": 0.95},
    "two Newton-Schulz steps": {"newton_schulz": 2},
    "widths 48, 256, 256": {"widths": (48, 256, 256)},
    "widths 64, 192, 256": {"widths": (64, 192, 256)},
    "widths 64, 256, 384": {"widths": (64, 256, 384)},
    "bfloat16": {"dtype": "bfloat16"},
}
"""What a row of the ladder changes, by expected gain."""


# -- the record --------------------------------------------------------------------------------------------------------


def ladder(run: Runner) -> None:
    """Choices on held-out training images: speed, length, then one change at a time, then the best together."""
    base, twin = Config(), METHODS["batchnorm"]
    run.alone("ladder", "captured, 8 epochs", base.but(epochs=8), range(2))
    run.alone("ladder", "BatchNorm twin, captured, 8 epochs", twin.but(epochs=8), range(2))
    for epochs in (12, 16, 24, 20, 14, 10, 18):
        run.alone("ladder", f"captured, {epochs} epochs", base.but(epochs=epochs), range(3))
        run.forget()
    for name, changes in OPTIONS.items():
        if run.left() < RESERVED:
            run.say("options are left for another time")
            break
        run.alone("ladder", name, base.but(epochs=TRIED_AT, **changes), range(3))
        run.forget()
    best = sorted(OPTIONS, key=lambda name: -_gain(run.log, run.adapted(base.but(epochs=TRIED_AT)), OPTIONS[name], run))
    run.alone("ladder", f"captured, {TRIED_AT} epochs", base.but(epochs=TRIED_AT), range(6))
    for name in best[:6]:
        run.alone("ladder", name, base.but(epochs=TRIED_AT, **OPTIONS[name]), range(6))
        run.forget()
    changes = _together(run, base)
    if changes:
        for epochs in (12, 16, 10, 14, 20, 8, 18):
            config = base.but(epochs=epochs, **changes)
            run.alone("ladder", f"the best together, {epochs} epochs", config, range(4))
            run.forget()
    run.alone("ladder", "compiled, 8 epochs", base.but(epochs=8, mode="compiled"), range(2))
    run.alone("ladder", "BatchNorm twin, compiled, 8 epochs", twin.but(epochs=8, mode="compiled"), range(2))
    run.forget()
    run.alone("ladder", "eager, 8 epochs", base.but(epochs=8, mode="eager"), range(1))
    run.alone("ladder", "BatchNorm twin, eager, 8 epochs", twin.but(epochs=8, mode="eager"), range(1))
    run.forget()


def _rows(log: Log, config: Config, on: str = "held-out") -> list[Row]:
    """The rows of this config that were run alone, as the log tells them."""
    said = dataclasses.asdict(config) | {"widths": list(config.widths)}
    found = [row for row in log.rows if "failed" not in row and row.get("on") == on and "seconds" in row]
    return [row for row in found if row["config"] | {"widths": list(row["config"]["widths"])} == said]


def _slope(run: Runner, base: Config) -> float:
    """Points of accuracy for e times the time, from runs of different length; 1.8 if there are too few."""
    points = [
        (math.log(row["seconds"]), row["accuracy"])
        for epochs in EPOCHS
        for row in _rows(run.log, run.adapted(base.but(epochs=epochs)))
    ]
    if len({x for x, _ in points}) < 4:
        return 1.8
    return max(0.0, statistics.linear_regression(*zip(*points, strict=True)).slope)


def _gain(log: Log, base: Config, changes: dict[str, Any], run: Runner) -> float:
    """Points of accuracy that a change gains at equal time: what is saved is worth what longer runs gain by it."""
    own = run.adapted(Config(epochs=TRIED_AT, **changes))
    rows, without = _rows(log, own), _rows(log, base)
    rows = [row for row in rows if row["finite"]]
    if not rows or not without:
        return -math.inf
    longer = math.log(mean(row["seconds"] for row in rows) / mean(row["seconds"] for row in without))
    points = mean(row["accuracy"] for row in rows) - mean(row["accuracy"] for row in without)
    return points - _slope(run, Config()) * longer


def _together(run: Runner, base: Config, least: float = 0.08) -> dict[str, Any]:
    """The changes that gain at equal time, of each field the best one."""
    at = run.adapted(base.but(epochs=TRIED_AT))
    gains = {name: _gain(run.log, at, changes, run) for name, changes in OPTIONS.items()}
    out: dict[str, Any] = {}
    for name in sorted(gains, key=lambda name: -gains[name]):
        enough = len(_rows(run.log, run.adapted(base.but(epochs=TRIED_AT, **OPTIONS[name])))) >= 6
        if gains[name] >= least and enough and not set(OPTIONS[name]) & set(out):
            out |= OPTIONS[name]
    run.say(
        "gains at equal time: "
        + ", ".join(f"{name} {gain:+.2f}" for name, gain in sorted(gains.items(), key=lambda item: -item[1]))
    )
    run.say(f"together: {out}")
    return out


def record_config(run: Runner) -> Config:
    """The shortest run whose accuracy on held-out images, by a line through its lengths, reaches the target.

    They were trained on a tenth fewer images than the final runs are, so the target is met with something to spare.
    """
    best: tuple[float, Config] | None = None
    for changes in ({}, _together(run, Config())):
        points: dict[float, list[Row]] = {}
        for epochs in EPOCHS:
            rows = _rows(run.log, run.adapted(Config(epochs=epochs, **changes)))
            if rows:
                points[epochs] = rows
        if len(points) < 3:
            continue
        flat = [(math.log(epochs), row["accuracy"]) for epochs, rows in points.items() for row in rows]
        line = statistics.linear_regression(*zip(*flat, strict=True))
        for epochs in range(6, 31):
            if line.intercept + line.slope * math.log(epochs) >= TARGET:
                longest = max(points)
                seconds = mean(row["seconds"] for row in points[longest]) * epochs / longest
                if best is None or seconds < best[0]:
                    best = seconds, Config(epochs=epochs, **changes)
                break
    return best[1] if best else Config(epochs=24)


def final(run: Runner, config: Config | None = None, n: int = 20) -> None:
    """The chosen run and its BatchNorm twin in turn on the test set, both compiled if that works, else captured."""
    config = config or record_config(run).but(mode="compiled")
    twin = METHODS["batchnorm"].but(epochs=8, mode=config.mode)
    if not run.toy and config.mode == "compiled" and not _works(run, config, twin):
        config, twin = config.but(mode="captured"), twin.but(mode="captured")
    run.say(f"final: {config.epochs:g} epochs, {config.mode}, {config.changes()}")
    for seed in range(n):
        run.alone("final", "without batch statistics", config, [seed], on="test")
        run.alone("final", "BatchNorm twin", twin, [seed], on="test")


def _works(run: Runner, *configs: Config) -> bool:
    """Whether these can be compiled and captured, tried without being counted."""
    try:
        for config in configs:
            run.training(config, "test").train(999, config)
    except Exception as error:
        run.say(f"compiled steps fail, so captured ones: {type(error).__name__}: {str(error)[:300]}")
        return False
    return True


# -- accuracy against batch size ---------------------------------------------------------------------------------------

SIZES = (1024, 128, 32, 8, 4, 2)
FEW = 32
"""Up to this size all seeds go side by side."""
ORDER = ("unit", "batchnorm", "groupnorm", "ws_agc", "msr", "equinorm")
CHOSEN_AT = (32, 512)
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
RULES = ("root", "sum")


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


def chosen_rates(run: Runner, norm: str) -> dict[str, Any]:
    """The factor and the rule with the best mean accuracy over the two sizes; 1 and "root" if nothing was tried."""
    by_setting: dict[tuple[float, str], list[float]] = {}
    for row in run.log.of("choose", method=norm, images="toy" if run.toy else "cifar10"):
        by_setting.setdefault((row["config"]["factor"], row["config"]["rule"]), []).append(row["accuracy"])
    complete = {setting: mean(values) for setting, values in by_setting.items() if len(values) == len(CHOSEN_AT)}
    if not complete:
        return {"factor": 1.0, "rule": "root"}
    factor, rule = max(complete, key=lambda setting: complete[setting])
    return {"factor": factor, "rule": rule}


def batch(run: Runner, epochs: float = 3.0, seeds: int = 3) -> None:
    """Every method at every size; sizes that would take too long get 1.2 epochs in place of three.

    Steps on few images leave most of the device idle, so there all seeds go side by side.
    """
    for size in SIZES:
        apart = [[seed] for seed in range(seeds)] if size > FEW else [list(range(seeds))]
        for group in apart:
            for length in (epochs, 1.2):
                runs = [
                    (f"{norm}, batch {size}, {length:g} epochs", _sized(run, norm, size, length), seed)
                    for norm in ORDER
                    for seed in group
                ]
                try:
                    run.side_by_side("batch", runs, "test", fresh_statistics=True)
                    break
                except OutOfTimeError as error:
                    run.say(f"too long: {error}")
                    if size > 4 or length == 1.2:
                        raise
        run.forget()


def _sized(run: Runner, norm: str, size: int, epochs: float) -> Config:
    return method(norm, batch=size, epochs=epochs, **chosen_rates(run, norm))
