"""EvoNorm-S0: normalization and activation as one layer, of each example by itself.

- `layers`: the layer
- `reference`: its equation, group by group
- `method`: what `convert` does with it
"""

from .layers import EvoNormS0

__all__ = ["EvoNormS0"]
