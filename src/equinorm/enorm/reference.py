"""Algorithm 1 of stock2019 in plain lines: the oracle of the tests, and a choice in the ENorm recipes.

Everything here is for a *chain*: q linear layers, one after the other, with positively homogeneous functions
in between (equation 1). Any other network is for :func:`equinorm.balance_`, which finds the symmetries.

The paper writes ``y = x W``, so layer k is a matrix ``W_k`` of shape ``(n_{k-1}, n_k)``: inputs on the first
axis, outputs on the last. The functions below keep that convention and let a weight have further axes in the
middle (the window of a convolution, the positions a flatten has spread a channel over). :func:`paper_views`
turns torch's ``(out, in, ...)`` tensors into such tensors without copying, so that what is done in place to
the view is done to the parameter.

>>> balance_chain_([W1, W2, W3], [b1, b2, b3], c=1.2, cycles=1)
>>> balance_layers_([model.conv1, model.conv2, model.fc], optimizer, c=1.2)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Variant = Literal["paper", "released"]
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def lp_norm(weights: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """The Lp norm of all weights together, ``(sum_k ||W_k||_p^p)^(1/p)``: the p-th root of equation 3."""
    return objective(weights, p) ** (1.0 / p)


def objective(weights: Sequence[Tensor], p: float = 2.0, c: float = 1.0) -> Tensor:
    """What ENorm-c minimises over the rescalings: ``sum_k c^(p(q-k)) ||W_k||_p^p``.

    With c = 1 this is equation 3. For other c it is equation 12 with the exponent that makes
    ``d = sqrt(R / (c L))`` its minimiser: along one scale d it is ``c^p L^p d^p + R^p d^-p`` and a constant,
    least where the two terms are equal, at ``d^2 = R / (c L)``.
    """
    q = len(weights)
    return torch.stack([c ** (p * (q - k)) * W.abs().pow(p).sum() for k, W in enumerate(weights, start=1)]).sum()


def column_norms(W: Tensor, p: float = 2.0) -> Tensor:
    """``L[j] = ||W[:, j]||_p``: one norm per output."""
    return W.abs().pow(p).flatten(0, -2).sum(0) ** (1.0 / p)


def row_norms(W: Tensor, p: float = 2.0) -> Tensor:
    """``R[i] = ||W[i, :]||_p``: one norm per input."""
    return W.abs().pow(p).flatten(1).sum(1) ** (1.0 / p)


def rescaling(L: Tensor, R: Tensor, c: float = 1.0) -> Tensor:
    """The scales of one hidden layer, ``d = sqrt(R / (c L))`` (equations 5 and 11), and 1 for a dead unit.

    Equation 11 as printed has ``1/c`` outside of the square root. The released code has it inside; that is
    the reading the measured results belong to, so it is ours too.
    """
    d = (R / (c * L)).sqrt()
    # A unit with no incoming or no outgoing weight has no minimum (theorem 1 assumes it away): it stays.
    return torch.where((L > 0) & (R > 0) & d.isfinite() & (d > 0), d, torch.ones_like(d))


@torch.no_grad()
def balance_chain_(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    weight_momenta: Sequence[Tensor | None] | None = None,
    bias_momenta: Sequence[Tensor | None] | None = None,
    *,
    p: float = 2.0,
    c: float = 1.0,
    cycles: int = 1,
    variant: Variant = "paper",
) -> list[Tensor]:
    """Run ENorm cycles (algorithm 1) in place and return the accumulated scales ``d_1 ... d_{q-1}``.

    Args:
        weights: ``W_1 ... W_q``, inputs on the first axis, outputs on the last.
        biases: one per layer (or None); they become ``b_k D_k`` (equation 7), which keeps the function.
        weight_momenta, bias_momenta: their averages of gradients; carried as gradients are, equation 10.
        p, c: which norm, and the asymmetry of section 3.7.
        cycles: a cycle visits every hidden layer once, from the input to the output.
        variant: ``"paper"`` computes the norms from the weights as they are at that moment (Gauss-Seidel).
            ``"released"`` does what the authors' published code does: the norms of all layers come from the
            weights as they were before the cycle, and the last layer is left out, so its inputs are never
            rescaled. (That code also leaves biases alone, which changes the function; here they follow.)
    """
    q = len(weights)
    _check_chain(weights, biases, weight_momenta, bias_momenta)
    if variant not in ("paper", "released"):
        raise ValueError(f"variant must be 'paper' or 'released', not {variant!r}")
    total = [W.new_ones(W.shape[-1]) for W in weights[:-1]]
    stop = q if variant == "paper" else q - 1

    for _ in range(cycles):
        stale = [(column_norms(W, p), row_norms(W, p)) for W in weights]
        for k in range(1, stop):  # the paper's W_k is weights[k - 1]: it is on the left of hidden layer k
            if variant == "paper":
                L, R = column_norms(weights[k - 1], p), row_norms(weights[k], p)
            else:
                L, R = stale[k - 1][0], stale[k][1]
            d = rescaling(L, R, c)
            weights[k - 1].mul_(d)  # W_k <- W_k D_k
            weights[k].mul_(_along_inputs(1 / d, weights[k]))  # W_{k+1} <- D_k^-1 W_{k+1}
            _scale_(biases, k - 1, d)
            _scale_(weight_momenta, k - 1, 1 / d)
            _scale_(bias_momenta, k - 1, 1 / d)
            if weight_momenta is not None and (m := weight_momenta[k]) is not None:
                m.mul_(_along_inputs(d, m))
            total[k - 1].mul_(d)
    return total


def paper_views(weights: Sequence[Tensor]) -> list[Tensor]:
    """Views of torch's ``(out, in, ...)`` weights as ``(in, ..., out)`` tensors (equations 13 and 14).

    A linear layer that follows a flattened convolution has ``n * S`` inputs, S for each of the n channels
    before it; its view is ``(n, S, out)``, so that a channel is one row whatever follows it.
    """
    views: list[Tensor] = []
    for k, W in enumerate(weights):
        n = W.shape[1] if k == 0 else weights[k - 1].shape[0]
        if n == 0 or W.shape[1] % n:
            raise ValueError(
                f"layer {k} takes {W.shape[1]} inputs, not a multiple of the {n} outputs of layer {k - 1}: "
                "this is not a chain of ungrouped layers. Use equinorm.balance_ for other networks."
            )
        # unflatten only splits an axis, so this is a view for any memory format (reshape might copy).
        split = W if W.shape[1] == n else W.unflatten(1, (n, -1))
        views.append(split.movedim(0, -1))
    return views


def balance_layers_(
    layers: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    p: float = 2.0,
    c: float = 1.0,
    cycles: int = 1,
    variant: Variant = "paper",
) -> list[Tensor]:
    """Algorithm 1 on torch layers, given in the order in which they are applied, and on SGD's momentum.

    For algorithm 2 call it after every step: ``optimizer.step(); balance_layers_(layers, optimizer, c=1.2)``.
    """
    chain: list[nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d] = []
    for layer in layers:
        if not isinstance(layer, _LAYERS) or getattr(layer, "groups", 1) != 1:
            raise ValueError(
                f"{layer} is not an ungrouped nn.Linear or nn.Conv layer; the reference knows chains of "
                "those only. Use equinorm.balance_ for other networks."
            )
        chain.append(layer)
    if optimizer is not None and not isinstance(optimizer, torch.optim.SGD):
        name = type(optimizer).__name__
        raise ValueError(f"the reference carries the momentum of torch.optim.SGD only, not that of {name}")

    def buffer(param: Tensor | None) -> Tensor | None:
        if optimizer is None or param is None:
            return None
        buffer: Tensor | None = optimizer.state.get(param, {}).get("momentum_buffer")
        return buffer

    weights = [layer.weight.detach() for layer in chain]
    biases = [layer.bias for layer in chain]
    momenta = [buffer(layer.weight) for layer in chain]
    # A layer without a buffer lends its weight for the shapes of its neighbours' views, and is then left out.
    views = paper_views([W if m is None else m for W, m in zip(weights, momenta, strict=True)])
    return balance_chain_(
        paper_views(weights),
        biases,
        [None if m is None else view for m, view in zip(momenta, views, strict=True)],
        [buffer(b) for b in biases],
        p=p,
        c=c,
        cycles=cycles,
        variant=variant,
    )


def _along_inputs(d: Tensor, W: Tensor) -> Tensor:
    """d shaped so that it multiplies the rows of W."""
    return d.reshape(-1, *[1] * (W.ndim - 1))


def _scale_(tensors: Sequence[Tensor | None] | None, k: int, d: Tensor) -> None:
    if tensors is not None and (t := tensors[k]) is not None:
        t.mul_(d)


def _check_chain(weights: Sequence[Tensor], *others: Sequence[Tensor | None] | None) -> None:
    """Refuse before anything is changed."""
    for k in range(1, len(weights)):
        if weights[k - 1].shape[-1] != weights[k].shape[0]:
            raise ValueError(
                f"weights {k - 1} and {k} have shapes {tuple(weights[k - 1].shape)} and "
                f"{tuple(weights[k].shape)}: the last axis of one must be the first of the next. "
                "Torch's (out, in) weights go through paper_views."
            )
    for tensors in others:
        if tensors is not None and len(tensors) != len(weights):
            raise ValueError(
                f"{len(weights)} weights but {len(tensors)} biases or momenta: give one (or None) per layer"
            )
