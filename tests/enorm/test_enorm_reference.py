"""The oracle must itself be right: each test is a statement of stock2019, by equation or theorem."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equinorm.enorm.reference import (
    balance_chain_,
    balance_layers_,
    column_norms,
    lp_norm,
    objective,
    paper_views,
    rescaling,
    row_norms,
)

VARIANTS = ("paper", "released")


def random_chain(sizes: list[int], seed: int = 0, spread: float = 1.0) -> list[Tensor]:
    """Weights in the paper's layout, thrown out of balance by a random factor per entry's row."""
    gen = torch.Generator().manual_seed(seed)
    weights = []
    for n_in, n_out in itertools.pairwise(sizes):
        W = torch.randn(n_in, n_out, generator=gen, dtype=torch.float64)
        weights.append(W * torch.exp(spread * torch.randn(n_in, 1, generator=gen, dtype=torch.float64)))
    return weights


def forward(x: Tensor, weights: list[Tensor], biases: list[Tensor] | None = None) -> Tensor:
    """Equations 1 and 6."""
    for k, W in enumerate(weights):
        x = x @ W + (0 if biases is None else biases[k])
        x = x.relu() if k + 1 < len(weights) else x
    return x


def relative_error(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def minimise_by_lbfgs(weights: list[Tensor], p: float, c: float) -> list[Tensor]:
    """The rescaled weights of least objective, by a generic minimiser on the log-scales."""
    s = [torch.zeros(W.shape[1], dtype=W.dtype, requires_grad=True) for W in weights[:-1]]
    ends = [
        torch.zeros(weights[0].shape[0], dtype=torch.float64),
        torch.zeros(weights[-1].shape[1], dtype=torch.float64),
    ]

    def rescaled() -> list[Tensor]:
        full = [ends[0], *s, ends[1]]
        return [W * torch.exp(b - a[:, None]) for W, (a, b) in zip(weights, itertools.pairwise(full), strict=True)]

    solver = torch.optim.LBFGS(
        s, max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = objective(rescaled(), p, c).log()
        loss.backward()
        return loss

    solver.step(closure)
    return [W.detach() for W in rescaled()]


def test_lp_norm_is_the_norm_of_all_entries() -> None:
    weights = random_chain([3, 4, 2])
    for p in (1.0, 2.0, 3.0):
        flat = torch.cat([W.flatten() for W in weights])
        torch.testing.assert_close(lp_norm(weights, p), torch.linalg.vector_norm(flat, p))
    torch.testing.assert_close(objective(weights, 2.0), lp_norm(weights, 2.0) ** 2)


def test_objective_weighs_early_layers_by_c_to_the_p() -> None:
    weights = [torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1)]
    assert float(objective(weights, p=2.0, c=1.5)) == pytest.approx(1.5**4 + 1.5**2 + 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("c", [0.8, 1.0, 1.2])
def test_function_is_kept_with_biases(variant: str, p: float, c: float) -> None:
    """Appendix B.2: rescaling-equivalent networks with matched biases compute the same function."""
    weights = random_chain([5, 7, 6, 8, 3])
    gen = torch.Generator().manual_seed(1)
    biases = [torch.randn(W.shape[1], generator=gen, dtype=torch.float64) for W in weights]
    x = torch.randn(9, 5, generator=gen, dtype=torch.float64)
    before = forward(x, weights, biases)
    last_bias = biases[-1].clone()
    balance_chain_(weights, biases, p=p, c=c, cycles=5, variant=variant)
    assert relative_error(forward(x, weights, biases), before) < 1e-13
    assert torch.equal(biases[-1], last_bias)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    p=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    c=st.sampled_from([0.7, 1.0, 1.3]),
    seed=st.integers(0, 2**16),
)
def test_the_objective_never_rises(sizes: list[int], p: float, c: float, seed: int) -> None:
    """Coordinate descent (section 3.3): no cycle, and so no number of cycles, raises what is minimised."""
    weights = random_chain(sizes, seed, spread=2.0)
    values = [float(objective(weights, p, c))]
    for _ in range(6):
        balance_chain_(weights, p=p, c=c)
        values.append(float(objective(weights, p, c)))
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_converges_to_equal_norms(p: float) -> None:
    """At the minimum of equation 4 every hidden unit has incoming norm = outgoing norm."""
    weights = random_chain([4, 6, 5, 7, 3])
    balance_chain_(weights, p=p, cycles=2000)
    for left, right in itertools.pairwise(weights):
        torch.testing.assert_close(column_norms(left, p), row_norms(right, p), rtol=1e-9, atol=0)


@pytest.mark.parametrize("c", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_reaches_the_minimum_of_the_weighted_objective(p: float, c: float) -> None:
    """Theorem 1 (2), and section 3.7 with c: the same minimiser as that of a generic solver."""
    weights = random_chain([3, 4, 5, 2], seed=3)
    expected = minimise_by_lbfgs(weights, p, c)
    balance_chain_(weights, p=p, c=c, cycles=3000)
    assert float(objective(weights, p, c)) == pytest.approx(float(objective(expected, p, c)), rel=1e-12)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_minimum_does_not_depend_on_the_start() -> None:
    """Theorem 1 (3): rescale at random first, and the same weights come out."""
    weights = random_chain([4, 5, 6, 3])
    other = [W.clone() for W in weights]
    for k in range(1, len(other)):
        d = torch.exp(
            2 * torch.randn(other[k].shape[0], generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        )
        other[k - 1].mul_(d)
        other[k].div_(d[:, None])
    balance_chain_(weights, cycles=3000)
    balance_chain_(other, cycles=3000)
    for a, b in zip(weights, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_asymmetry_moves_the_norm_to_the_end() -> None:
    """Section 3.7: at the fixed point of ENorm-c the outgoing norms are c times the incoming ones."""
    weights = random_chain([4, 5, 6, 3])
    balance_chain_(weights, c=1.2, cycles=3000)
    for left, right in itertools.pairwise(weights):
        torch.testing.assert_close(row_norms(right), 1.2 * column_norms(left), rtol=1e-9, atol=0)


def test_returned_scales_are_those_applied() -> None:
    """Equation 2 with the accumulated scales gives the balanced weights."""
    weights = random_chain([3, 4, 5, 2])
    before = [W.clone() for W in weights]
    scales = balance_chain_(weights, cycles=4)
    full = [torch.ones(3, dtype=torch.float64), *scales, torch.ones(2, dtype=torch.float64)]
    for W, W0, (d_in, d_out) in zip(weights, before, itertools.pairwise(full), strict=True):
        torch.testing.assert_close(W, W0 / d_in[:, None] * d_out)


def test_momentum_follows_as_a_gradient() -> None:
    """Equation 10: buffers that were gradients before are the gradients of the rescaled network."""
    weights = random_chain([4, 5, 6, 3])
    biases = [
        torch.randn(W.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        for k, W in enumerate(weights)
    ]
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))

    def gradients() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in (*weights, *biases)]
        out = forward(x, leaves[: len(weights)], leaves[len(weights) :]).square().sum()
        grads = torch.autograd.grad(out, leaves)
        return list(grads[: len(weights)]), list(grads[len(weights) :])

    weight_momenta, bias_momenta = gradients()
    balance_chain_(weights, biases, weight_momenta, bias_momenta, c=1.1, cycles=3)
    for carried, fresh in zip([*weight_momenta, *bias_momenta], [g for gs in gradients() for g in gs], strict=True):
        torch.testing.assert_close(carried, fresh, rtol=1e-10, atol=1e-12)


def test_released_variant_uses_stale_norms_and_skips_the_last_layer() -> None:
    """By hand, on scalars: every d from the weights before the cycle, none for the last layer."""
    weights = [torch.tensor([[w]], dtype=torch.float64) for w in (1.0, 4.0, 9.0, 25.0)]
    scales = balance_chain_(weights, variant="released")
    assert [float(d) for d in scales] == pytest.approx([2.0, 1.5, 1.0])  # sqrt(4/1), sqrt(9/4), left alone
    assert [float(W) for W in weights] == pytest.approx([2.0, 4.0 * 1.5 / 2.0, 9.0 / 1.5, 25.0])
    weights = [torch.tensor([[w]], dtype=torch.float64) for w in (1.0, 4.0, 9.0, 25.0)]
    scales = balance_chain_(weights, variant="paper")
    # 4/1; then W_2 is 4/2 = 2: sqrt(9/2); then W_3 is 9/sqrt(9/2) = sqrt(18): sqrt(25/sqrt(18))
    assert [float(d) for d in scales] == pytest.approx([2.0, 4.5**0.5, (25 / 18**0.5) ** 0.5])


def test_dead_units_stay() -> None:
    """A unit without incoming or outgoing weight is outside of theorem 1: no inf, no nan."""
    weights = random_chain([3, 4, 2])
    weights[0][:, 1] = 0
    weights[1][2] = 0
    dead = [weights[0][:, 2].clone(), weights[1][1].clone()]
    scales = balance_chain_(weights, cycles=3)
    assert all(W.isfinite().all() for W in weights)
    assert scales[0][1] == scales[0][2] == 1
    assert torch.equal(weights[0][:, 2], dead[0])
    assert torch.equal(weights[1][1], dead[1])
    assert torch.equal(rescaling(torch.zeros(2), torch.tensor([0.0, 1.0])), torch.ones(2))


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 9, 6),
        nn.ReLU(),
        nn.Linear(6, 2),
    ).double()


def layers_of(net: nn.Sequential) -> list[nn.Module]:
    return [m for m in net if isinstance(m, nn.Conv2d | nn.Linear)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_layers_keep_their_function(variant: str, channels_last: bool) -> None:
    """Section 4: convolutions, max-pooling, and a linear layer behind a flatten."""
    net = conv_net()
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = net(x)
    norm = float(lp_norm([m.weight.detach() for m in layers_of(net)]))
    identities = [id(p) for p in net.parameters()]
    balance_layers_(layers_of(net), c=1.2, cycles=3, variant=variant)
    assert relative_error(net(x), before) < 1e-13
    assert [id(p) for p in net.parameters()] == identities
    assert float(lp_norm([m.weight.detach() for m in layers_of(net)])) != pytest.approx(norm, rel=1e-6)


def test_torch_layers_agree_with_the_matrices() -> None:
    """The adapter on (out, in) weights does what algorithm 1 does on their transposes."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)]
    weights = [layer.weight.detach().t().clone() for layer in layers]
    biases = [layer.bias.detach().clone() for layer in layers]
    balance_chain_(weights, biases, c=1.1, cycles=2)
    balance_layers_(layers, c=1.1, cycles=2)
    for layer, W, b in zip(layers, weights, biases, strict=True):
        torch.testing.assert_close(layer.weight.t(), W)
        torch.testing.assert_close(layer.bias, b)


def test_sgd_momentum_is_carried() -> None:
    """Carried buffers equal those of a run that took its gradients in the balanced network."""
    net = conv_net()
    x = torch.randn(2, 3, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def one_step(net: nn.Module, lr: float) -> torch.optim.SGD:
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        net(x).square().sum().backward()
        optimizer.step()
        return optimizer

    optimizer = one_step(net, lr=0.0)
    twin = copy.deepcopy(net)
    balance_layers_(layers_of(net), optimizer, c=1.2)
    balance_layers_(layers_of(twin), c=1.2)
    twin.zero_grad()
    fresh = one_step(twin, lr=0.0)
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            optimizer.state[ours]["momentum_buffer"],
            fresh.state[theirs]["momentum_buffer"],
            rtol=1e-9,
            atol=1e-12,
        )


def test_views_write_through() -> None:
    weights = [torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last), torch.randn(2, 4 * 6)]
    views = paper_views(weights)
    assert [tuple(v.shape) for v in views] == [(3, 3, 3, 4), (4, 6, 2)]
    for view in views:
        view.zero_()
    assert not any(W.any() for W in weights)


def test_refuses_what_is_not_a_chain() -> None:
    weights = [torch.ones(2, 3), torch.ones(4, 2)]
    with pytest.raises(ValueError, match="paper_views"):
        balance_chain_(weights)
    with pytest.raises(ValueError, match="variant"):
        balance_chain_([torch.ones(2, 3), torch.ones(3, 2)], variant="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one \\(or None\\) per layer"):
        balance_chain_([torch.ones(2, 3), torch.ones(3, 2)], [None])
    with pytest.raises(ValueError, match=r"equinorm\.balance_"):
        balance_layers_([nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3)])
    with pytest.raises(ValueError, match=r"equinorm\.balance_"):
        paper_views([torch.ones(3, 2), torch.ones(2, 4)])
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Adam"):
        balance_layers_([net], torch.optim.Adam(net.parameters()))
