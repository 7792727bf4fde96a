"""Dynamic tanh (DyT): a squashing function in the place of a norm, without any statistics.

- `layers`: the layer
- `method`: what `convert` does with it
"""

from .layers import DynamicTanh

__all__ = ["DynamicTanh"]
