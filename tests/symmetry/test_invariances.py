"""What norms absorb: counted by hand, the function kept with ε and statistics moved along, and where it must not be."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equinorm
from support.nets import Net, assert_function_kept, outputs, randomize_constants, relative_error, x2

Case = tuple[Callable[[], nn.Module], Tensor, int]


class RMSNorm(nn.Module):
    """As language models write it out, with the gain as it is or stored minus one."""

    def __init__(self, n: int, eps: float = 1e-2, stored_minus_one: bool = False) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(n)), eps
        self.stored_minus_one = stored_minus_one

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return y * (1.0 + self.weight) if self.stored_minus_one else self.weight * y


class Deviation(nn.Module):
    """(x - mean) / (deviation + ε)."""

    def __init__(self, eps: float = 0.1) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    """A stream with a norm before each branch, as in a language model; the last norm is read by the head."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        self.up = nn.ModuleList(nn.Linear(5, 4) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4, 5) for _ in range(2))
        self.norms = nn.ModuleList(norm(5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(torch.tanh(up(norm(x))))
        return self.head(self.norms[2](x))


def line(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(6, 2))


def image(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.Conv2d(6, 2, 1))


class Words(nn.Module):
    """A norm that reads an embedding, with nothing between: rows of a table are multiplied by what they are made of."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 5), RMSNorm(5), nn.Linear(5, 7, bias=False)
        self.branch = nn.Linear(5, 5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x[:, 0].abs().long() % 7)
        return self.head(self.norm(y + self.branch(self.norm(y))))


X, IMAGES = x2(6, 3), x2(4, 3, 5, 5)
# Gains carry one scale for each channel in any case; the stream's one comes on top.
CASES: dict[str, Case] = {
    "layer_norm": (lambda: line(nn.LayerNorm(6, eps=0.1)), X, 6 + 1),
    "layer_norm_without_gain": (lambda: line(nn.LayerNorm(6, eps=0.1, elementwise_affine=False)), X, 1),
    "rms_norm": (lambda: line(nn.RMSNorm(6, eps=0.1)), X, 6 + 1),
    "rms_norm_with_the_dtypes_epsilon": (lambda: line(nn.RMSNorm(6)), X, 6 + 1),
    "group_norm": (lambda: image(nn.GroupNorm(3, 6, eps=0.1)), IMAGES, 6 + 1),
    "instance_norm": (lambda: image(nn.InstanceNorm2d(6, eps=0.1, affine=True)), IMAGES, 6 + 1),
    "batch_norm": (lambda: image(nn.BatchNorm2d(6, eps=0.1)), IMAGES, 6 + 1),
    "batch_norm_of_vectors": (lambda: line(nn.BatchNorm1d(6, eps=0.1)), X, 6 + 1),
    "batch_norm_without_statistics": (
        lambda: image(nn.BatchNorm2d(6, eps=0.1, track_running_stats=False)),
        IMAGES,
        6 + 1,
    ),
    "written_out": (lambda: line(RMSNorm(6)), X, 6 + 1),
    "written_out_with_a_deviation": (lambda: line(Deviation()), X, 1),
    "gain_stored_minus_one": (lambda: line(RMSNorm(6, stored_minus_one=True)), X, 6 + 1),
    # one scale for the whole stream; behind each norm five
    "residual_stream": (lambda: Block(RMSNorm), X, 1 + 3 * 5),
    "residual_stream_of_torch": (lambda: Block(lambda n: nn.LayerNorm(n, eps=0.1)), X, 1 + 3 * 5),
    "residual_stream_stored_minus_one": (lambda: Block(lambda n: RMSNorm(n, stored_minus_one=True)), X, 1 + 3 * 5),
    # the stream's; tied to it, behind the norm one that does the opposite
    "embedding": (lambda: Words(tied=False), X, 1 + 5),
    "tied_embedding": (lambda: Words(tied=True), X, 1),
    "no_epsilon": (lambda: line(nn.LayerNorm(6, eps=0.0)), X, 6 + 1),
}


def made(build: Callable[[], nn.Module], training: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        randomize_constants(model)
    return model.double().train(training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_norms_absorb(name: str, training: bool) -> None:
    build, x, expected = CASES[name]
    model, x = made(build, training), x.double()
    before = equinorm.trace(model, x).num_scales
    sym = equinorm.trace(model, x, invariances=True)
    assert sym.num_scales == expected, sym.explain()
    assert int(sym.absorbed.sum()) >= (sym.num_scales > before and name != "no_epsilon")
    assert not sym.verification.frozen
    for seed in range(2):
        assert_function_kept(model, x, sym, seed)


@pytest.mark.parametrize("x", [IMAGES, X])
def test_batch_norm_in_evaluation_has_a_scale_for_each_channel(x: Tensor) -> None:
    model = made(lambda: image(nn.BatchNorm2d(6)) if x.ndim == 4 else line(nn.BatchNorm1d(6)), training=False)
    sym = equinorm.trace(model, x.double(), invariances="inference")
    assert sym.num_scales == 6 + 6
    assert {carried.attribute for carried in sym.carried} == {"running_mean", "running_var"}
    assert_function_kept(model, x.double(), sym)


def test_a_variance_that_would_be_negative_is_refused_and_nothing_is_changed() -> None:
    model = made(lambda: image(nn.BatchNorm2d(6)), training=False)
    model[1].running_var[2] = 0.0
    sym = equinorm.trace(model, IMAGES.double(), invariances="inference")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OverflowError, match=r"1\.running_var would be negative"):
        sym.rescale_(torch.full((12,), -1.0))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_statistics_that_go_along_serve_evaluation_too() -> None:
    model = made(lambda: image(nn.BatchNorm2d(6)), training=True)
    x = IMAGES.double()
    evaluated = outputs(copy.deepcopy(model).eval(), x)
    sym = equinorm.trace(model, x, invariances=True)
    sym.rescale_(torch.randn(sym.num_scales, generator=torch.Generator().manual_seed(0)))
    assert relative_error(outputs(model.eval(), x)[0], evaluated[0]) < 1e-12


def test_a_norm_called_on_two_streams_merges_them() -> None:
    def build(norms: int) -> nn.Module:
        return Net(
            lambda m, x: m.head(m.norms[0](m.a(x)) + m.norms[-1](m.b(x))),
            a=nn.Linear(3, 6),
            b=nn.Linear(3, 6),
            head=nn.Linear(6, 2),
            norms=nn.ModuleList(RMSNorm(6) for _ in range(norms)),
        )

    for norms, expected in ((1, 6 + 1), (2, 6 + 2)):
        model = made(lambda norms=norms: build(norms), training=False)
        sym = equinorm.trace(model, X.double(), invariances=True)
        assert sym.num_scales == expected
        assert_function_kept(model, X.double(), sym)


def test_epsilon_that_is_used_otherwise_too_stays() -> None:
    class Twice(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp_min(self.variance_epsilon)

    class OfBoth(RMSNorm):
        """s² for the variance and s for the deviation."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x / (x.std(-1, keepdim=True) + self.variance_epsilon)

    for kind in (Twice, OfBoth):
        model = made(lambda kind=kind: line(kind(6)), training=False)
        sym = equinorm.trace(model, X.double(), invariances=True)
        assert not bool(sym.absorbed.any())
        assert_function_kept(model, X.double(), sym)


def test_epsilon_that_is_not_on_the_module_stays() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (6,), eps=1e-3)

    class OtherName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = 1e-3

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (6,), eps=self.small)

    for norm in (Fixed(), OtherName()):
        model = line(norm).double()
        assert equinorm.trace(model, X.double(), invariances=True).num_scales == 0


def test_a_number_that_only_looks_like_epsilon_is_found_out() -> None:
    class Misleading(nn.Module):
        """Adds a constant of the value of ε, which it does not read."""

        def __init__(self) -> None:
            super().__init__()
            self.eps = 0.25

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.25)

    model = line(Misleading()).double()
    sym = equinorm.trace(model, X.double(), invariances=True)
    assert sym.num_scales == 0
    assert sym.verification.frozen


def test_a_gain_with_and_without_one_stays() -> None:
    class Both(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return torch.cat([y * (1 + self.weight), y * self.weight], -1)

    class Doubled(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return y * (1 + 2 * self.weight)

    for norm, width in ((Both(6), 12), (Doubled(6), 6)):
        model = nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(width, 2)).double()
        sym = equinorm.trace(model, X.double(), invariances=True)
        assert sym.num_scales == 1  # the stream's, not the gain's
        assert_function_kept(model, X.double(), sym)


def test_rescaling_is_all_or_nothing() -> None:
    model = made(lambda: Block(RMSNorm), training=False)
    sym = equinorm.trace(model, X.double(), invariances=True)
    state, numbers = copy.deepcopy(model.state_dict()), [norm.variance_epsilon for norm in model.norms]
    with pytest.raises(OverflowError, match=r"norms\.0\.variance_epsilon would go from 0\.01 to"):
        sym.rescale_(60.0 * sym.absorbed)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert [norm.variance_epsilon for norm in model.norms] == numbers
    sym.rescale_(torch.where(sym.absorbed, 2.0, 1.0).log())
    moved = [norm.variance_epsilon / number for norm, number in zip(model.norms, numbers, strict=True)]
    assert any(abs(ratio - 1) > 0.5 for ratio in moved)


def test_least_norm_holds_what_norms_absorb() -> None:
    model = made(lambda: Block(RMSNorm), training=False)
    plain, x = copy.deepcopy(model), X.double()
    report = equinorm.balance_(model, symmetry=equinorm.trace(model, x, invariances=True))
    equinorm.balance_(plain, x)
    assert [norm.variance_epsilon for norm in model.norms] == [0.01] * 3
    assert report.converged
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_bad_choices() -> None:
    with pytest.raises(ValueError, match="invariances must be True, False or 'inference', got 'all'"):
        equinorm.trace(line(nn.LayerNorm(6)), X, invariances="all")
    with pytest.raises(ValueError, match="takes BatchNorm for absent"):
        equinorm.trace(line(nn.BatchNorm1d(6)), X, invariances=True, batchnorm="ignore")


def test_binding_to_a_copy_moves_the_copy() -> None:
    model = made(lambda: line(RMSNorm(6)), training=False)
    twin, x = copy.deepcopy(model), X.double()
    sym = equinorm.trace(model, x, invariances=True).bind(twin)
    assert_function_kept(twin, x, sym)
    assert twin[1].variance_epsilon != 0.01
    assert model[1].variance_epsilon == 0.01


def test_the_explanation_says_what_follows() -> None:
    model = made(lambda: line(RMSNorm(6)), training=False)
    assert "what norms absorb: 1 " in equinorm.trace(model, X.double(), invariances=True).explain().summary


def test_holding_a_parameter_holds_the_epsilon_that_follows_it() -> None:
    model = made(lambda: Block(RMSNorm), training=False)
    sym = equinorm.trace(model, X.double(), invariances=True)
    held = sym.holding(["embed.weight"])
    assert held.num_scales == sym.num_scales - 1
    assert held.carried == []
    assert_function_kept(model, X.double(), held)
    free = sym.holding(["norms.0.weight"])
    assert len(free.carried) == 3
    assert_function_kept(model, X.double(), free)
