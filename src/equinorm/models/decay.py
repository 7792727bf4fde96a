"""Which parameters weight decay should leave alone."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from .unwrapping import unwrap

__all__ = ["no_weight_decay"]


def no_weight_decay(model: nn.Module) -> set[str]:
    """The names of the parameters that should have no weight decay, as timm asks for them.

    These are biases, gains and all other vectors; the gains of parametrized weights, which have as many axes as the
    weight and are decayed by whoever counts axes; weights whose length a method holds (mean shift rejection, unit
    filters); and what `no_weight_decay()` of the model or of a part of it names.

    >>> groups = timm.optim.param_groups_weight_decay(model, 0.05, no_weight_decay_list=equinorm.no_weight_decay(model))
    """
    given, model = model, unwrap(model)
    names = {name for name, p in model.named_parameters() if p.ndim <= 1}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, ParametrizationList):
            held = any(getattr(each, "holds_length", False) for each in module)
            for name, p in module.named_parameters():
                if p.numel() == max(p.shape, default=1) or (held and name.startswith("original")):
                    names.add(prefix + name)
        elif callable(named := getattr(module, "no_weight_decay", None)):
            names.update(prefix + name for name in named())
    found = {id(p) for name, p in model.named_parameters() if name in names}
    # wrappers put a prefix before names, and whoever asks may go by either
    return {name for each in (model, given) for name, p in each.named_parameters() if id(p) in found}
