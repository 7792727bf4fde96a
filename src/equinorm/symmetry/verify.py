"""The net below the rules: run the model once as it is and once with all scales moved, and compare.

Nothing of the user's is written: parameters and buffers are functional copies, inputs are clones, random states and
whatever modules hold besides are put back. Factors are powers of two, which commute with rounding, so outputs that
differ at all differ because something that was found free is not. What it was is found by bisection over the layers
that opened scales, and frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..models.inputs import as_arguments
from ..models.modes import autocast_off
from .traceless import forgotten, is_plain, seed_all, undisturbed

__all__ = ["Verification", "Verifier", "outputs_of", "relative_change"]

LARGEST = 200_000_000
LARGEST_WORK = 20_000_000_000
"""Parameters, and multiplications in one run, of models that are verified without being asked: two runs of such a
model cost less than its export."""
ROUNDS = 20


@dataclass(frozen=True)
class Verification:
    """What moving all scales at once did to the outputs of a model."""

    done: bool
    change: float = 0.0
    """The largest relative change of an output that is left."""
    frozen: tuple[str, ...] = ()
    """Where scales were opened that turned out not to be free: a rule is wrong there, please report it."""
    why_not: str = ""
    """Why it was not done."""

    def __str__(self) -> str:
        if not self.done:
            return f"not verified: {self.why_not}"
        caught = f"; frozen because moving them changed the outputs: {', '.join(self.frozen)}" if self.frozen else ""
        return f"verified: with all scales moved outputs change by {self.change:.1e}{caught}"


class CannotRunError(Exception):
    """The model cannot be run on these inputs, for the reason that is given."""


class Verifier:
    """Runs a model on copies, with some of its parameters multiplied."""

    def __init__(
        self, model: nn.Module, example_inputs: Any, *, vary: bool = False, kept: Collection[str] = ()
    ) -> None:
        """With `vary`, parameters whose values are all the same (offsets at 0, gains at 1) are run with other values:
        as they are they would hide much, and what is free is so whatever their values. Those `kept` are run as they
        are: what they become is computed from their own values."""
        self.model = model
        self.vary, self.kept = vary, kept
        tensors = [*model.parameters(), *model.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            raise CannotRunError("the model is on the meta device")
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        self.inputs = pytree.tree_map(lambda leaf: self._input(leaf, generator), as_arguments(example_inputs))

    def _input(self, leaf: Any, generator: torch.Generator) -> Any:
        """An input with values; random ones where the given are all the same, under which much would stay hidden."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():
            if leaf.is_meta or (leaf.numel() > 1 and bool((leaf == leaf.reshape(-1)[0]).all())):
                drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
                return drawn.to(leaf.dtype).to(self.device if leaf.is_meta else leaf.device)
        elif leaf.is_meta:
            raise CannotRunError("an input of integers is on the meta device, so its values are not known")
        return leaf.detach()

    def run(
        self, factors: Mapping[str, Tensor] | None = None, others: Mapping[str, Tensor | float] | None = None
    ) -> list[Tensor]:
        """The output tensors with these factors on these parameters, in the model's present mode.

        `others` are new values of buffers, of parameters and of numbers on modules, by name.
        """
        try:
            return self._outputs(factors or {}, others or {}, gradients=False)
        except RuntimeError:  # a model may ask for gradients in its forward
            return self._outputs(factors or {}, others or {}, gradients=True)

    def _outputs(
        self, factors: Mapping[str, Tensor], others: Mapping[str, Tensor | float], gradients: bool
    ) -> list[Tensor]:
        copies = self._copies(factors, others, gradients)
        args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.inputs)
        with forgotten(self.model), undisturbed(self.model), autocast_off(), torch.set_grad_enabled(gradients):
            seed_all(0)
            for name, value in others.items():
                path, _, leaf = name.rpartition(".")
                if not isinstance(value, Tensor):
                    setattr(self.model.get_submodule(path), leaf, value)
            out = functional_call(self.model, copies, args, kwargs, tie_weights=False)
        return [leaf.detach() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]

    def _copies(
        self, factors: Mapping[str, Tensor], others: Mapping[str, Tensor | float], gradients: bool
    ) -> dict[str, Tensor]:
        """Copies of all parameters and buffers, once for each module that holds them, multiplied where they move.

        A module with two names is given once: `functional_call` would take its first copy for what it has to put back.
        """
        generator = torch.Generator().manual_seed(2)
        copies = {id(buffer): buffer.detach().clone() for buffer in self.model.buffers()}
        for name, parameter in self.model.named_parameters():
            copies[id(parameter)] = copy = parameter.detach().clone()
            if self.vary and name not in self.kept and _is_constant(parameter):
                copy += 0.5 * torch.randn(copy.shape, generator=generator).to(copy)
        for name, factor in factors.items():
            parameter = self.model.get_parameter(name)
            copies[id(parameter)].mul_(_power_of_two(factor).to(parameter))
        for name, value in others.items():
            if isinstance(value, Tensor):
                path, _, leaf = name.rpartition(".")
                copies[id(getattr(self.model.get_submodule(path), leaf))] = value.clone()
        for parameter in self.model.parameters():
            copies[id(parameter)].requires_grad_(gradients and parameter.requires_grad)
        return {
            f"{path}.{key}" if path else key: copies[id(tensor)]
            for path, module in self.model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }


def _is_constant(tensor: Tensor) -> bool:
    """Whether a plain tensor holds one number only."""
    if not is_plain(tensor) or not tensor.numel() or not tensor.is_floating_point():
        return False
    return bool((tensor == tensor.reshape(-1)[0]).all())


def _power_of_two(factor: Tensor) -> Tensor:
    """Factors that should be powers of two, without the rounding of their logarithms."""
    exponent = torch.log2(factor)
    nearest = exponent.round()
    return torch.where((exponent - nearest).abs() < 1e-6, torch.ldexp(torch.ones_like(factor), nearest), factor)


def work_of(module: fx.GraphModule) -> int:
    """About how many multiplications one run of a graph takes."""
    work = 0
    for node in module.graph.nodes:
        made = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        if node.op != "call_function" or not made:
            continue
        given = [source.meta.get("val") for source in node.all_input_nodes]
        name = str(node.target)
        depth = 1
        if any(part in name for part in _PRODUCTS) and len(given) > 1 and all(isinstance(t, Tensor) for t in given[:2]):
            left, right = given[0], given[1]
            layer = "conv" in name or "linear" in name
            depth = right.numel() // max(right.shape[0], 1) if layer and right.ndim else int(left.shape[-1])
        work += made[0].numel() * depth
    return work + sum(work_of(inner) for inner in module.children() if isinstance(inner, fx.GraphModule))


_PRODUCTS = ("linear", "conv", "mm", "matmul", "einsum", "attention")


def outputs_of(model: nn.Module, example_inputs: Any) -> list[Tensor] | None:
    """What a model puts out, leaving no trace; None if it cannot be run on these inputs."""
    try:
        return Verifier(model, example_inputs).run()
    except Exception:
        return None


def relative_change(after: list[Tensor], before: list[Tensor]) -> float:
    """The largest ‖after - before‖ / ‖before‖ of an output; infinite where something that is not a number changed."""
    if [a.shape for a in after] != [b.shape for b in before]:
        return math.inf
    return max((_change(a, b) for a, b in zip(after, before, strict=True)), default=0.0)


def _change(after: Tensor, before: Tensor) -> float:
    if not (before.is_floating_point() or before.is_complex()):
        return 0.0 if torch.equal(after, before) else math.inf
    exact = torch.complex128 if before.is_complex() else torch.float64
    a, b = after.to(exact), before.to(exact)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return math.inf
    a, b = a[finite], b[finite]
    length, difference = float(torch.linalg.vector_norm(b)), float(torch.linalg.vector_norm(a - b))
    return difference / length if length else difference


def tolerance(outputs: list[Tensor], exact: bool) -> float:
    """What counts as rounding: with factors whose powers are powers of two almost nothing, else a few hundred ulps."""
    worst = max((torch.finfo(t.dtype).eps for t in outputs if t.is_floating_point()), default=torch.finfo().eps)
    return (16 if exact else 1000) * worst


def log_factors(n: int, small: bool) -> Tensor:
    """Logarithms of random even powers of two, none of them 1, for n scales."""
    generator = torch.Generator().manual_seed(1)
    powers = torch.tensor([-2.0, 2.0] if small else [-4.0, -2.0, 2.0, 4.0], dtype=torch.float64)
    return math.log(2.0) * powers[torch.randint(len(powers), (n,), generator=generator)]


def culprits(groups: list[int], is_changed: Callable[[list[int]], bool]) -> list[int]:
    """Groups that change the outputs when they move, given that all together do: one by bisection, or a pair of halves
    that only do so together."""
    while len(groups) > 1:
        half = len(groups) // 2
        first, second = groups[:half], groups[half:]
        if is_changed(first):
            groups = first
        elif is_changed(second):
            groups = second
        else:
            return groups if len(groups) <= 8 else _together(first, second, is_changed)
    return groups


def _together(first: list[int], second: list[int], is_changed: Callable[[list[int]], bool]) -> list[int]:
    """The smaller part of `second` that with all of `first` changes the outputs."""
    while len(second) > 1:
        half = len(second) // 2
        if is_changed(first + second[:half]):
            second = second[:half]
        elif is_changed(first + second[half:]):
            second = second[half:]
        else:
            break
    return second
