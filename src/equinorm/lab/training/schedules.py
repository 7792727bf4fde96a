"""Learning-rate schedules of the papers: pure functions of the position in training.

A schedule says by how much the initial learning rate is multiplied, and which momentum goes with it, at a fraction of
an epoch. The trainer asks for both before every step.

    Linear().at(30.0, epochs=60, lr=0.1, momentum=0.9)      # (0.05, 0.9)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCHEDULES", "Constant", "Linear", "Quadratic", "Schedule", "Step", "SuperConvergence"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate stays; with `warm_up` epochs it rises linearly to its value first."""

    warm_up: float = 0.0

    def at(self, epoch: float, epochs: float, lr: float, momentum: float) -> tuple[float, float]:
        """(learning rate, momentum) when `epoch` (with its fraction) of `epochs` is done."""
        rise = min(1.0, epoch / self.warm_up) if self.warm_up else 1.0
        return rise * self.lr(epoch, epochs, lr), self.momentum(epoch, epochs, momentum)

    def lr(self, epoch: float, epochs: float, lr: float) -> float:
        return lr

    def momentum(self, epoch: float, epochs: float, momentum: float) -> float:
        return momentum


@dataclass(frozen=True)
class Constant(Schedule):
    pass


@dataclass(frozen=True)
class Linear(Schedule):
    """From lr down to `final` in a straight line (repro2019: to 0 over 60 epochs), after a part `hold` of training at
    lr (arpit2019: half)."""

    final: float = 0.0
    hold: float = 0.0

    def lr(self, epoch: float, epochs: float, lr: float) -> float:
        t = max(0.0, (epoch / epochs - self.hold) / (1 - self.hold))
        return self.final + (lr - self.final) * (1 - t)


@dataclass(frozen=True)
class Quadratic(Schedule):
    """(lr - final)·(1 - t)² + final (Gitman & Ginsburg 2017; stock2019: to 1e-4 on CIFAR-NV, 1e-5 on ImageNet)."""

    final: float = 1e-4

    def lr(self, epoch: float, epochs: float, lr: float) -> float:
        return self.final + (lr - self.final) * (1 - epoch / epochs) ** 2


@dataclass(frozen=True)
class Step(Schedule):
    """Times `factor` at each milestone. Milestones are fractions of training, so a shorter run keeps the shape."""

    milestones: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def lr(self, epoch: float, epochs: float, lr: float) -> float:
        passed = sum(epoch / epochs >= milestone for milestone in self.milestones)
        return float(lr * self.factor**passed)


@dataclass(frozen=True)
class SuperConvergence(Schedule):
    """defazio2018 section 6.2 (after Smith & Topin 2017), stated for 30 epochs and scaled to any number.

    The rate climbs 5-fold until epoch 13, falls back until 26 and then 100-fold further. Momentum mirrors it, 0.95 to
    0.85 to 0.95, and is 0.85 after epoch 26; it moves in whole epochs.
    """

    rise: float = 5.0
    anneal: float = 100.0

    def lr(self, epoch: float, epochs: float, lr: float) -> float:
        t = 30 * epoch / epochs
        if t < 13:
            return lr * (1 + (self.rise - 1) * t / 13)
        if t < 26:
            return lr * (self.rise - (self.rise - 1) * (t - 13) / 13)
        return float(lr * self.anneal ** (-(t - 26) / 4))

    def momentum(self, epoch: float, epochs: float, momentum: float) -> float:
        t = 30 * int(epoch) / epochs
        if t < 13:
            return 0.95 - 0.1 * t / 13
        if t < 26:
            return 0.85 + 0.1 * (t - 13) / 13
        return 0.85


SCHEDULES: dict[str, type[Schedule]] = {c.__name__: c for c in (Constant, Linear, Quadratic, Step, SuperConvergence)}
