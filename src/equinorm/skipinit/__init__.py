"""SkipInit and ReZero: a learned scale that starts at 0 at the end of each residual branch.

- `layers`: the scale
- `method`: what `convert` and `fold` do with it
"""

from .layers import BranchScale

__all__ = ["BranchScale"]
