"""The layers of equinorm, by family: `equinorm.nn.EquiNormConv2d(64, 128, 3, padding=1)`.

Each has the signature of the torch layer it stands for, and further options by keyword.
"""

from __future__ import annotations

# EquiNorm (defazio2018): weights in equilibrium, from the mean input of every channel
from .equilibrium.layers import EquiNormConv1d as EquiNormConv1d
from .equilibrium.layers import EquiNormConv2d as EquiNormConv2d
from .equilibrium.layers import EquiNormConv3d as EquiNormConv3d
from .equilibrium.layers import EquiNormConvTranspose2d as EquiNormConvTranspose2d
from .equilibrium.layers import EquiNormLinear as EquiNormLinear
from .equilibrium.relu import SummingReLU as SummingReLU
