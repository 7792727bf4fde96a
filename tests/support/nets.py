"""Small networks, one per structure the tracer has to find, with their free scales counted by hand.

A builder returns ``(model, example_inputs, expected)``. ``expected`` is the exact number of free scales, or
``AtLeast(n)`` where the design leaves open how much of the symmetry is found. Models are made with `Net`, a
module from a function, so that what is tested stands in one line. Structures that must *not* be taken for
free are in `barriers`.

In the derivations, "stem" is the first layer, whose outputs are free unless something freezes them, and
"head" the last one, whose outputs are the model's and therefore frozen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

TOLERANCE = 1e-12


@dataclass(frozen=True)
class AtLeast:
    """A lower bound on the number of free scales."""

    number: int


Example = tuple[nn.Module, Any, "int | AtLeast"]
FREE: dict[str, Callable[[], Example]] = {}
# Those whose graph is another one while training (dropout, batch statistics).
MODES_DIFFER: set[str] = set()


class Net(nn.Module):
    """A module from a function of itself and its inputs; tensors among the parts become buffers."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def seeded(build: Callable[[], Example]) -> Callable[[], Example]:
    def run() -> Example:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, example, expected = build()
            randomize_constants(model)
        return model, example, expected

    run.__doc__, run.__name__ = build.__doc__, build.__name__
    return run


def free(build: Callable[[], Example]) -> Callable[[], Example]:
    FREE[build.__name__] = seeded(build)
    return build


def modes_differ(build: Callable[[], Example]) -> Callable[[], Example]:
    MODES_DIFFER.add(build.__name__)
    return build


@torch.no_grad()
def randomize_constants(model: nn.Module) -> None:
    """Replace parameters and buffers that are constant (gains of 1, offsets of 0, running statistics).

    A zero bias or a gain of 1e-6 would hide a wrong scale from a comparison of outputs.
    """
    for param in model.parameters():
        if param.is_floating_point() and param.numel() and bool((param == param.flatten()[0]).all()):
            param.copy_(1 + 0.3 * torch.randn_like(param))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_var is not None:
            assert module.running_mean is not None
            module.running_mean.copy_(0.3 * torch.randn_like(module.running_mean))
            module.running_var.copy_(0.5 + torch.rand_like(module.running_var))


def to_double(example: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, example)


def call(model: nn.Module, example: Any) -> Any:
    """The model on inputs as `equinorm.trace` takes them: a tensor, a tuple of args, a dict of kwargs."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def outputs(model: nn.Module, example: Any, seed: int = 0, copies: bool = True) -> list[Tensor]:
    """All output tensors; from copies, since a forward pass may write to buffers or to its inputs."""
    if copies:
        model, example = copy.deepcopy((model, example))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        out = call(model, example)
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def double_and_trace(model: nn.Module, example: Any, training: bool = False) -> tuple[nn.Module, Any, Any]:
    """A float64 copy of the model in the asked mode, its example inputs, and the symmetry traced from it."""
    import equinorm

    twin = copy.deepcopy(model).double().train(training)
    example = to_double(example)
    return twin, example, equinorm.trace(twin, example)


def relative_error(after: Tensor, before: Tensor) -> float:
    if not (after.is_floating_point() or after.is_complex()):
        return 0.0 if torch.equal(after, before) else math.inf
    scale = float(torch.linalg.vector_norm(before.detach()))
    difference = float(torch.linalg.vector_norm((after - before).detach()))
    return difference / scale if scale else difference


def assert_function_kept(
    model: nn.Module,
    example: Any,
    sym: Any,
    seed: int = 0,
    *,
    tolerance: float = TOLERANCE,
    copies: bool = True,
) -> None:
    """Move every free scale at random; every output tensor stays. `sym` was traced from this very model."""
    before = outputs(model, example, copies=copies)
    gen = torch.Generator().manual_seed(seed)
    sym.rescale_(0.5 * torch.randn(sym.num_scales, generator=gen, dtype=torch.float64))
    after = outputs(model, example, copies=copies)
    assert len(after) == len(before)
    for k, (a, b) in enumerate(zip(after, before, strict=True)):
        assert b.isfinite().all(), f"output {k} of the network itself is not finite: the test is not a test"
        error = relative_error(a, b)
        assert error < tolerance, f"output {k} changed by {error:.2e} with {sym.num_scales} scales moved"


def x2(*shape: int) -> Tensor:
    """An input with its own seed, so that it does not depend on what was drawn before."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def w(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


# --- linear layers however spelled: a hidden layer of 5 units, so 5 ---
#


@free
def linear_chain() -> Example:
    return (
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)),
        x2(6, 3),
        5 + 4,
    )


@free
def linear_without_activation() -> Example:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)), x2(6, 3), 5


@free
def capped_per_channel() -> Example:
    """min(relu(x), c) with a cap for each unit, which scales with it."""
    net = Net(
        lambda m, x: m.head(torch.minimum(F.relu(m.stem(x)), m.cap)),
        stem=nn.Linear(3, 5),
        cap=nn.Parameter(torch.rand(5) + 0.1),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def clamped_between_parameters() -> Example:
    """A lower and an upper bound for each unit."""
    net = Net(
        lambda m, x: m.head(torch.clamp(m.stem(x), m.low, m.high)),
        stem=nn.Linear(3, 5),
        low=nn.Parameter(-torch.rand(5)),
        high=nn.Parameter(torch.rand(5)),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def functional_linear() -> Example:
    net = Net(lambda m, x: F.linear(F.linear(x, m.a, m.b).relu(), m.c), a=w(5, 3), b=w(5), c=w(2, 5))
    return net, x2(6, 3), 5


@free
def addmm() -> Example:
    net = Net(
        lambda m, x: torch.addmm(m.d, torch.addmm(m.b, x, m.a).relu(), m.c),
        a=w(3, 5),
        b=w(5),
        c=w(5, 2),
        d=w(2),
    )
    return net, x2(6, 3), 5


@free
def addmm_with_factors() -> Example:
    net = Net(lambda m, x: torch.addmm(m.b, x, m.a, beta=0.5, alpha=-2).relu() @ m.c, a=w(3, 5), b=w(5), c=w(5, 2))
    return net, x2(6, 3), 5


@free
def mm() -> Example:
    return Net(lambda m, x: torch.mm(torch.mm(x, m.a).relu(), m.c), a=w(3, 5), c=w(5, 2)), x2(6, 3), 5


@free
def matmul_of_sequences() -> Example:
    return Net(lambda m, x: (x @ m.a + m.b).relu() @ m.c, a=w(3, 5), b=w(5), c=w(5, 2)), x2(2, 6, 3), 5


@free
def matmul_with_vectors() -> Example:
    """A vector in, a dot product at the end."""
    return Net(lambda m, x: torch.dot((m.a @ x).relu(), m.c), a=w(5, 3), c=w(5)), x2(3), 5


@free
def bmm_with_expanded_weight() -> Example:
    net = Net(lambda m, x: torch.bmm(x, m.a.expand(2, -1, -1)).relu() @ m.c, a=w(3, 5), c=w(5, 2))
    return net, x2(2, 6, 3), 5


@free
def bmm_one_weight_per_group() -> Example:
    """Four groups with a matrix each: 4 * 5 hidden units."""
    net = Net(lambda m, x: torch.bmm(torch.bmm(x, m.a).relu(), m.c), a=w(4, 3, 5), c=w(4, 5, 2))
    return net, x2(4, 6, 3), 20


@free
def baddbmm() -> Example:
    net = Net(lambda m, x: torch.baddbmm(m.b, x, m.a).relu().bmm(m.c), a=w(4, 3, 5), b=w(4, 1, 5), c=w(4, 5, 2))
    return net, x2(4, 6, 3), 20


@free
def einsum() -> Example:
    net = Net(
        lambda m, x: torch.einsum("bth,ho->bto", torch.einsum("bti,ih->bth", x, m.a).relu(), m.c),
        a=w(3, 5),
        c=w(5, 2),
    )
    return net, x2(2, 6, 3), 5


@free
def einsum_parameter_first() -> Example:
    net = Net(
        lambda m, x: torch.einsum("oh,bh->bo", m.c, torch.einsum("hi,bi->bh", m.a, x).relu()),
        a=w(5, 3),
        c=w(2, 5),
    )
    return net, x2(6, 3), 5


@free
def einsum_with_heads() -> Example:
    """One weight of shape (heads, in, features), as in some attention layers: 2 * 4 hidden units."""
    net = Net(
        lambda m, x: torch.einsum("bnhd,hdo->bno", torch.einsum("bni,hid->bnhd", x, m.a).relu(), m.c),
        a=w(2, 3, 4),
        c=w(2, 4, 5),
    )
    return net, x2(2, 6, 3), 8


@free
def transposed_weight() -> Example:
    return Net(lambda m, x: (x @ m.a.t()).relu() @ m.c.mT, a=w(5, 3), c=w(2, 5)), x2(6, 3), 5


@free
def parameter_on_the_left() -> Example:
    return Net(lambda m, x: m.c @ (m.a @ x + m.b).relu(), a=w(5, 3), b=w(5, 1), c=w(2, 5)), x2(3, 6), 5


@free
def parameter_on_the_left_of_a_batch() -> Example:
    return Net(lambda m, x: m.c @ (m.a @ x).relu(), a=w(5, 3), c=w(2, 5)), x2(4, 3, 6), 5


@free
def token_mixing() -> Example:
    """A linear layer over the tokens, by transposing around it.

    Its weight and bias are shared by the channels, so a hidden token has one label whatever the channel: 7.
    That ties the stem's 4 channels to each other, 1, and those behind the mixing as well, 1.
    """
    net = Net(
        lambda m, x: m.head(m.back(F.relu(m.mix(m.stem(x).transpose(1, 2)))).transpose(1, 2)),
        stem=nn.Linear(3, 4),
        mix=nn.Linear(6, 7),
        back=nn.Linear(7, 6),
        head=nn.Linear(4, 2),
    )
    return net, x2(2, 6, 3), 1 + 7 + 1


@free
def conv1d_of_transformers() -> Example:
    """The layer GPT-2 calls Conv1D: addmm on a flattened sequence, weight stored as (in, out)."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])

    net = Net(lambda m, x: layer(layer(x, m.a, m.b).relu(), m.c, m.d), a=w(3, 5), b=w(5), c=w(5, 2), d=w(2))
    return net, x2(2, 6, 3), 5


@free
def bilinear_module() -> Example:
    """nn.Bilinear has no rule of its own in the design: the layers around it may be all there is."""
    net = Net(
        lambda m, x: m.head(F.relu(m.hidden(m.mix(x, x)))),
        mix=nn.Bilinear(3, 3, 4),
        hidden=nn.Linear(4, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), AtLeast(5)


@free
def additive_and_subtracted_biases() -> Example:
    net = Net(
        lambda m, x: F.relu(F.relu(x @ m.a - m.b) @ m.c + m.d) @ m.e,
        a=w(3, 5),
        b=w(5),
        c=w(5, 4),
        d=w(1, 4),
        e=w(4, 2),
    )
    return net, x2(6, 3), 5 + 4


@free
def fused_weight_by_cat() -> Example:
    """Two parameters concatenated into one weight: 2 + 3 hidden units."""
    net = Net(lambda m, x: F.relu(F.linear(x, torch.cat([m.a, m.b]))) @ m.c, a=w(2, 3), b=w(3, 3), c=w(5, 2))
    return net, x2(6, 3), 5


@free
def stacked_weights() -> Example:
    """The slices of one parameter are the weights of two layers: stem 5, and 5 behind each slice."""
    net = Net(
        lambda m, x: m.head(F.relu(F.linear(F.relu(F.linear(m.stem(x), m.a[0])), m.a[1]))),
        stem=nn.Linear(3, 5),
        a=w(2, 5, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 15


@free
def masked_weight() -> Example:
    """A pruning mask is a buffer: the weight's entries keep their roles."""
    net = Net(
        lambda m, x: F.linear(F.relu(F.linear(x, m.a * m.mask)), m.c),
        a=w(5, 3),
        c=w(2, 5),
        mask=(x2(5, 3) > -0.5).float(),
    )
    return net, x2(6, 3), 5


@free
def weight_times_a_number() -> Example:
    """Equalised learning rate: the weight is stored divided by a constant."""
    return (
        Net(lambda m, x: F.linear(F.relu(F.linear(x, m.a * 0.3, m.b / 2)), -m.c), a=w(5, 3), b=w(5), c=w(2, 5)),
        x2(6, 3),
        5,
    )


# --- convolutions ---
#


@free
def conv2d() -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, dilation=2, padding="same", bias=False),
        nn.ReLU(),
        nn.Conv2d(5, 2, (1, 3)),
    )
    return net, x2(2, 3, 9, 9), 4 + 5


@free
def conv1d() -> Example:
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3, stride=2)), x2(2, 3, 11), 4


@free
def conv3d() -> Example:
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 2)), x2(1, 2, 4, 4, 4), 4


@free
def conv_without_a_batch() -> Example:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)), x2(3, 7, 7), 4


@free
def grouped_conv() -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 1),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1, groups=4),
        nn.Conv2d(4, 2, 1),
    )
    return net, x2(2, 3, 5, 5), 6 + 8 + 4


@free
def depthwise_conv_with_multiplier() -> Example:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1))
    return net, x2(2, 3, 5, 5), 4 + 8


@free
def grouped_conv1d_and_3d() -> Example:
    net = Net(
        lambda m, x: m.d(F.relu(m.c(F.relu(m.b(m.a(x))).unflatten(2, (2, 2, 2))))),
        a=nn.Conv1d(2, 4, 1),
        b=nn.Conv1d(4, 6, 3, groups=2, padding=1),
        c=nn.Conv3d(6, 3, 2, groups=3),
        d=nn.Conv3d(3, 2, 1),
    )
    return net, x2(2, 2, 8), 4 + 6 + 3


@free
def transposed_conv() -> Example:
    net = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 2, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 6, 3, groups=2, padding=1, output_padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
    )
    return net, x2(2, 3, 3, 3), 4 + 6


@free
def transposed_conv1d_and_3d() -> Example:
    net = Net(
        lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x)).unflatten(2, (2, 2, 2))))),
        a=nn.ConvTranspose1d(2, 4, 2, stride=2),
        b=nn.ConvTranspose3d(4, 6, 2, groups=2),
        c=nn.Conv3d(6, 2, 1),
    )
    return net, x2(2, 2, 4), 4 + 6


@free
def functional_conv_from_matrix() -> Example:
    """A convolution whose weight is stored as a matrix and viewed."""
    net = Net(
        lambda m, x: F.conv2d(F.relu(F.conv2d(x, m.a.view(4, 3, 3, 3))), m.c[:, :, None, None]),
        a=w(4, 27),
        c=w(2, 4),
    )
    return net, x2(2, 3, 5, 5), 4


@free
def unfold_and_matmul() -> Example:
    """im2col by hand copies the stem's channels over the window: 3 + 4."""
    net = Net(
        lambda m, x: m.c @ F.relu(m.b @ F.unfold(F.relu(m.a(x)), 3)),
        a=nn.Conv2d(2, 3, 1),
        b=w(4, 27),
        c=w(2, 4),
    )
    return net, x2(2, 2, 5, 5), 3 + 4


# --- positively homogeneous functions: the hidden layer of 5 stays free ---
#


def between(
    function: Callable[[Tensor], Tensor], units: int = 5, expected: int | AtLeast = 5, out: int | None = None
) -> Example:
    net = Net(lambda m, x: m.head(function(m.stem(x))), stem=nn.Linear(3, units), head=nn.Linear(out or units, 2))
    return net, x2(6, 3), expected


def between_convs(function: Callable[[Tensor], Tensor], expected: int | AtLeast = 4) -> Example:
    net = Net(lambda m, x: m.head(function(m.stem(x))), stem=nn.Conv2d(3, 4, 3, padding=1), head=nn.Conv2d(4, 2, 1))
    return net, x2(2, 3, 6, 6), expected


@free
def leaky_relu() -> Example:
    return between(lambda y: F.leaky_relu(y, 0.2))


@free
def prelu_per_channel() -> Example:
    """The slope is a ratio of two outputs of one unit, so it does not scale: 5, not 10."""
    return nn.Sequential(nn.Linear(3, 5), nn.PReLU(5), nn.Linear(5, 2)), x2(6, 3), 5


@free
def prelu_shared() -> Example:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(), nn.Conv2d(4, 2, 1)), x2(2, 3, 5, 5), 4


@free
def absolute_value() -> Example:
    return between(lambda y: y.abs())


@free
def negation() -> Example:
    return between(lambda y: -y.relu())


@free
def relu_squared_by_power() -> Example:
    """The label's exponent doubles; the head's weight follows with -2."""
    return between(lambda y: y.relu() ** 2)


@free
def relu_squared_by_square() -> Example:
    return between(lambda y: y.relu().square())


@free
def relu_squared_by_product() -> Example:
    def function(y: Tensor) -> Tensor:
        r = y.relu()
        return r * r

    return between(function)


@free
def relu_squared_by_two_relus() -> Example:
    return between(lambda y: y.relu() * y.relu())


@free
def cube() -> Example:
    return between(lambda y: y.pow(3))


@free
def square_root() -> Example:
    return between(lambda y: y.relu().sqrt())


@free
def relu_squared_twice() -> Example:
    """Exponents 1 and 2 in a row, 5 + 4 units."""
    net = Net(
        lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x)) ** 2)) ** 2),
        a=nn.Linear(3, 5),
        b=nn.Linear(5, 4),
        c=nn.Linear(4, 2),
    )
    return net, x2(6, 3), 5 + 4


@free
def maximum_of_two_layers() -> Example:
    net = Net(
        lambda m, x: m.head(torch.maximum(m.a(x), m.b(x))),
        a=nn.Linear(3, 5),
        b=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def minimum_of_two_layers() -> Example:
    net = Net(
        lambda m, x: m.head(torch.min(m.a(x), m.b(x))),
        a=nn.Linear(3, 5),
        b=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def maxout() -> Example:
    """Ten units in pairs: 5."""
    return between(lambda y: y.unflatten(-1, (5, 2)).amax(-1), units=10, out=5)


@free
def maxout_with_indices() -> Example:
    return between(lambda y: y.unflatten(-1, (5, 2)).max(-1).values, units=10, out=5)


@free
def maximum_with_zero() -> Example:
    return between(lambda y: torch.maximum(y, torch.zeros_like(y)))


@free
def clamp_at_zero() -> Example:
    return between(lambda y: y.clamp(min=0))


@free
def clamp_min_at_zero() -> Example:
    return between(lambda y: y.clamp_min(0.0))


@free
def clamp_from_above_at_zero() -> Example:
    return between(lambda y: y.clip(max=0))


@free
def threshold_at_zero() -> Example:
    return between(lambda y: F.threshold(y, 0.0, 0.0))


@free
def where_with_zero() -> Example:
    return between(lambda y: torch.where(y > 0, y, 0.0))


@free
def where_with_two_slopes() -> Example:
    return between(lambda y: torch.where(y >= 0, y, 0.1 * y))


@free
def masked_fill_with_zero() -> Example:
    return between(lambda y: y.masked_fill(y < 0, 0.0))


@free
def product_with_comparison() -> Example:
    return between(lambda y: y * (y > 0))


@free
def product_with_sign() -> Example:
    """y * sign(y): the sign does not depend on the scale."""
    return between(lambda y: y * y.sign())


@free
def sign_as_activation() -> Example:
    """The stem's scale has no effect at all behind a sign: free, with nothing that compensates. 5 + 4."""
    net = Net(lambda m, x: m.c(F.relu(m.b(m.a(x).sign()))), a=nn.Linear(3, 5), b=nn.Linear(5, 4), c=nn.Linear(4, 2))
    return net, x2(6, 3), 5 + 4


@free
def comparison_as_activation() -> Example:
    net = Net(
        lambda m, x: m.c(F.relu(m.b((m.a(x) > 0).to(x.dtype)))),
        a=nn.Linear(3, 5),
        b=nn.Linear(5, 4),
        c=nn.Linear(4, 2),
    )
    return net, x2(6, 3), 5 + 4


@free
def argmax_within_a_channel() -> Example:
    """Where a channel is largest does not depend on the channel's scale: the stem's 4 stay free."""
    net = Net(
        lambda m, x: m.head(m.stem(x).flatten(2).argmax(-1).to(x.dtype)),
        stem=nn.Conv2d(3, 4, 3),
        head=nn.Linear(4, 2),
    )
    return net, x2(2, 3, 6, 6), 4


@free
def trained_batch_mask() -> Example:
    """A boolean input mask zeroes whole rows."""
    net = Net(
        lambda m, x, keep: m.head(F.relu(m.stem(x)).masked_fill(~keep[:, None], 0)),
        stem=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, (x2(6, 3), torch.tensor([True, False, True, True, False, True])), 5


@free
def scaling_by_numbers() -> Example:
    return between(lambda y: (2.5 * y.relu() / math.sqrt(3)) * torch.tensor(0.7))


@free
def scaling_by_buffer() -> Example:
    net = Net(
        lambda m, x: m.head(m.stem(x).relu() * m.scale),
        stem=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
        scale=x2(5).abs(),
    )
    return net, x2(6, 3), 5


@free
def cast_between_floats() -> Example:
    return between(lambda y: y.to(torch.float64).relu().to(y.dtype))


@free
@modes_differ
def dropout() -> Example:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5, 2))
    return net, x2(6, 3), 5


@free
@modes_differ
def dropout_of_channels() -> Example:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout2d(0.4), nn.Conv2d(4, 2, 1))
    return net, x2(4, 3, 6, 6), 4


@free
@modes_differ
def stochastic_depth() -> Example:
    """A branch kept or dropped per sample by a random mask: stem 4 (the stream), branch 6."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x)
        z = m.b(F.relu(m.a(y)))
        if m.training:
            z = z * torch.empty(z.shape[0], 1).bernoulli_(0.5).to(z.dtype) / 0.5
        return m.head(F.relu(y + z))

    net = Net(forward, stem=nn.Linear(3, 4), a=nn.Linear(4, 6), b=nn.Linear(6, 4), head=nn.Linear(4, 2))
    return net, x2(6, 3), 4 + 6


# --- pooling, resampling, padding ---
#


@free
def max_pool2d() -> Example:
    return between_convs(lambda y: F.max_pool2d(y, 3, 2, padding=1))


@free
def max_pool1d_and_3d() -> Example:
    net = Net(
        lambda m, x: m.c(F.max_pool3d(F.relu(m.b(F.max_pool1d(F.relu(m.a(x)), 2).unflatten(2, (2, 2, 2)))), 2)),
        a=nn.Conv1d(2, 4, 1),
        b=nn.Conv3d(4, 5, 1),
        c=nn.Conv3d(5, 2, 1),
    )
    return net, x2(2, 2, 16), 4 + 5


@free
def average_pools() -> Example:
    return between_convs(lambda y: F.adaptive_avg_pool2d(F.avg_pool2d(y.relu(), 2, ceil_mode=True), 2))


@free
def average_pools_1d_and_3d() -> Example:
    net = Net(
        lambda m, x: m.c(
            F.adaptive_avg_pool3d(F.relu(m.b(F.avg_pool1d(F.relu(m.a(x)), 2).unflatten(2, (2, 2, 2)))), 1)
        ),
        a=nn.Conv1d(2, 4, 1),
        b=nn.Conv3d(4, 5, 1),
        c=nn.Conv3d(5, 2, 1),
    )
    return net, x2(2, 2, 16), 4 + 5


@free
def adaptive_max_pool() -> Example:
    return between_convs(lambda y: F.adaptive_max_pool2d(y, 2))


@free
def upsample_nearest() -> Example:
    return between_convs(lambda y: F.interpolate(y.relu(), scale_factor=2, mode="nearest"))


@free
def upsample_bilinear() -> Example:
    return between_convs(lambda y: F.interpolate(y.relu(), size=(9, 7), mode="bilinear", align_corners=False))


@free
def upsample_bicubic() -> Example:
    return between_convs(lambda y: F.interpolate(y.relu(), size=(9, 7), mode="bicubic", align_corners=True))


@free
def upsample_linear_and_trilinear() -> Example:
    net = Net(
        lambda m, x: m.b(
            F.interpolate(
                F.interpolate(F.relu(m.a(x)), size=8, mode="linear").unflatten(2, (2, 2, 2)),
                size=(3, 3, 3),
                mode="trilinear",
            )
        ),
        a=nn.Conv1d(2, 4, 1),
        b=nn.Conv3d(4, 2, 1),
    )
    return net, x2(2, 2, 5), 4


@free
def pixel_shuffle() -> Example:
    """Eight channels become two with four labels each; the next layer's sum ties them: 2, and 4."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return net, x2(2, 3, 4, 4), 2 + 4


@free
def pixel_unshuffle() -> Example:
    """Two channels become eight inputs of two labels: 2, and 4 behind them."""
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.PixelUnshuffle(2), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return net, x2(2, 3, 4, 4), 2 + 4


@free
def zero_padding() -> Example:
    return between_convs(lambda y: F.pad(y.relu(), (1, 2, 0, 1)))


@free
def circular_padding() -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
    )
    return net, x2(2, 3, 6, 6), 4


@free
def reflect_padding() -> Example:
    return between_convs(lambda y: F.pad(y.relu(), (1, 1, 1, 1), mode="reflect"))


@free
def replicate_padding() -> Example:
    return between_convs(lambda y: F.pad(y.relu(), (1, 1, 1, 1), mode="replicate"))


@free
def circular_padding_of_features() -> Example:
    return between_convs(lambda y: F.pad(y.relu(), (1, 1, 1, 1), mode="circular"))


@free
def flatten_with_spatial_extent() -> Example:
    """A channel is spread over 9 inputs of the linear layer: 4 + 5."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
        nn.ReLU(),
        nn.Linear(5, 2),
    )
    return net, x2(2, 3, 8, 8), 4 + 5


@free
def spatial_mean() -> Example:
    return between_convs(lambda y: y.relu().mean((2, 3), keepdim=True))


@free
def spatial_sum_and_amax() -> Example:
    return between_convs(lambda y: y.relu().sum((2, 3), keepdim=True) + y.amax((2, 3), keepdim=True))


@free
def mean_over_channels_merges_them() -> Example:
    """Centring over the features ties all five: 1."""
    return between(lambda y: (y - y.mean(-1, keepdim=True)).relu(), expected=1)


@free
def lerp() -> Example:
    net = Net(
        lambda m, x: m.head(torch.lerp(m.a(x), m.b(x), 0.3).relu()),
        a=nn.Linear(3, 5),
        b=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def cumulative_sum_over_time() -> Example:
    """Along an axis of one label a sum keeps it: 5 + 4."""
    net = Net(
        lambda m, x: m.c(F.relu(m.b(m.a(x).cumsum(1)))),
        a=nn.Linear(3, 5),
        b=nn.Linear(5, 4),
        c=nn.Linear(4, 2),
    )
    return net, x2(2, 6, 3), 5 + 4


# --- skips, concatenation, slicing, permutation ---
#


@free
def identity_skip() -> Example:
    """The stream's 4 channels are one variable each, the branch's 6 another."""
    net = Net(
        lambda m, x: m.head(F.relu((y := m.stem(x)) + m.b(F.relu(m.a(y))))),
        stem=nn.Conv2d(3, 4, 3, padding=1),
        a=nn.Conv2d(4, 6, 3, padding=1),
        b=nn.Conv2d(6, 4, 3, padding=1),
        head=nn.Conv2d(4, 2, 1),
    )
    return net, x2(2, 3, 5, 5), 4 + 6


@free
def learned_skip() -> Example:
    """stem 4; branch 6; both paths into 5."""
    net = Net(
        lambda m, x: m.head(F.relu(m.skip(y := m.stem(x)) + m.b(F.relu(m.a(y))))),
        stem=nn.Conv2d(3, 4, 3, padding=1),
        a=nn.Conv2d(4, 6, 3, padding=1, stride=2),
        b=nn.Conv2d(6, 5, 3, padding=1),
        skip=nn.Conv2d(4, 5, 1, stride=2),
        head=nn.Conv2d(5, 2, 1),
    )
    return net, x2(2, 3, 5, 5), 4 + 6 + 5


@free
def conv_on_its_own_input() -> Example:
    """x + conv(x): the variables of the stream meet in one weight: 4."""
    net = Net(
        lambda m, x: m.head(F.relu((y := m.stem(x)) + m.a(y))),
        stem=nn.Conv2d(3, 4, 1),
        a=nn.Conv2d(4, 4, 3, padding=1),
        head=nn.Conv2d(4, 2, 1),
    )
    return net, x2(2, 3, 5, 5), 4


@free
def skip_from_the_input_freezes() -> Example:
    """The input cannot be rescaled, so nor can the stream: only the branch's 6."""
    net = Net(lambda m, x: x + m.b(F.relu(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 4))
    return net, x2(6, 4), 6


@free
def skip_with_scalar_gain() -> Example:
    """ReZero: one number for the branch. Held still it leaves the stream's 4 and the branch's 6; carrying
    a scale it ties the channels on both of its sides and leaves 1 + 6 + 1.
    """
    net = Net(
        lambda m, x: m.head(F.relu((y := m.stem(x)) + m.alpha * m.b(F.relu(m.a(y))))),
        stem=nn.Linear(3, 4),
        a=nn.Linear(4, 6),
        b=nn.Linear(6, 4),
        alpha=w(1),
        head=nn.Linear(4, 2),
    )
    return net, x2(6, 3), AtLeast(8)


@free
def skip_with_channel_gain() -> Example:
    """A gain per channel on the branch: stream 4, branch inside 6, branch end 4."""
    net = Net(
        lambda m, x: m.head(F.relu((y := m.stem(x)) + m.alpha * m.b(F.relu(m.a(y))))),
        stem=nn.Linear(3, 4),
        a=nn.Linear(4, 6),
        b=nn.Linear(6, 4),
        alpha=w(4),
        head=nn.Linear(4, 2),
    )
    return net, x2(6, 3), 4 + 6 + 4


@free
def highway() -> Example:
    """t h + (1 - t) y with a sigmoid gate t: h and y merge, the gate's layer only reads: 5."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.stem(x))
        t = torch.sigmoid(m.gate(y))
        return m.head(t * F.relu(m.h(y)) + (1 - t) * y)

    net = Net(forward, stem=nn.Linear(3, 5), gate=nn.Linear(5, 5), h=nn.Linear(5, 5), head=nn.Linear(5, 2))
    return net, x2(6, 3), 5


def option_a(shortcut: Callable[[Tensor], Tensor]) -> Example:
    """Stem 4, branch 5, stage two: four channels tied to the stem's, two with zeros on the skip."""
    net = Net(
        lambda m, x: m.head(F.relu(shortcut((y := F.relu(m.stem(x)))[:, :, ::2, ::2]) + m.b(F.relu(m.a(y))))),
        stem=nn.Conv2d(3, 4, 3, padding=1),
        a=nn.Conv2d(4, 5, 3, padding=1, stride=2),
        b=nn.Conv2d(5, 6, 3, padding=1),
        head=nn.Conv2d(6, 2, 1),
    )
    return net, x2(2, 3, 6, 6), 4 + 5 + 2


@free
def option_a_by_pad() -> Example:
    return option_a(lambda y: F.pad(y, (0, 0, 0, 0, 1, 1)))


@free
def option_a_by_cat_of_zeros() -> Example:
    return option_a(lambda y: torch.cat([y, torch.zeros(y.shape[0], 2, *y.shape[2:], dtype=y.dtype)], 1))


@free
def option_a_by_zeros_like() -> Example:
    return option_a(lambda y: torch.cat([torch.zeros_like(y[:, :1]), y, torch.zeros_like(y[:, :1])], 1))


@free
def option_a_by_new_zeros() -> Example:
    return option_a(lambda y: torch.cat([y, y.new_zeros(y.shape[0], 2, *y.shape[2:])], 1))


@free
def option_a_by_product_with_zero() -> Example:
    return option_a(lambda y: torch.cat([y, (y * 0)[:, :2]], 1))


@free
def concatenation() -> Example:
    net = Net(
        lambda m, x: m.head(torch.cat([m.a(x), F.relu(m.b(x))], -1)),
        a=nn.Linear(3, 4),
        b=nn.Linear(3, 3),
        head=nn.Linear(7, 2),
    )
    return net, x2(6, 3), 4 + 3


@free
def concatenation_with_itself() -> Example:
    """CReLU: [relu(y), relu(-y)], both of one label: 4."""
    net = Net(
        lambda m, x: m.head(torch.cat([F.relu(y := m.a(x)), F.relu(-y)], 1)),
        a=nn.Conv2d(3, 4, 1),
        head=nn.Conv2d(8, 2, 1),
    )
    return net, x2(2, 3, 4, 4), 4


@free
def concatenation_of_one_tensor_twice() -> Example:
    net = Net(lambda m, x: m.head(torch.cat([y := F.relu(m.a(x)), y], 1)), a=nn.Linear(3, 4), head=nn.Linear(8, 2))
    return net, x2(6, 3), 4


@free
def dense_block() -> Example:
    """DenseNet without norms: everything is concatenated and read again: 4 + 3 + 3."""
    net = Net(
        lambda m, x: m.head(
            torch.cat([y := F.relu(m.stem(x)), z := F.relu(m.a(y)), F.relu(m.b(torch.cat([y, z], 1)))], 1)
        ),
        stem=nn.Conv2d(3, 4, 1),
        a=nn.Conv2d(4, 3, 3, padding=1),
        b=nn.Conv2d(7, 3, 3, padding=1),
        head=nn.Conv2d(10, 2, 1),
    )
    return net, x2(2, 3, 4, 4), 4 + 3 + 3


@free
def stack_and_sum() -> Example:
    net = Net(
        lambda m, x: m.head(torch.stack([m.a(x), m.b(x)]).sum(0).relu()),
        a=nn.Linear(3, 5),
        b=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def slices() -> Example:
    """Two slices of 4 outputs added: 4 merged; the rest, 2, by itself."""
    return between(lambda y: torch.cat([y[:, :4] + y[:, 4:8], y[:, -2:]], 1).relu(), units=10, expected=6, out=6)


@free
def strided_slice() -> Example:
    """Even and odd outputs added: 4."""
    return between(lambda y: (y[:, ::2] + y[:, 1::2]).relu(), units=8, expected=4, out=4)


@free
def chunks() -> Example:
    def function(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return F.relu(a) + F.relu(b)

    return between(function, units=8, expected=4, out=4)


@free
def split_sizes() -> Example:
    """Parts of 3 and 5; the first three of the second part merge with the first: 5."""

    def function(y: Tensor) -> Tensor:
        a, b = torch.split(y, [3, 5], dim=-1)
        return torch.cat([(a + b[:, :3]).relu(), b[:, 3:]], -1)

    return between(function, units=8, expected=5, out=5)


@free
def unbind_and_select() -> Example:
    def function(y: Tensor) -> Tensor:
        a, b, _ = y.unflatten(-1, (3, 4)).unbind(1)
        return a.relu() - b.relu() + y.unflatten(-1, (3, 4)).select(1, 2)

    return between(function, units=12, expected=4, out=4)


@free
def channel_shuffle() -> Example:
    def shuffle(y: Tensor) -> Tensor:
        return y.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)

    net = Net(
        lambda m, x: m.c(F.relu(m.b(shuffle(F.relu(m.a(x)))))),
        a=nn.Conv2d(3, 8, 1),
        b=nn.Conv2d(8, 8, 3, groups=2),
        c=nn.Conv2d(8, 2, 1),
    )
    return net, x2(2, 3, 4, 4), 8 + 8


@free
def channel_shuffle_module() -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ChannelShuffle(4), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    return net, x2(2, 3, 4, 4), 8 + 8


@free
def permutation_by_buffer() -> Example:
    net = Net(
        lambda m, x: m.head((y := F.relu(m.stem(x)))[:, m.perm] + y),
        stem=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
        perm=torch.tensor([1, 0, 2, 4, 3]),
    )
    return net, x2(6, 3), 3  # 0 with 1, 3 with 4, and 2 alone


@free
def permutation_by_list() -> Example:
    net = Net(
        lambda m, x: m.head((y := F.relu(m.stem(x)))[:, [1, 0, 2, 4, 3]] + y),
        stem=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 3


@free
def permutation_by_index_select() -> Example:
    net = Net(
        lambda m, x: m.head(torch.index_select(F.relu(m.stem(x)), 1, m.perm)),
        stem=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
        perm=torch.tensor([4, 2, 0, 1, 3]),
    )
    return net, x2(6, 3), 5


@free
def flip_and_roll() -> Example:
    """flip ties i with 4 - i; rolling the window (space) does nothing to channels: {0,4}, {1,3}, {2}."""
    return between_five_channels(lambda y: y.relu() + y.flip(1) + y.roll(2, dims=-1), 3)


def between_five_channels(function: Callable[[Tensor], Tensor], expected: int) -> Example:
    net = Net(lambda m, x: m.head(function(m.stem(x))), stem=nn.Conv2d(3, 5, 1), head=nn.Conv2d(5, 2, 1))
    return net, x2(2, 3, 4, 4), expected


@free
def views_of_expanded_tensors() -> Example:
    """Labels made by expand must be real before they are viewed: a pooled vector is spread again."""
    return between_convs(
        lambda y: y.mean((2, 3))[:, :, None, None].expand(-1, -1, 6, 6).reshape(2, 4, 36).view(2, 4, 6, 6)
    )


@free
def permutes_and_reshapes() -> Example:
    """To channels last, through a linear layer over channels, and back: 4 + 5."""
    net = Net(
        lambda m, x: m.head(
            F.relu(m.lin(F.relu(m.stem(x)).permute(0, 2, 3, 1).reshape(-1, 4))).reshape(2, 4, 4, 5).movedim(-1, 1)
        ),
        stem=nn.Conv2d(3, 4, 1),
        lin=nn.Linear(4, 5),
        head=nn.Conv2d(5, 2, 1),
    )
    return net, x2(2, 3, 4, 4), 4 + 5


@free
def repeat_and_tile() -> Example:
    return between(
        lambda y: y.relu().repeat(1, 2) + y.repeat_interleave(2, 1).view(6, 5, 2).transpose(1, 2).flatten(1),
        out=10,
    )


@free
def shift_of_channels() -> Example:
    """Half of the channels are moved by a pixel, the gap filled with zeros (temporal shift module)."""

    def shift(y: Tensor) -> Tensor:
        moved = torch.zeros_like(y)
        moved[:, :2, :, 1:] = y[:, :2, :, :-1]
        moved[:, 2:] = y[:, 2:]
        return moved

    return between_convs(lambda y: shift(y.relu()))


# --- parameters met more than once ---
#


@free
def layer_used_twice() -> Example:
    """One weight between the stream and itself, twice: its inputs and outputs all merge with the stem's 5."""
    net = Net(
        lambda m, x: m.head(F.relu(m.a(F.relu(m.a(F.relu(m.stem(x))))))),
        stem=nn.Linear(3, 5),
        a=nn.Linear(5, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def siamese() -> Example:
    net = Net(lambda m, x, y: m.head(F.relu(m.a(x)) - F.relu(m.a(y))), a=nn.Linear(3, 5), head=nn.Linear(5, 2))
    return net, (x2(6, 3), x2(6, 3) + 1), 5


@free
def siamese_distance_stays_free_without_merging_streams() -> Example:
    """One layer on two inputs, two heads: the outputs of both uses are one variable each: 5."""
    net = Net(
        lambda m, x, y: (m.p(F.relu(m.a(x))), m.q(F.relu(m.a(y)))),
        a=nn.Linear(3, 5),
        p=nn.Linear(5, 2),
        q=nn.Linear(5, 2),
    )
    return net, (x2(6, 3), x2(6, 3) + 1), 5


@free
def unrolled_recurrence() -> Example:
    """h <- relu(W x_t + U h) from h = 0: the state's 5 units."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 5)
        for t in range(x.shape[1]):
            h = F.relu(m.w(x[:, t]) + m.u(h))
        return m.head(h)

    return (
        Net(forward, w=nn.Linear(3, 5), u=nn.Linear(5, 5, bias=False), head=nn.Linear(5, 2)),
        x2(6, 4, 3),
        5,
    )


@free
def tied_embedding() -> Example:
    """The head has the embedding's weight: the last labels are minus the embedding's 5; hidden 4."""
    net = Net(
        lambda m, t: F.linear(m.b(F.relu(m.a(m.emb(t)))), m.emb.weight),
        emb=nn.Embedding(10, 5),
        a=nn.Linear(5, 4),
        b=nn.Linear(4, 5),
    )
    return net, torch.tensor([[1, 2, 9], [0, 4, 4]]), 5 + 4


@free
def tied_embedding_by_module() -> Example:
    """The same with one nn.Parameter registered under two names."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.a, self.head = nn.Embedding(10, 5), nn.Linear(5, 5), nn.Linear(5, 10, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, t: Tensor) -> Tensor:
            return self.head(F.relu(self.a(self.emb(t))))

    return Tied(), torch.tensor([[1, 2, 9], [0, 4, 4]]), 5


@free
def embedding_with_positions() -> Example:
    """Token and position embeddings are added: one label per feature, 5."""
    net = Net(
        lambda m, t: m.head(F.relu(m.emb(t) + m.pos[: t.shape[1]])),
        emb=nn.Embedding(10, 5),
        pos=w(4, 5),
        head=nn.Linear(5, 2),
    )
    return net, torch.tensor([[1, 2, 9], [0, 4, 4]]), 5


@free
def embedding_bag_and_class_token() -> Example:
    """A learned token in front of the sequence shares the features' labels: 5."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([m.token.expand(x.shape[0], -1, -1), m.stem(x)], 1) + m.pos
        return m.head(F.relu(y).mean(1) + y[:, 0])

    return (
        Net(forward, stem=nn.Linear(3, 5), token=w(1, 1, 5), pos=w(1, 7, 5), head=nn.Linear(5, 2)),
        x2(2, 6, 3),
        5,
    )


@free
def storage_shared_by_two_names() -> Example:
    """Two parameters, one storage: they are one weight, here used as layer one and layer two of a chain."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b, self.head = (
                nn.Linear(3, 5),
                nn.Linear(5, 5, bias=False),
                nn.Linear(5, 5, bias=False),
                nn.Linear(5, 2),
            )
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.b(F.relu(self.a(F.relu(self.stem(x)))))))

    return Shared(), x2(6, 3), 5


# --- norms and gains ---
#


@free
@modes_differ
def batch_norm() -> Example:
    """What goes in is frozen, what comes out is carried by gain and offset: 4 + 5."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 2, 1),
    )
    return net, x2(4, 3, 6, 6), 4 + 5


@free
@modes_differ
def batch_norm_without_affine() -> Example:
    """Nothing carries a scale behind the norm: only the last hidden layer's 5."""
    net = nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4, affine=False),
        nn.ReLU(),
        nn.Linear(4, 5),
        nn.ReLU(),
        nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
@modes_differ
def batch_norm_1d_and_3d() -> Example:
    net = Net(
        lambda m, x: m.c(F.relu(m.nb(m.b(F.relu(m.na(m.a(x))).unflatten(2, (2, 2, 2)))))),
        a=nn.Conv1d(2, 4, 1),
        na=nn.BatchNorm1d(4),
        b=nn.Conv3d(4, 5, 1),
        nb=nn.BatchNorm3d(5),
        c=nn.Conv3d(5, 2, 1),
    )
    return net, x2(3, 2, 8), 4 + 5


@free
@modes_differ
def batch_norm_residual() -> Example:
    """A ResNet block: the stream's 4 are merged over stem norm and block norm; the inner norm has 6."""
    net = Net(
        lambda m, x: m.head(F.relu((y := F.relu(m.n0(m.stem(x)))) + m.n2(m.b(F.relu(m.n1(m.a(y))))))),
        stem=nn.Conv2d(3, 4, 3, padding=1, bias=False),
        n0=nn.BatchNorm2d(4),
        a=nn.Conv2d(4, 6, 3, padding=1, bias=False),
        n1=nn.BatchNorm2d(6),
        b=nn.Conv2d(6, 4, 3, padding=1, bias=False),
        n2=nn.BatchNorm2d(4),
        head=nn.Conv2d(4, 2, 1),
    )
    return net, x2(3, 3, 5, 5), 4 + 6


@free
def group_norm() -> Example:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return net, x2(2, 3, 5, 5), 4


@free
def instance_norm() -> Example:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return net, x2(2, 3, 5, 5), 4


@free
def layer_norm() -> Example:
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 2)), x2(6, 3), 5


@free
def layer_norm_over_two_axes() -> Example:
    """One gain per position and feature, and a linear layer that reads all of them: 4 * 5."""
    return (
        nn.Sequential(nn.Linear(3, 5), nn.LayerNorm((4, 5)), nn.Flatten(), nn.Linear(20, 2)),
        x2(6, 4, 3),
        20,
    )


@free
def layer_norm_without_affine() -> Example:
    net = nn.Sequential(
        nn.Linear(3, 5),
        nn.LayerNorm(5, elementwise_affine=False),
        nn.Linear(5, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
    )
    return net, x2(6, 3), 4


@free
def layer_norm_of_channels_first() -> Example:
    """ConvNeXt's: permute, normalize, permute back."""

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    return nn.Sequential(nn.Conv2d(3, 4, 3), Norm(4), nn.ReLU(), nn.Conv2d(4, 2, 1)), x2(2, 3, 5, 5), 4


@free
def rms_norm() -> Example:
    return nn.Sequential(nn.Linear(3, 5), nn.RMSNorm(5), nn.Linear(5, 2)), x2(6, 3), 5


@free
def rms_norm_written_out() -> Example:
    """As in the Llama code: x rsqrt(mean(x^2) + eps) * gain. The eps freezes x; the gain carries 5."""
    net = Net(
        lambda m, x: m.head(m.gain * ((y := m.stem(x)) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))),
        stem=nn.Linear(3, 5),
        gain=w(5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5


@free
def rms_norm_with_gain_plus_one() -> Example:
    """Gemma stores the gain minus one, and 1 + gain cannot be scaled: only the hidden layer's 4."""
    net = Net(
        lambda m, x: m.head(F.relu(m.b((1 + m.gain) * F.rms_norm(m.stem(x), (5,))))),
        stem=nn.Linear(3, 5),
        gain=w(5),
        b=nn.Linear(5, 4),
        head=nn.Linear(4, 2),
    )
    return net, x2(6, 3), 4


@free
def layer_norm_written_out() -> Example:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x)
        mean, var = y.mean(-1, keepdim=True), y.var(-1, keepdim=True, correction=0)
        return m.head((y - mean) / (var + 1e-5).sqrt() * m.gain + m.offset)

    return Net(forward, stem=nn.Linear(3, 5), gain=w(5), offset=w(5), head=nn.Linear(5, 2)), x2(6, 3), 5


@free
def layer_scale() -> Example:
    """Stream frozen by the norm; norm 5, hidden 6 (ReLU), branch end 5 before its gain."""
    net = Net(
        lambda m, x: m.head((y := m.stem(x)) + m.gamma * m.b(F.relu(m.a(m.norm(y))))),
        stem=nn.Linear(3, 5),
        norm=nn.LayerNorm(5),
        a=nn.Linear(5, 6),
        b=nn.Linear(6, 5),
        gamma=w(5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 5 + 6 + 5


@free
def channel_affine() -> Example:
    """ResMLP's affine: gain and offset per channel after a convolution: 4 before, 4 behind."""
    net = Net(
        lambda m, x: m.head(F.relu(m.stem(x) * m.gain + m.offset)),
        stem=nn.Conv2d(3, 4, 1),
        gain=w(4, 1, 1),
        offset=w(4, 1, 1),
        head=nn.Conv2d(4, 2, 1),
    )
    return net, x2(2, 3, 4, 4), 8


# --- gates ---
#


def squeeze_and_excite(gate: Callable[[Tensor], Tensor]) -> Example:
    """The gate is frozen and only reads: 4 channels, and the gate's own 2 hidden units."""
    net = Net(
        lambda m, x: m.head((y := F.relu(m.stem(x))) * gate(m.up(F.relu(m.down(y.mean((2, 3), keepdim=True)))))),
        stem=nn.Conv2d(3, 4, 3),
        down=nn.Conv2d(4, 2, 1),
        up=nn.Conv2d(2, 4, 1),
        head=nn.Conv2d(4, 2, 1),
    )
    return net, x2(2, 3, 5, 5), 4 + 2


@free
def squeeze_and_excite_by_sigmoid() -> Example:
    return squeeze_and_excite(torch.sigmoid)


@free
def squeeze_and_excite_by_hardsigmoid() -> Example:
    return squeeze_and_excite(F.hardsigmoid)


@free
def swiglu() -> Example:
    """SiLU freezes the gate; the other factor carries 6. The norm before has 5."""
    net = Net(
        lambda m, x: m.head(F.silu(m.gate(y := m.norm(m.stem(x)))) * m.up(y)),
        stem=nn.Linear(3, 5),
        norm=nn.RMSNorm(5),
        gate=nn.Linear(5, 6),
        up=nn.Linear(5, 6),
        head=nn.Linear(6, 2),
    )
    return net, x2(6, 3), 5 + 6


@free
def geglu_by_chunk() -> Example:
    """One layer of 12 outputs, the second half goes through GELU: 6."""

    def function(y: Tensor) -> Tensor:
        a, gate = y.chunk(2, -1)
        return a * F.gelu(gate)

    return between(function, units=12, expected=6, out=6)


@free
def glu() -> Example:
    return between(lambda y: F.glu(y, -1), units=12, expected=6, out=6)


@free
def glu_of_channels() -> Example:
    net = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GLU(1), nn.Conv1d(4, 2, 1))
    return net, x2(2, 3, 7), 4


@free
def product_of_two_layers() -> Example:
    """Both factors are free; the design freezes the left one: 6."""
    net = Net(
        lambda m, x: m.head(F.relu(m.a(x)) * m.b(x)),
        a=nn.Linear(3, 6),
        b=nn.Linear(3, 6),
        head=nn.Linear(6, 2),
    )
    return net, x2(6, 3), AtLeast(6)


@free
def gate_by_softmax() -> Example:
    """A mixture of two experts with soft weights: the gate is frozen, the experts' outputs merge: 5."""

    def forward(m: Any, x: Tensor) -> Tensor:
        g = torch.softmax(m.gate(x), -1)
        return m.head(F.relu(m.a(x)) * g[:, :1] + F.relu(m.b(x)) * g[:, 1:])

    return (
        Net(forward, gate=nn.Linear(3, 2), a=nn.Linear(3, 5), b=nn.Linear(3, 5), head=nn.Linear(5, 2)),
        x2(6, 3),
        5,
    )


# --- attention ---
#


def heads(y: Tensor, n: int) -> Tensor:
    return y.unflatten(-1, (n, -1)).transpose(1, 2)


def rotate_half(y: Tensor) -> Tensor:
    a, b = y.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rope_tables(length: int, dim: int) -> tuple[Tensor, Tensor]:
    freq = 1.0 / 100 ** (torch.arange(0, dim, 2) / dim)
    angle = torch.outer(torch.arange(length).float(), freq)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    """Self-attention of a stem's 8 features, written out or fused, grouped-query if kv < n."""

    def __init__(
        self,
        n: int = 2,
        kv: int = 2,
        d: int = 4,
        rope: bool = False,
        fused: bool = True,
        norm: bool = True,
        gqa: str = "repeat",
    ) -> None:
        super().__init__()
        self.n, self.kv, self.d, self.fused, self.gqa = n, kv, d, fused, gqa
        self.stem = nn.Linear(3, 8)
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.q, self.k, self.v = nn.Linear(8, n * d), nn.Linear(8, kv * d), nn.Linear(8, kv * d)
        self.o, self.head = nn.Linear(n * d, 8), nn.Linear(8, 2)
        self.rope = rope
        cos, sin = rope_tables(6, d)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(x)
        q, k, v = heads(self.q(y), self.n), heads(self.k(y), self.kv), heads(self.v(y), self.kv)
        if self.rope:
            q, k = q * self.cos + rotate_half(q) * self.sin, k * self.cos + rotate_half(k) * self.sin
        groups = self.n // self.kv
        if groups > 1 and self.gqa == "repeat":
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        elif groups > 1 and self.gqa == "expand":
            k, v = (t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa == "flag")
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.d)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            z = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.head(x + self.o(z.transpose(1, 2).flatten(2)))


@free
def attention_fused() -> Example:
    """Stream frozen by the norm; norm 8; queries against keys 2 heads * 4; values 8."""
    return Attention(), x2(2, 6, 3), 8 + 8 + 8


@free
def attention_written_out() -> Example:
    return Attention(fused=False), x2(2, 6, 3), 8 + 8 + 8


@free
def attention_without_norm() -> Example:
    """The stream's 8 instead of the norm's."""
    return Attention(norm=False), x2(2, 6, 3), 8 + 8 + 8


@free
def attention_with_rope() -> Example:
    """A rotation ties features i and i + 2 of a head: 2 heads * 2 for queries and keys."""
    return Attention(rope=True), x2(2, 6, 3), 8 + 4 + 8


@free
def attention_with_rope_written_out() -> Example:
    return Attention(rope=True, fused=False), x2(2, 6, 3), 8 + 4 + 8


@free
def grouped_query_attention() -> Example:
    """4 query heads share 2 key-value heads of 4: 8 for queries and keys, 8 for values."""
    return Attention(n=4, kv=2), x2(2, 6, 3), 8 + 8 + 8


@free
def grouped_query_attention_by_expand() -> Example:
    return Attention(n=4, kv=2, gqa="expand", fused=False), x2(2, 6, 3), 8 + 8 + 8


@free
def grouped_query_attention_by_flag() -> Example:
    return Attention(n=4, kv=2, gqa="flag"), x2(2, 6, 3), 8 + 8 + 8


@free
def grouped_query_attention_with_rope() -> Example:
    """2 key heads * 2 pairs."""
    return Attention(n=4, kv=2, rope=True), x2(2, 6, 3), 8 + 4 + 8


@free
def multi_query_attention() -> Example:
    """All 4 heads share one key-value head of 4."""
    return Attention(n=4, kv=1), x2(2, 6, 3), 8 + 4 + 4


@free
def rope_by_complex_numbers() -> Example:
    """Neighbours are a complex number, rotated by a product: 2 heads * 2; values 8, norm 8."""

    class Complex(Attention):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = self.norm(x)
            q, k, v = heads(self.q(y), 2), heads(self.k(y), 2), heads(self.v(y), 2)
            turn = torch.complex(self.cos[:, :2], self.sin[:, :2])
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
                for t in (q, k)
            )
            z = F.scaled_dot_product_attention(q, k, v)
            return self.head(x + self.o(z.transpose(1, 2).flatten(2)))

    return Complex(), x2(2, 6, 3), 8 + 4 + 8


@free
def attention_with_fused_projection() -> Example:
    """One layer of 24 outputs for queries, keys and values, split by unbind: stream 8, 8, 8."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        z = (q * 0.5) @ k.transpose(-2, -1)
        return m.head(x + m.o((z.softmax(-1) @ v).transpose(1, 2).reshape(2, 6, 8)))

    return (
        Net(forward, stem=nn.Linear(3, 8), qkv=nn.Linear(8, 24), o=nn.Linear(8, 8), head=nn.Linear(8, 2)),
        x2(2, 6, 3),
        24,
    )


@free
def attention_with_position_bias() -> Example:
    """A learned bias on the scores is frozen, and freezes nothing else: stream 8, 8, 8."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        q, k, v = (heads(t, 2) for t in m.qkv(x).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias)
        return m.head(x + m.o(z.transpose(1, 2).flatten(2)))

    net = Net(
        forward,
        stem=nn.Linear(3, 8),
        qkv=nn.Linear(8, 24),
        o=nn.Linear(8, 8),
        head=nn.Linear(8, 2),
        bias=w(2, 6, 6),
    )
    return net, x2(2, 6, 3), 24


@free
def attention_with_normed_queries_and_keys() -> Example:
    """QK-norm: heads share the gains, so a feature has one scale over all heads: 4; values 8, norm 8."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.norm(x)
        q, k, v = (heads(t, 2) for t in m.qkv(y).chunk(3, -1))
        z = F.scaled_dot_product_attention(m.nq(q), m.nk(k), v)
        return m.head(x + m.o(z.transpose(1, 2).flatten(2)))

    net = Net(
        forward,
        stem=nn.Linear(3, 8),
        norm=nn.RMSNorm(8),
        qkv=nn.Linear(8, 24),
        nq=nn.RMSNorm(4),
        nk=nn.RMSNorm(4),
        o=nn.Linear(8, 8),
        head=nn.Linear(8, 2),
    )
    return net, x2(2, 6, 3), 8 + 4 + 8


@free
def cross_attention() -> Example:
    """Queries from one stem (8), keys and values from another (5): 8 + 5, 8 and 8."""

    def forward(m: Any, x: Tensor, context: Tensor) -> Tensor:
        x, c = F.relu(m.stem(x)), F.relu(m.other(context))
        z = F.scaled_dot_product_attention(heads(m.q(x), 2), heads(m.k(c), 2), heads(m.v(c), 2))
        return m.head(x + m.o(z.transpose(1, 2).flatten(2)))

    net = Net(
        forward,
        stem=nn.Linear(3, 8),
        other=nn.Linear(2, 5),
        q=nn.Linear(8, 8),
        k=nn.Linear(5, 8),
        v=nn.Linear(5, 8),
        o=nn.Linear(8, 8),
        head=nn.Linear(8, 2),
    )
    return net, (x2(2, 6, 3), x2(2, 4, 2)), 8 + 5 + 8 + 8


@free
@modes_differ
def multihead_attention_module() -> Example:
    """nn.MultiheadAttention, 2 heads of 4: stream 8, queries and keys 8, values 8."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x + m.attention(x, x, x, need_weights=False)[0])

    net = Net(
        forward,
        stem=nn.Linear(3, 8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, 2),
    )
    return net, x2(2, 6, 3), 24


@free
@modes_differ
def multihead_attention_module_with_weights() -> Example:
    """The same, returning the averaged attention weights, which is another code path. Sequence first."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        z, weights = m.attention(x, x, x)
        return m.head(x + z), weights

    net = Net(forward, stem=nn.Linear(3, 8), attention=nn.MultiheadAttention(8, 2), head=nn.Linear(8, 2))
    return net, x2(6, 2, 3), 24


@free
@modes_differ
def multihead_cross_attention_module() -> Example:
    """Keys and values of another width have weights of their own: 8 + 5 + 8 + 8."""

    def forward(m: Any, x: Tensor, context: Tensor) -> Tensor:
        x, c = F.relu(m.stem(x)), F.relu(m.other(context))
        return m.head(x + m.attention(x, c, c, need_weights=False)[0])

    net = Net(
        forward,
        stem=nn.Linear(3, 8),
        other=nn.Linear(2, 5),
        attention=nn.MultiheadAttention(8, 2, batch_first=True, kdim=5, vdim=5),
        head=nn.Linear(8, 2),
    )
    return net, (x2(2, 6, 3), x2(2, 4, 2)), 8 + 5 + 8 + 8


@free
@modes_differ
def transformer_encoder_layer() -> Example:
    """Post-norm: the stream before each norm is frozen. Norms 8 + 8 (residuals tie each to the next norm's
    input, so the first is frozen by the second), queries and keys 8, values 8, hidden 6, and the last norm
    8."""
    layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)
    net = Net(lambda m, x: m.head(m.layer(m.stem(x))), stem=nn.Linear(3, 8), layer=layer, head=nn.Linear(8, 2))
    return net, x2(2, 6, 3), 8 + 8 + 6 + 8


@free
@modes_differ
def transformer_encoder_layer_norm_first() -> Example:
    """Pre-norm: the stream is frozen by the first norm; norms 8 + 8, keys 8, values 8, hidden 6."""
    layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True, norm_first=True)
    net = Net(lambda m, x: m.head(m.layer(m.stem(x))), stem=nn.Linear(3, 8), layer=layer, head=nn.Linear(8, 2))
    return net, x2(2, 6, 3), 8 + 8 + 8 + 8 + 6


@free
def linear_attention() -> Example:
    """relu(q) (relu(k)^T v): a product of three free activations; stream and one of them stay free."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        q, k, v = (heads(t, 2) for t in m.qkv(x).chunk(3, -1))
        z = F.relu(q) @ (F.relu(k).transpose(-2, -1) @ v)
        return m.head(x + m.o(z.transpose(1, 2).flatten(2)))

    return (
        Net(forward, stem=nn.Linear(3, 8), qkv=nn.Linear(8, 24), o=nn.Linear(8, 8), head=nn.Linear(8, 2)),
        x2(2, 6, 3),
        AtLeast(16),
    )


# --- in place, several outputs, other calling conventions ---
#


@free
def relu_in_place() -> Example:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), x2(6, 3), 5


@free
def relu_in_place_beside_its_input() -> Example:
    """y and relu_(y) are one tensor: 5."""

    def function(y: Tensor) -> Tensor:
        z = y.relu_()
        return z + y

    return between(function)


@free
def residual_add_in_place() -> Example:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x)
        z = m.b(F.relu(m.a(y), inplace=True))
        z += y
        return m.head(z.relu_())

    return (
        Net(forward, stem=nn.Linear(3, 4), a=nn.Linear(4, 6), b=nn.Linear(6, 4), head=nn.Linear(4, 2)),
        x2(6, 3),
        4 + 6,
    )


@free
def multiplication_in_place() -> Example:
    return between(lambda y: y.relu().mul_(0.5).div_(3).neg_())


@free
def relu_in_place_on_a_view() -> Example:
    def function(y: Tensor) -> Tensor:
        y[:, :2].relu_()
        return y

    return between(function)


@free
def addition_in_place_on_a_view() -> Example:
    """Columns 0 and 1 receive columns 3 and 4: {0,3}, {1,4}, {2}."""

    def function(y: Tensor) -> Tensor:
        y = y.relu()
        y[:, :2] += y[:, 3:]
        return y

    return between(function, expected=3)


@free
def zeros_written_to_a_slice() -> Example:
    """Two of five units are overwritten by zero. Whether their (dead) scales count is open: 3 at least."""

    def function(y: Tensor) -> Tensor:
        y = y.relu()
        y[:, 1:3] = 0
        return y

    return between(function, expected=AtLeast(3))


@free
def activation_written_to_a_slice() -> Example:
    """A buffer of zeros filled in parts by two layers: 2 + 3."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], 6)
        y[:, :2] = F.relu(m.a(x))
        y[:, 3:] = F.relu(m.b(x))
        return m.head(y)

    return Net(forward, a=nn.Linear(3, 2), b=nn.Linear(3, 3), head=nn.Linear(6, 2)), x2(6, 3), 2 + 3


@free
def two_outputs() -> Example:
    net = Net(
        lambda m, x: (m.p(y := F.relu(m.stem(x))), {"q": m.q(y)}),
        stem=nn.Linear(3, 5),
        p=nn.Linear(5, 2),
        q=nn.Linear(5, 1),
    )
    return net, x2(6, 3), 5


@free
def keyword_inputs() -> Example:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Tensor:
            return self.head(F.relu(self.a(x) + (0 if y is None else scale * self.b(y))))

    return Keywords(), {"x": x2(6, 3), "y": x2(6, 2)}, 5


@free
def dict_input() -> Example:
    """One positional argument that is a dict."""

    class Dict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"out": self.head(F.relu(self.a(batch["x"])))}

    return Dict(), ({"x": x2(6, 3)},), 5


@free
def parts_without_gradients() -> Example:
    """A frozen backbone under no_grad is a network like any other: 5 + 4."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.relu(m.stem(x))
        return m.head(F.relu(m.a(y)))

    return Net(forward, stem=nn.Linear(3, 5), a=nn.Linear(5, 4), head=nn.Linear(4, 2)), x2(6, 3), 5 + 4


@free
def detached_parts() -> Example:
    return between(lambda y: y.relu() + y.detach().clone().contiguous())


@free
def layers_under_modules() -> Example:
    """ModuleList and ModuleDict, a loop, and a layer that is never used."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(6, 4)}) for _ in range(3))
            self.stem, self.head, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = x + block["b"](F.relu(block["a"](x)))
            return self.head(x)

    return Nested(), x2(6, 3), 4 + 3 * 6


@free
def parametrized_as_identity_of_views() -> Example:
    """A parametrization that only rearranges its parameter: the stored tensor is what scales."""

    class Transposed(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.t()

    layer = nn.Linear(5, 3, bias=False)
    nn.utils.parametrize.register_parametrization(layer, "weight", Transposed(), unsafe=True)
    net = Net(lambda m, x: m.head(F.relu(F.linear(x, m.stem.weight))), stem=layer, head=nn.Linear(5, 2))
    return net, x2(6, 3), 5
