"""ENorm: training in balanced coordinates (stock2019). In reading order:

    enorm.py             ENorm: one cycle after every optimizer step, attached or by hand
    biases.py            safe biases, whose effective learning rate stays bounded
    optimizer_state.py   how an optimizer's state follows a rescaling; `register_state_rule` for one of your own
    steps/               what makes the step: protocol.py, plain.py, then backends.py, and the fused ones
    sgd.py               ENormSGD: SGD and an ENorm cycle in one optimizer
    implicit.py          ImplicitENorm: the scales as parameters
    pathsgd.py           PathSGD, a baseline that no rescaling changes
    reference.py         stock2019's algorithm for chains in plain lines, an oracle for tests

Balancing once, without training, is `equinorm.balance_`.
"""

from .enorm import ENorm
from .implicit import ImplicitENorm
from .optimizer_state import register_state_rule
from .pathsgd import PathSGD, path_kappa
from .sgd import ENormSGD

__all__ = ["ENorm", "ENormSGD", "ImplicitENorm", "PathSGD", "path_kappa", "register_state_rule"]
