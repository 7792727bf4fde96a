"""Optimizers that torch does not have: how their state follows a rescaling, by the qualified names of their classes.

Nothing is imported here, not even this library's own Muon for filters. `optimizer_state` looks a class up by its name
when it meets it first. Powers are those of the table in `optimizer_state`; what is particular to other libraries:

schedule-free    z takes the steps and is a copy of the weights (+1); the stored weight y = (1 - β)z + βx follows it
                 with x, the average of all z. All three are multiplied by f, so that training and evaluation agree.
bitsandbytes     8-bit state is a number of a code book for each element and one size for each block of 256: it is
                 read, multiplied and written again.
Adafactor        with means of the squares over one axis each, as torch's, in other layouts.
MADGRAD          x₀ - s / ∛(Σg²) are its weights; s and the squares follow by their powers, so x₀ is what keeps z·f.

What no factor can carry is refused, with the reason: matrices that mix channels (Shampoo, SOAP, Kron), and numbers for
a whole layer (NovoGrad, LARS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["KNOWN", "REFUSED", "KnownOptimizer", "SecondCopy", "carry_factored_squares_"]

State = dict[str, Any]


@dataclass(frozen=True)
class SecondCopy:
    """A copy z of the weights that takes the optimizer's steps, and that the weight itself follows.

    A step that is shortened must be shortened there, or the next one brings it back: z moves by δ, and the weight by
    the share of a step of z that it takes.
    """

    key: str
    """State that moves along with z."""
    read: Callable[[State], Tensor]
    """z, from the state of a parameter; before the first step it is the weight."""
    share: Callable[[Mapping[str, Any]], float]
    """Of δ what the weight moves by, from the parameter's group after the step."""


@dataclass(frozen=True)
class KnownOptimizer:
    """As in `register_state_rule`."""

    rules: Mapping[Any, Any]
    linear: bool = False
    decoupled: bool | Callable[[Any, Mapping[str, Any]], Any] = False
    """Or the share of the weight that decay takes, of (optimizer, group)."""
    second_copy: SecondCopy | None = None


# -- schedule-free -----------------------------------------------------------------------------------------------------


def _averaging(group: Mapping[str, Any]) -> float:
    """c: the weight of the newest z in the average x, of the step just made."""
    total = group["weight_sum"]
    weight = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
    return float(weight / total) if total else 0.0


def _share_of_y(group: Mapping[str, Any]) -> float:
    """y = (1 - β)z + βx and x = (1 - c)x + cz, so y takes 1 - β(1 - c) of what z moves."""
    beta = group["momentum"] if "momentum" in group else group["betas"][0]
    return float(1 - beta * (1 - _averaging(group)))


def _schedule_free_decay(optimizer: Any, group: Mapping[str, Any]) -> Any:
    return group.get("scheduled_lr", group["lr"]) * group["weight_decay"]


def _z(state: State) -> Tensor:
    found: Tensor = state["z"]
    return found


def _schedule_free() -> dict[str, KnownOptimizer]:
    found = {}
    for suffix, share in (("", _share_of_y), ("Closure", _averaging)):  # with a closure the stored weight is x
        copy = SecondCopy("z", _z, share)
        for kind in ("SGD", "AdamW", "RAdam"):
            name = f"schedulefree.{kind.lower()}_schedulefree{'_closure' * bool(suffix)}.{kind}ScheduleFree{suffix}"
            if kind == "SGD":
                found[name] = KnownOptimizer({"z": 1}, linear=True)
            else:
                found[name] = KnownOptimizer({"z": 1, "exp_avg_sq": -2}, False, _schedule_free_decay, copy)
    return found


# -- squares by rows and columns ---------------------------------------------------------------------------------------


def carry_factored_squares_(row: Tensor, col: Tensor, g: Tensor, dims: tuple[int, int] = (-2, -1)) -> None:
    """Carry means of squares, read as V = row·col / mean(col), where gradients are multiplied by `g`.

    `row` has size 1 along the second of `dims` and `col` along the first. The new means are those of V·g²:
    row'[o] = row[o] · Σ_i col[i]·g[o,i]² / Σ_i col[i], and likewise for columns, for any g that broadcasts. Exact where
    the squares have rank one, the case Adafactor is made for.
    """
    squares, (first, second) = g.square(), dims
    row_change = _ratio((col * squares).mean(second, keepdim=True), col.mean(second, keepdim=True))
    col_change = _ratio((row * squares).mean(first, keepdim=True), row.mean(first, keepdim=True))
    row.mul_(row_change)
    col.mul_(col_change)


def _ratio(new: Tensor, old: Tensor) -> Tensor:
    """new / old, or 1 where all squares are still zero and there is nothing to carry."""
    return torch.where(old > 0, new / old, 1.0)


def _carry_rows_and_columns(state: State, w: Tensor, g: Tensor) -> None:
    """Means that have lost an axis: of channels in and out, as timm has them of kernels, or the last two."""
    rows, cols = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
    for first, second in ((0, 1), (g.ndim - 2, g.ndim - 1)):
        if rows.shape == _without(g.shape, second) and cols.shape == _without(g.shape, first):
            carry_factored_squares_(rows.unsqueeze(second), cols.unsqueeze(first), g, (first, second))
            return
    raise ValueError(f"means of squares of shapes {tuple(rows.shape)} and {tuple(cols.shape)} for {tuple(g.shape)}")


def _without(shape: torch.Size, axis: int) -> torch.Size:
    return shape[:axis] + shape[axis + 1 :]


def _carry_two_largest(state: State, w: Tensor, g: Tensor) -> None:
    """Big Vision's: `c` is a mean over the second largest axis and `r` over the largest, the later one of equals."""
    by_size = sorted((n, axis) for axis, n in enumerate(g.shape))
    carry_factored_squares_(state["exp_avg_sq_r"], state["exp_avg_sq_c"], g, (by_size[-2][1], by_size[-1][1]))


# -- timm --------------------------------------------------------------------------------------------------------------


def _timm_decay(optimizer: Any, group: Mapping[str, Any]) -> Any:
    """lr·decay where decay multiplies the weight; (lr² / first lr)·decay where it is corrected."""
    if not group.get("decoupled_decay", group.get("decoupled", True)):
        return 0.0
    if group.get("corrected_weight_decay", False):
        return group["lr"] ** 2 / optimizer.defaults["lr"] * group["weight_decay"]
    if group.get("fixed_decay", False):
        return group["weight_decay"]
    return group["lr"] * group["weight_decay"]


def _timm_sgdp_decay(optimizer: Any, group: Mapping[str, Any]) -> Any:
    return group["lr"] * group["weight_decay"] / (1 - group["momentum"])


def _adan_decay(optimizer: Any, group: Mapping[str, Any]) -> Any:
    """The proximal form divides by 1 + lr·decay, after the step."""
    share = group["lr"] * group["weight_decay"]
    return share if group["no_prox"] else share / (1 + share)


def _carry_muon_squares(state: State, w: Tensor, g: Tensor) -> None:
    """Squares of gradients where a parameter is left to AdamW; of orthogonal matrices, which see no f, in AdaMuon."""
    if not state["use_muon"]:
        state["exp_avg_sq"].mul_(g.square())


def _madgrad_z(state: State) -> Tensor:
    found: Tensor = state["x0"] - state["s"] / _cube_root(state["grad_sum_sq"])
    return found


def _cube_root(squares: Tensor) -> Tensor:
    return squares.pow(1 / 3).add_(1e-6)


def _carry_madgrad(state: State, w: Tensor, g: Tensor) -> None:
    s, squares, x0 = state["s"], state["grad_sum_sq"], state.get("x0")
    old = s / _cube_root(squares)
    s.mul_(g)
    squares.mul_(g.square())
    if x0 is not None:  # without momentum it is made anew from the weight in each step
        x0.copy_(w * (x0 - old) + s / _cube_root(squares))


_ADAM = {"step": 0, "exp_avg": -1, "exp_avg_sq": -2}
_ADAMAX = {**_ADAM, "max_exp_avg_sq": -2}
_NORMALIZED = {**_ADAM, "exp_avg": 0}  # averages of gradients that were normalized before
_FACTORED = {"step": 0, "exp_avg": 0, "exp_avg_sq": -2, "RMS": 0}

_TIMM: dict[str, KnownOptimizer] = {
    "adabelief.AdaBelief": KnownOptimizer(
        {"step": 0, "exp_avg": -1, "exp_avg_var": -2, "max_exp_avg_var": -2}, decoupled=_timm_decay
    ),
    "adafactor.Adafactor": KnownOptimizer(
        {**_FACTORED, ("exp_avg_sq_row", "exp_avg_sq_col"): _carry_rows_and_columns},
        decoupled=lambda optimizer, group: 0.0 if group["lr"] is None else group["lr"] * group["weight_decay"],
    ),
    "adafactor_bv.AdafactorBigVision": KnownOptimizer(
        {**_FACTORED, ("exp_avg_sq_r", "exp_avg_sq_c"): _carry_two_largest}, decoupled=_timm_decay
    ),
    "adahessian.Adahessian": KnownOptimizer(  # squares of the Hessian's diagonal, which is a square already
        {"step": 0, "hessian step": 0, "exp_avg": -1, "exp_hessian_diag_sq": -4}, decoupled=_timm_decay
    ),
    "adamp.AdamP": KnownOptimizer(_ADAM, decoupled=_timm_decay),
    "adamw.AdamWLegacy": KnownOptimizer(_ADAMAX, decoupled=_timm_decay),
    "adan.Adan": KnownOptimizer(
        {"exp_avg": -1, "exp_avg_sq": -2, "exp_avg_diff": -1, "neg_pre_grad": -1}, decoupled=_adan_decay
    ),
    "adopt.Adopt": KnownOptimizer(_NORMALIZED, decoupled=_timm_decay),
    "lamb.Lamb": KnownOptimizer(
        _ADAM, decoupled=lambda o, group: _timm_decay(o, group) if group.get("decoupled_decay") else 0.0
    ),
    "laprop.LaProp": KnownOptimizer({**_NORMALIZED, "exp_avg_lr_1": 0, "exp_avg_lr_2": 0}, decoupled=_timm_decay),
    "lion.Lion": KnownOptimizer({"exp_avg": -1}, decoupled=_timm_decay),
    "madgrad.MADGRAD": KnownOptimizer(
        {"step": 0, ("s", "grad_sum_sq"): _carry_madgrad, "x0": 0},
        second_copy=SecondCopy("x0", _madgrad_z, lambda group: 1.0 - float(group["momentum"])),
    ),
    "mars.Mars": KnownOptimizer({**_ADAM, "last_grad": -1}, decoupled=_timm_decay),
    "muon.Muon": KnownOptimizer(
        {"step": 0, "use_muon": 0, "momentum_buffer": -1, "exp_avg": -1, ("exp_avg_sq",): _carry_muon_squares},
        decoupled=_timm_decay,
    ),
    "nadam.NAdamLegacy": KnownOptimizer({**_ADAM, "m_schedule": 0}),
    "nadamw.NAdamW": KnownOptimizer(_ADAM, decoupled=_timm_decay),
    "radam.RAdamLegacy": KnownOptimizer(_ADAM, decoupled=_timm_decay),
    "rmsprop_tf.RMSpropTF": KnownOptimizer(
        {"step": 0, "square_avg": -2, "grad_avg": -1, "momentum_buffer": 0}, decoupled=_timm_decay
    ),
    "sgdp.SGDP": KnownOptimizer({"momentum": -1}, decoupled=_timm_sgdp_decay),
    "sgdw.SGDW": KnownOptimizer({"momentum_buffer": -1}, linear=True, decoupled=_timm_decay),
}


# -- bitsandbytes ------------------------------------------------------------------------------------------------------

BLOCK = 256
"""Elements that share a size."""
CHUNK = 1 << 14
"""Blocks that are read at a time: the numbers of their codes take eight bytes each."""


def _carry_quantized(number: int, power: int) -> Callable[[State, Tensor, Tensor], None]:
    """The rule for one of bitsandbytes' states, in 32 bits or in 8."""

    def carry(state: State, w: Tensor, g: Tensor) -> None:
        value, factor = state[f"state{number}"], g**power
        if value.dtype.is_floating_point:
            value.mul_(factor)
            return
        parts = value.numel() // factor.numel()  # AdEMAMix keeps two averages in one tensor
        sizes = state[f"absmax{number}"].view(parts, -1)
        for part, size in zip(value.view(parts, -1), sizes, strict=True):
            _multiply_quantized_(part, size, state[f"qmap{number}"], factor.reshape(-1))

    return carry


def _multiply_quantized_(codes: Tensor, sizes: Tensor, book: Tensor, factor: Tensor) -> None:
    """Read numbers by their code book (sorted), multiply them, and write the nearest codes.

    The new size of a block is the least with which its largest numbers of either sign are in the book: where a whole
    block has one factor no code changes.
    """
    middles, (low, high) = (book[1:] + book[:-1]) / 2, (book[0], book[-1])
    for block in range(0, len(sizes), CHUNK):
        here = slice(block * BLOCK, (block + CHUNK) * BLOCK)
        size = sizes[block : block + CHUNK]
        values = torch.zeros(len(size) * BLOCK, dtype=size.dtype, device=codes.device)
        values[: codes[here].numel()] = book[codes[here].long()]
        values = values.view(-1, BLOCK) * size[:, None]
        values.view(-1)[: codes[here].numel()].mul_(factor[here])
        largest = values.amax(1) / high
        if book[0] < 0:
            largest = torch.maximum(largest, values.amin(1) / low)
        size.copy_(largest)
        scaled = values / torch.where(largest > 0, largest, 1.0)[:, None]
        codes[here] = torch.bucketize(scaled.view(-1)[: codes[here].numel()], middles).to(codes.dtype)


def _bitsandbytes() -> dict[str, KnownOptimizer]:
    rest: dict[Any, Any] = {"step": 0, "unorm_vec": 0}
    for number in (1, 2):
        rest |= {f"qmap{number}": 0, f"absmax{number}": 0}
    gradients, squares = {("state1",): _carry_quantized(1, 1)}, {("state1",): _carry_quantized(1, 2)}
    second = {("state2",): _carry_quantized(2, 2)}
    found = {"optimizer.Optimizer2State": KnownOptimizer({**rest, **gradients, **second}, decoupled=True)}
    for module, name, rules, linear, decoupled in (
        ("lion", "Lion", gradients, False, True),
        ("sgd", "SGD", gradients, True, False),
        ("rmsprop", "RMSprop", squares, False, False),
        ("adagrad", "Adagrad", squares, False, False),
    ):
        for bits in ("", "8bit", "32bit"):
            found[f"{module}.{name}{bits}"] = KnownOptimizer({**rest, **rules}, linear, decoupled)
    return {f"bitsandbytes.optim.{name}": known for name, known in found.items()}


# -- all of them -------------------------------------------------------------------------------------------------------


def _lion_decay(optimizer: Any, group: Mapping[str, Any]) -> Any:
    """lion-pytorch can divide decay by the first learning rate."""
    share = group["lr"] * group["weight_decay"]
    return share / optimizer._init_lr if optimizer.decoupled_wd else share


KNOWN: dict[str, KnownOptimizer] = {
    "equinorm.unitfilters.muon.Muon": KnownOptimizer({"momentum_buffer": -1}, decoupled=True),
    **_schedule_free(),
    **_bitsandbytes(),
    **{f"timm.optim.{name}": known for name, known in _TIMM.items()},
    "lion_pytorch.lion_pytorch.Lion": KnownOptimizer({"exp_avg": -1}, decoupled=_lion_decay),
    "transformers.optimization.Adafactor": KnownOptimizer(
        {**_FACTORED, ("exp_avg_sq_row", "exp_avg_sq_col"): _carry_rows_and_columns},
        decoupled=lambda optimizer, group: 0.0 if group["lr"] is None else group["lr"] * group["weight_decay"],
    ),
}
"""Qualified name of a class -> how its state follows; subclasses follow alike."""

_MATRICES = (
    "it preconditions by matrices that are sums of products of gradients, in which the channels that a rescaling moves "
    "apart are mixed: the matrices of the rescaled weights cannot be had from those of the old ones. Use an optimizer "
    "whose state belongs to single elements (AdamW, Lion, Muon, schedule-free) or to rows and columns (Adafactor), or "
    "balance once before training with equinorm.balance_"
)
_WHOLE_LAYER = (
    "it keeps {what} for a whole layer, of which a rescaling of channels changes unknown parts. Use an optimizer "
    "whose state belongs to single elements (AdamW, Lamb, Lion), or balance once before training with equinorm.balance_"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(("Shampoo", "DistributedShampoo", "ScalableShampoo", "SOAP", "Kron", "PSGD"), _MATRICES),
    "NvNovoGrad": _WHOLE_LAYER.format(what="the length of the gradient"),
    "NovoGrad": _WHOLE_LAYER.format(what="the length of the gradient"),
    "Lars": _WHOLE_LAYER.format(what="steps whose length follows from the norms"),
    "LARS": _WHOLE_LAYER.format(what="steps whose length follows from the norms"),
    "Lookahead": (
        "it puts weights of its own in the place of the optimizer's every few steps. Use schedule-free, or an average "
        "of the weights as one of ENorm's companions"
    ),
    "ScheduleFreeWrapper": (
        "it exchanges weights and averages in the middle of a step. Use schedulefree's own SGDScheduleFree, "
        "AdamWScheduleFree or RAdamScheduleFree"
    ),
}
"""Name of a class, in whatever library -> why its state cannot follow."""
