"""Instruments that show why a network trains or does not, on a user's own model.

Every instrument is a function of a model and a batch (and a loss, where gradients are needed). It returns a small
dataclass of plain tensors and leaves model, buffers, gradients, mode and random state as they were:

>>> from equinorm import diagnostics
>>> scan = diagnostics.gradient_scan(model, F.cross_entropy, (x, y), steps=[0.05, 0.1, 0.2, 0.4])
>>> diagnostics.plot_gradient_scans({"mine": [scan]}).savefig("scan.svg")

`Recorder` makes the same measurements during training, at an interval and a bounded cost. Only the `plot_*` functions
need more than torch: matplotlib, which is part of the extra `lab`.
"""

from __future__ import annotations

from .curvature import Eigenvalue, Sharpness, before_and_after_balancing, sharpness, top_eigenvalue
from .energy import (
    ColumnEnergy,
    EnergyByCycle,
    Imbalance,
    LayerEnergy,
    column_energy,
    energy_by_cycle,
    imbalance_by_layer,
    layer_energy,
)
from .landscape import (
    EffectiveSmoothness,
    GradientLandscape,
    GradientPredictiveness,
    GradientScan,
    effective_smoothness,
    gradient_landscape,
    gradient_predictiveness,
    gradient_scan,
)
from .learning_rate import (
    Deflated,
    EffectiveLearningRate,
    FilterNorms,
    GradientAlignment,
    RelativeSteps,
    deflated_share,
    effective_learning_rate,
    filter_norms,
    gradient_alignment,
    relative_steps,
)
from .plots import (
    plot_channel_means,
    plot_column_energy,
    plot_dead_units,
    plot_energy_by_cycle,
    plot_filter_magnitudes,
    plot_gradient_scans,
    plot_imbalance,
    plot_layer_energy,
    plot_propagation,
)
from .propagation import ForwardNorms, GradientNorms, forward_norms, gradient_norms
from .recorder import INSTRUMENTS, Context, Cost, Recorder, read_records
from .shift import ChannelMeans, Drift, KernelMeans, channel_means, drift, kernel_means
from .units import DeadUnits, FrozenScales, StatisticsNoise, dead_units, frozen_scales, statistics_noise

__all__ = [
    "INSTRUMENTS",
    "ChannelMeans",
    "ColumnEnergy",
    "Context",
    "Cost",
    "DeadUnits",
    "Deflated",
    "Drift",
    "EffectiveLearningRate",
    "EffectiveSmoothness",
    "Eigenvalue",
    "EnergyByCycle",
    "FilterNorms",
    "ForwardNorms",
    "FrozenScales",
    "GradientAlignment",
    "GradientLandscape",
    "GradientNorms",
    "GradientPredictiveness",
    "GradientScan",
    "Imbalance",
    "KernelMeans",
    "LayerEnergy",
    "Recorder",
    "RelativeSteps",
    "Sharpness",
    "StatisticsNoise",
    "before_and_after_balancing",
    "channel_means",
    "column_energy",
    "dead_units",
    "deflated_share",
    "drift",
    "effective_learning_rate",
    "effective_smoothness",
    "energy_by_cycle",
    "filter_norms",
    "forward_norms",
    "frozen_scales",
    "gradient_alignment",
    "gradient_landscape",
    "gradient_norms",
    "gradient_predictiveness",
    "gradient_scan",
    "imbalance_by_layer",
    "kernel_means",
    "layer_energy",
    "plot_channel_means",
    "plot_column_energy",
    "plot_dead_units",
    "plot_energy_by_cycle",
    "plot_filter_magnitudes",
    "plot_gradient_scans",
    "plot_imbalance",
    "plot_layer_energy",
    "plot_propagation",
    "read_records",
    "relative_steps",
    "sharpness",
    "statistics_noise",
    "top_eigenvalue",
]
