"""transformers' `save_pretrained`, which writes numbers and a config, for models that are no longer what it says.

`from_pretrained` builds the architecture of the config and fills in what it finds; what has no place there is dropped
with a note in the log, and the loaded model computes something else. The ε of its norms it takes from the config, too.
So whoever changes the modules of such a model, or an ε, calls `guard_saving_` before: `save_pretrained` then refuses
what would load with other outputs. Nothing of transformers is imported here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["SavingGuard", "guard_saving_", "note_norms"]

CHECKPOINT = re.compile(r"checkpoint-\d+")
"""The folders in which a Trainer saves what it resumes from."""


def guard_saving_(model: nn.Module) -> None:
    """Note the architecture of all transformers models in `model` as it is, for their `save_pretrained`."""
    for module in model.modules():
        if _is_pretrained(module) and not isinstance(vars(module).get("save_pretrained"), SavingGuard):
            module.save_pretrained = SavingGuard(module)  # type: ignore[assignment]


def note_norms(model: nn.Module, layer_of: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Note behind which layer each norm stands that is about to go: pairs (norm, layer)."""
    pairs = list(layer_of)
    for module in model.modules():
        if isinstance(guard := vars(module).get("save_pretrained"), SavingGuard):
            names = {each: name for name, each in module.named_modules()}
            known = ((names.get(norm), names.get(layer)) for norm, layer in pairs)
            guard.layer_of.update({norm: layer for norm, layer in known if norm is not None and layer is not None})


def _is_pretrained(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


@dataclass(frozen=True)
class _Module:
    """What has to be the same for numbers to mean the same."""

    kind: str
    tensors: frozenset[str]
    norm: tuple[int, bool] | None = None  # channels, and whether it has gains, of a batch norm with statistics
    epsilons: tuple[tuple[str, float | None], ...] = ()  # which are in no state dict

    def is_but_for_epsilons(self, other: _Module | None) -> bool:
        return other is not None and replace(self, epsilons=other.epsilons) == other


def _architecture(model: nn.Module) -> dict[str, _Module]:
    found = {}
    for name, module in model.named_modules():
        held = {**module._parameters, **module._buffers}
        norm = None
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            norm = (module.num_features, module.affine)
        tensors = frozenset(key for key, value in held.items() if value is not None)
        found[name] = _Module(type(module).__name__, tensors, norm, _epsilons(module))
    return found


def _epsilons(module: nn.Module) -> tuple[tuple[str, float | None], ...]:
    numbers = vars(module).items()
    return tuple((key, x) for key, x in numbers if "eps" in key.lower() and (x is None or isinstance(x, float)))


class SavingGuard:
    """Stands in the place of a model's `save_pretrained` and knows its architecture of before."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.before = model, _architecture(model)
        self.layer_of: dict[str, str] = {}

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        save = type(self.model).save_pretrained  # type: ignore[attr-defined]
        if not getattr(self.model, "_hf_peft_config_loaded", False):  # with adapters, which are saved alone
            gone, others = self._differences()
            if (gone or others) and CHECKPOINT.fullmatch(Path(save_directory).name):
                warnings.warn(
                    f"{type(self.model).__name__} has been changed by equinorm: {save_directory} resumes this "
                    "training, but from_pretrained would load it with other outputs. To publish it, fold first",
                    stacklevel=2,
                )
            elif others:
                raise ValueError(self._refusal(others))
            elif gone:
                state = kwargs.pop("state_dict", None)
                kwargs["state_dict"] = self._with_norms(self.model.state_dict() if state is None else state, gone)
        return save(self.model, save_directory, *args, **kwargs)

    def as_before(self) -> dict[str, Tensor]:
        """The numbers of a model that was folded, for the architecture it had; a ValueError where there are none."""
        gone, others = self._differences()
        if others:
            raise ValueError(self._refusal(others))
        return self._with_norms(self.model.state_dict(), gone)

    def _differences(self) -> tuple[dict[str, str | None], list[str]]:
        """Batch norms that are gone, with the layers that have their offsets as biases; and all else that is new."""
        now = _architecture(self.model)
        gone: dict[str, str | None] = {}
        for name, was in self.before.items():
            if was.norm is not None and now.get(name) == _Module("Identity", frozenset()):
                gone[name] = None
        biased = {}
        for name, layer in self.layer_of.items():
            if name in gone and layer in now and self._has_new_bias(layer, now) and self.before[name].norm[1]:  # type: ignore[index]
                gone[name], biased[layer] = layer, name
        others = [
            f"{name or 'the model'} {_difference(now.get(name), self.before.get(name))}"
            for name in [*self.before, *(name for name in now if name not in self.before)]
            if now.get(name) != self.before.get(name) and name not in gone and name not in biased
        ]
        return gone, others

    def _has_new_bias(self, layer: str, now: Mapping[str, _Module]) -> bool:
        was, new = self.before.get(layer), now[layer]
        return was is not None and was.kind == new.kind and new.tensors - was.tensors == {"bias"}

    @torch.no_grad()
    def _with_norms(self, state: Mapping[str, Tensor], gone: Mapping[str, str | None]) -> dict[str, Tensor]:
        """The numbers of the architecture of before: a norm that is gone changes nothing but adds a layer's bias."""
        state = dict(state)
        like = next(value for value in state.values() if value.is_floating_point())
        for name, layer in gone.items():
            was = self.before[name]
            assert was.norm is not None
            (channels, affine), eps = was.norm, dict(was.epsilons)["eps"]
            assert eps is not None
            offset = like.new_zeros(channels) if layer is None else state.pop(f"{layer}.bias")
            state[f"{name}.running_mean"] = torch.zeros_like(offset)
            state[f"{name}.running_var"] = torch.full_like(offset, 1.0 - eps)
            state[f"{name}.num_batches_tracked"] = torch.zeros((), dtype=torch.long, device=offset.device)
            if affine:
                state[f"{name}.weight"], state[f"{name}.bias"] = torch.ones_like(offset), offset
        return state

    def _refusal(self, others: list[str]) -> str:
        more = f" (and {len(others) - 3} more)" if len(others) > 3 else ""
        now = _architecture(self.model)
        if now.keys() == self.before.keys() and all(now[x].is_but_for_epsilons(was) for x, was in self.before.items()):
            remedy = (
                "A rescaling changed what norms add to their variances, which is in no state dict. Save the whole "
                "module, torch.save(model, ...), or balance a freshly loaded model with symmetry=equinorm.trace(model, "
                "inputs), which leaves these numbers alone"
            )
        else:
            remedy = (
                "Fold first: plain, report = equinorm.fold(model, inputs); what cannot be folded is saved by "
                "torch.save(model.state_dict(), ...) and loaded into a model that was converted alike"
            )
        return (
            f"from_pretrained would load this {type(self.model).__name__} with other outputs, since it builds what the "
            f"config says: {'; '.join(others[:3])}{more}. {remedy}"
        )


def _difference(now: _Module | None, before: _Module | None) -> str:
    if now is not None and before is not None and now.is_but_for_epsilons(before):
        old, new = dict(before.epsilons), dict(now.epsilons)
        changed = [
            f"{key} = {new.get(key)}, not {old.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)
        ]
        return f"has {', '.join(changed)}"
    return f"is {_described(now)}, not {_described(before)}"


def _described(module: _Module | None) -> str:
    return "nothing" if module is None else f"{module.kind} with {', '.join(sorted(module.tensors)) or 'no tensors'}"
