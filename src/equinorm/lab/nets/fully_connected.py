"""Fully connected networks."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from .chain import Chain, named
from .norms import Layers
from .registry import model


@model("fc", "fully connected: an input layer, `hidden` intermediary ones, an output layer", toy={"width": 16})
def fully_connected(
    make: Layers, in_shape: tuple[int, int, int], classes: int, *, hidden: int = 1, width: int = 500
) -> Chain:
    """3072-500-(500)×p-10 with p = `hidden` (stock2019, section 6.1; repro2019, section 3).

    No layer has a bias unless `bias=True` (repro2019, figure 3) or the norm is one that has: then all have, the output
    layer included.
    """
    if hidden < 0:
        raise ValueError(f"hidden is the number of intermediary layers, 0 or more; got {hidden}")
    sizes = [math.prod(in_shape), *[width] * (hidden + 1)]
    stages = [
        named(
            flatten=nn.Identity() if i else nn.Flatten(),
            linear=make.linear(a, b),
            norm=make.norm(b, ndim=2),
            relu=make.relu(b),
        )
        for i, (a, b) in enumerate(pairwise(sizes))
    ]
    return Chain(stages, make.head(width, classes, pool=False, bias=make.bias))
