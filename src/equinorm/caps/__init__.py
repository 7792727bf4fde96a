"""Caps: ReLU6 and its kin as min(relu(x), c) with one cap per channel, which carries a scale.

- `layers`: the cap, and what puts caps in the place of functions
- `method`: what `convert` and `fold` do with them
"""

from .layers import Cap, FunctionCaps

__all__ = ["Cap", "FunctionCaps"]
