"""Cross-layer equalization by other people's programs, for `bench quantization`: brevitas' and AIMET's.

Both find their places in a graph of plain layers, and neither equalizes through ReLU6. So they get all that helps them
and does not change what the net computes: convolutions as torch has them, with symmetric padding. Beside the net with
its ReLU6 stands the one that their users make, with ReLUs: it computes something else, and that is measured too.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings

import torch
from torch import Tensor, fx, nn

__all__ = ["PROGRAMS", "equalized", "installed", "with_plain_convolutions", "with_relus"]

PROGRAMS = {"brevitas": "brevitas.graph.equalize", "AIMET": "aimet_torch.cross_layer_equalization"}
"""The module of each that equalizes."""


def installed(program: str) -> bool:
    """Whether it can be imported here: both ask for more packages than this needs, so it is tried."""
    if importlib.util.find_spec(PROGRAMS[program].partition(".")[0]) is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(PROGRAMS[program])
    except (ImportError, OSError, RuntimeError):  # RuntimeError: a torchvision for another torch
        return False
    return True


def equalized(program: str, model: nn.Module, x: Tensor) -> nn.Module:
    """A copy of a net of plain layers, norms folded, equalized with the program's own settings.

    >>> equalized("brevitas", with_relus(with_plain_convolutions(model)), x)
    """
    library = importlib.import_module(PROGRAMS[program])
    twin = copy.deepcopy(model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if program == "AIMET":
            library.equalize_model(twin, dummy_input=x)
            return twin.eval()
        graph = fx.symbolic_trace(twin)
        return library.EqualizeGraph().apply(graph).eval()


def with_relus(model: nn.Module) -> nn.Module:
    """A copy with ReLUs in the place of ReLU6, which is another function."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.ReLU6):
            twin.set_submodule(name, nn.ReLU())
    return twin


@torch.no_grad()
def with_plain_convolutions(model: nn.Module) -> nn.Module:
    """A copy whose convolutions of "same" padding are torch's own, for inputs of even size.

    More padding at the end than at the beginning becomes symmetric with a kernel that begins with zeros.
    """
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        padding = getattr(module, "static_padding", None)
        if not isinstance(module, nn.Conv2d) or padding is None:
            continue
        left, right, top, bottom = padding.padding if isinstance(padding, nn.ZeroPad2d) else (0, 0, 0, 0)
        if (left, right) != (top, bottom) or right - left not in (0, 1):
            raise ValueError(f"{name} pads by {left, right, top, bottom}, for which there is no plain convolution here")
        more = right - left
        weight = nn.functional.pad(module.weight, (more, 0, more, 0))
        plain = nn.Conv2d(
            module.in_channels,
            module.out_channels,
            (weight.shape[2], weight.shape[3]),
            (module.stride[0], module.stride[1]),
            right,
            groups=module.groups,
            bias=module.bias is not None,
        )
        plain.weight.copy_(weight)
        if module.bias is not None and plain.bias is not None:
            plain.bias.copy_(module.bias)
        twin.set_submodule(name, plain)
    return twin
