"""The methods that `convert`, `fold` and the laboratory know by name.

A method lives in a room of its own, `equinorm/ROOM/method.py`, whose `METHODS` say what it is: its options with their
defaults, what it does to a model, how its modules become plain again. To add one, add a room and its name to `ROOMS`.

>>> print(equinorm.methods())
>>> equinorm.register_method("rms", norm=lambda channels, eps: MyRMSNorm2d(channels, eps), options={"eps": 1e-6})
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

from .errors import meant
from .models import kinds
from .models.graph import Call
from .models.plan import Norm, Plan
from .models.replacing import Place, Roles, count_already, fuse_layers, replace_norms
from .models.reports import html_table, table

__all__ = ["ROOMS", "Method", "MethodTable", "find_method", "methods", "register", "register_method"]

ROOMS = (
    "equilibrium",
    "msr",
    "weightnorm",
    "normprop",
    "norms",
    "combinations",
    "skipinit",
    "caps",
    "unitfilters",
    "evonorm",
    "dyt",
)


@dataclass(frozen=True)
class Method:
    """A method that `convert` can put on a model."""

    name: str
    title: str
    kind: str
    """What it normalizes: "weight", "activation", "weight + activation" or "nothing"."""
    source: str
    """The paper, by the project's short name for it or by authors and year."""
    layer: Any
    """The layer class, or the function, that is put in."""
    plan: Callable[..., None] = field(repr=False, compare=False)
    """`plan(Plan, **options)` notes what is to be done to a model that exists."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it takes, with defaults."""
    aliases: tuple[str, ...] = ()
    """Other names, as "bn"."""
    looks_for: str = field(default="norm and no linear or convolutional layer", repr=False, compare=False)
    """What a model has none of where there is nothing to convert, for the error that says so."""
    init: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False, compare=False)
    """`init(model, batch)` chooses gains and biases from data."""

    # what its modules are, for `fold` and for other methods: see `models.kinds`
    norms: Mapping[type[nn.Module], kinds.Affine] = field(default_factory=dict, repr=False, compare=False)
    layers: Mapping[type[nn.Module], kinds.Plain] = field(default_factory=dict, repr=False, compare=False)
    modules: Mapping[type[nn.Module], kinds.Plain] = field(default_factory=dict, repr=False, compare=False)

    # how a net is built with it from the start, as in the laboratory
    norm: Callable[..., nn.Module | str] | None = field(default=None, repr=False, compare=False)
    """`norm(Place, **options)` makes the norm that stands behind a layer, or says why there is none."""
    relu: Callable[..., nn.Module | None] | None = field(default=None, repr=False, compare=False)
    """`relu(channels, **options)` makes what stands in the place of a ReLU; None: a ReLU."""
    instead: Mapping[type[nn.Module], Callable[..., nn.Module]] = field(default_factory=dict, repr=False, compare=False)
    """The layers to be made in the place of torch's; they take the options of the method that are given."""
    put: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    """`put(model, Roles, **options)` acts on a net that is complete and initialised."""
    biased: bool = field(default=True, repr=False, compare=False)
    """Whether its layers have biases where no norm follows them."""
    starts_from_data: bool = field(default=False, repr=False, compare=False)
    """Whether a net that is built with it starts with `init`."""

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm of activations, which can stand behind any layer."""
        return self.norm is not None

    @property
    def builds(self) -> bool:
        """Whether a net can be built with it from the start."""
        return self.norm is not None or self.put is not None or bool(self.instead)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}: {self.title} ({self.kind}; {self.source}){'; ' if options else ''}{options}"

    def __repr__(self) -> str:
        return f"<method {self}>"


class MethodTable(tuple[Method, ...]):
    """Methods, which print as a table; a method by itself prints its options too."""

    __slots__ = ()

    def _lines(self) -> list[tuple[str, ...]]:
        return [(m.name, m.kind, m.source, m.title) for m in self]

    def __repr__(self) -> str:
        return table(_HEAD, self._lines())

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._lines())


_HEAD = ("method", "normalizes", "source", "what it is")
_METHODS: dict[str, Method] = {}
_ELSEWHERE = {
    "enorm": "ENorm leaves all layers as they are and goes with the optimizer: "
    "equinorm.ENorm(model, optimizer, example_inputs).attach()",
    "pathsgd": "Path-SGD is an optimizer: equinorm.PathSGD(model, example_inputs, lr=...)",
}


def methods() -> MethodTable:
    """All methods that `convert` knows.

    >>> [method.name for method in equinorm.methods() if method.kind == "weight"]
    """
    return MethodTable(_known().values())


def find_method(name: str | Method) -> Method:
    """The method of that name; case, underscores and hyphens do not count, and "bn" is batch norm.

    >>> find_method("GroupNorm").name, find_method("bn").name
    ('groupnorm', 'batchnorm')
    """
    if isinstance(name, Method):
        return name
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a method, got {type(name).__name__}")
    known = _known()
    by_name = {_key(known_name): method for method in known.values() for known_name in (method.name, *method.aliases)}
    if _key(name) in by_name:
        return by_name[_key(name)]
    hint = f"; {_ELSEWHERE[_key(name)]}" if _key(name) in _ELSEWHERE else meant(name.lower(), known)
    raise ValueError(f"unknown method {name!r}{hint}; expected one of {', '.join(map(repr, known))}")


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _known() -> dict[str, Method]:
    """All methods by name, those of the rooms first, which are loaded when they are first asked for."""
    for room in ROOMS:
        for method in import_module(f"equinorm.{room}.method").METHODS:
            if method.name not in _METHODS:
                register(method)
    return _METHODS


def register(method: Method) -> Method:
    """Make a method known."""
    if method.name in _METHODS:
        raise ValueError(f"there is a method called {method.name!r} already")
    kinds.declare(norms=method.norms, layers=method.layers, modules=method.modules)
    _METHODS[method.name] = method
    return method


def register_method(
    name: str,
    *,
    norm: Callable[..., nn.Module] | None = None,
    layer: Callable[..., nn.Module] | None = None,
    plan: Callable[..., None] | None = None,
    title: str = "",
    source: str = "",
    options: Mapping[str, Any] | None = None,
    plain: Mapping[type[nn.Module], kinds.Plain] | None = None,
) -> Method:
    """Make a method of your own known to `convert`, by one of

    - `norm(channels, **options)`, which makes the module that takes the place of a norm,
    - `layer(layer, **options)`, which makes the module that takes the place of a linear or convolutional layer
      and of the norm behind it; a ValueError from it is the reason why that layer is kept,
    - `plan(plan, **options)`, which may do anything that `equinorm.models.plan.Plan` offers.

    `options` are the options the method has, with their defaults. `plain` tells `fold`, for each class of layers that
    the method puts in, which function makes a plain layer of one.

    >>> register_method("l1norm", layer=lambda layer, p: L1Norm(layer, p), options={"p": 1.0})
    """
    if name in _known():
        raise ValueError(f"there is a method called {name!r} already")
    if sum(given is not None for given in (norm, layer, plan)) != 1:
        raise TypeError("register_method takes one of norm, layer and plan")
    kind, work = "weight", plan
    if norm is not None:
        kind, work = "activation", _plan_from_norm(norm)
    elif layer is not None:
        work = _plan_from_layer(layer)
    assert work is not None
    made = norm or layer or plan
    return register(
        Method(name, title or name, kind, source, made, work, options=dict(options or {}), layers=dict(plain or {}))
    )


def _plan_from_norm(norm: Callable[..., nn.Module]) -> Callable[..., None]:
    made: set[type[nn.Module]] = {norm} if isinstance(norm, type) else set()

    def plan_(plan: Plan, **options: Any) -> None:
        count_already(plan, made)

        def make(place: Place) -> nn.Module:
            module = norm(place.channels, **options)
            made.add(type(module))
            return module

        replace_norms(plan, make, lambda module, _: type(module) in made)

    return plan_


def _plan_from_layer(make: Callable[..., nn.Module]) -> Callable[..., None]:
    made: set[type[nn.Module]] = {make} if isinstance(make, type) else set()

    def plan_(plan: Plan, **options: Any) -> None:
        count_already(plan, made)

        def fused(call: Call, norm: Norm | None) -> nn.Module | str:
            try:
                module = make(call.module, **options)
            except ValueError as error:
                return str(error)
            made.add(type(module))
            return module

        fuse_layers(plan, fused, lambda module: type(module) in made)

    return plan_


def put_on_(method: Method, model: nn.Module, roles: Roles, options: Mapping[str, Any]) -> None:
    """Put a method on a net that was just built."""
    if method.put is not None:
        method.put(model, roles, **{**method.options, **options})


def norms_of_activations() -> Iterator[Method]:
    """The methods whose norms can stand behind any layer."""
    return (method for method in methods() if method.is_norm)
