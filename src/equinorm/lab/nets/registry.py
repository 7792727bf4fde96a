"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .chain import Chain
from .fixup import fixup_
from .initialisation import INITS, change_first_, initialise_
from .norms import Layers

__all__ = ["build", "model", "names", "toy"]

Builder = Callable[..., Chain]
"""builder(Layers, in_shape, classes, *, options of the architecture) -> the model."""


@dataclass(frozen=True)
class ModelEntry:
    builder: Builder
    line: str
    defaults: Mapping[str, Any]
    toy: Mapping[str, Any]

    @property
    def options(self) -> list[str]:
        parameters = inspect.signature(self.builder).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


_MODELS: dict[str, ModelEntry] = {}


def model(name: str, line: str, toy: Mapping[str, Any], **defaults: Any) -> Callable[[Builder], Builder]:
    """Register a builder under a name, with one line about it, options that make it tiny, and defaults.

    >>> @model("fc", "fully connected", toy={"width": 16})
    ... def fc(make: Layers, in_shape, classes, *, width=500) -> Chain: ...
    """

    def register(builder: Builder) -> Builder:
        if name in _MODELS:
            raise ValueError(f"there is a model called {name!r} already")
        _MODELS[name] = ModelEntry(builder, line, defaults, toy)
        return builder

    return register


def names() -> dict[str, str]:
    """Every model, with one line about it."""
    return {name: entry.line for name, entry in _MODELS.items()}


def toy(name: str) -> dict[str, Any]:
    """Options that make a model tiny: milliseconds a step on images of 8 × 8 to 32 × 32.

    >>> build(name, classes=10, in_shape=(1, 8, 8), **toy(name))
    """
    return dict(_find(name).toy)


def build(
    name: str,
    *,
    classes: int,
    in_shape: tuple[int, int, int],
    norm: str = "batchnorm",
    norm_options: Mapping[str, Any] | None = None,
    init: str = "he",
    bias: bool | None = None,
    final_norm: str | None = None,
    data_init: bool | None = None,
    first_bias: bool = False,
    first_zero_mean: bool = False,
    **options: Any,
) -> Chain:
    """The model of that name, initialised from torch's global random numbers.

    - `norm`, `norm_options`, `bias`: see `norms`. An option goes to whichever method of "a+b" knows it.
    - `init`: "he", "he_uniform", "he_fan_out", "xavier", "xavier_normal", "normal" or "default"; see `INITS`.
    - `final_norm="batchnorm"`: a norm behind the classifier (stock2019, section 6.2).
    - `data_init`: whether `initialise_from_data` has something to do. None: where the method on weights wants it.
    - `first_bias`, `first_zero_mean`: a bias for the first convolution alone, filters of mean 0 and length 1 for it.
    - `options`: of the architecture; an error lists them. All have `width`, which scales every layer.

    >>> build("cifar_nv", classes=10, in_shape=(3, 28, 28), norm="none", init="xavier", final_norm="batchnorm")
    """
    entry = _find(name)
    if unknown := set(options) - set(entry.options):
        raise ValueError(
            f"model {name!r} has no option {', '.join(sorted(unknown))}; besides those of every model (norm, "
            f"norm_options, init, bias, final_norm, data_init, first_bias, "
            f"first_zero_mean) it has {', '.join(entry.options)}"
        )
    if init not in INITS:
        raise ValueError(f"unknown init {init!r}; expected one of {', '.join(INITS)}")
    make = Layers(norm, norm_options, bias, final_norm)
    if data_init and not make.wants_data_init and norm != "none":
        raise ValueError(f"data_init is for weight norm and for nets without norm; norm={norm!r} has its own start")
    built = entry.builder(make, tuple(in_shape), classes, **{**entry.defaults, **options})
    assert make.classifier is not None
    initialise_(built, init, make.classifier)
    if options.get("fixup"):
        fixup_(built, make.classifier)
    if first_bias or first_zero_mean:
        change_first_(built, first_bias, first_zero_mean)
    make.put_on_(built)
    if make.weight is not None and make.weight.init is not None:
        built.init = make.weight.init
    built.needs_data_init = make.wants_data_init if data_init is None else data_init
    return built


def _find(name: str) -> ModelEntry:
    if name not in _MODELS:
        raise ValueError(f"there is no model {name!r}; there are {', '.join(_MODELS)}")
    return _MODELS[name]
