"""Small networks where a careless rule of the tracer would claim a freedom that is not there.

Whatever is found, moving it must leave the outputs alone. ``expected`` (see `nets`) says what must stay free
around the barrier. The docstring, or the name, is the reason the barrier is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.nets import AtLeast, Example, Net, heads, modes_differ, seeded, w, x2

BARRIERS: dict[str, Callable[[], Example]] = {}


def barrier(build: Callable[[], Example]) -> Callable[[], Example]:
    BARRIERS[build.__name__] = seeded(build)
    return build


#


def around(function: Callable[[Any, Tensor], Tensor], n: int = 5, out: int = 5, **parts: Any) -> Example:
    """A stem of n units, the barrier, and a hidden layer of 4 that stays free whatever happens."""
    net = Net(
        lambda m, x: m.head(F.relu(m.hidden(function(m, m.stem(x))))),
        stem=nn.Linear(3, n),
        hidden=nn.Linear(out, 4),
        head=nn.Linear(4, 2),
        **parts,
    )
    return net, x2(6, 3), AtLeast(4)


@barrier
def square_beside_itself() -> Example:
    """s and s^2 cannot both be divided out of one sum."""
    return around(lambda m, y: y + y * y)


@barrier
def square_concatenated_with_itself() -> Example:
    """Two columns of the next weight with exponents -1 and -2, which must be kept apart: 5 + 4."""
    model, example, _ = around(lambda m, y: torch.cat([y, y * y], -1), out=10)
    return model, example, 5 + 4


@barrier
def capped_by_a_buffer() -> Example:
    """Buffers do not move, so what is compared with one stays."""
    return around(lambda m, y: torch.minimum(F.relu(y), m.cap), cap=x2(5).abs())


@barrier
def capped_where_it_is_padded() -> Example:
    """Beside units that are zero the cap may be negative, so its sign decides there."""
    return around(lambda m, y: torch.minimum(F.pad(F.relu(y), (0, 1)), m.cap), out=6, cap=nn.Parameter(x2(6) - 0.5))


@barrier
def constant_added() -> Example:
    """1 does not scale."""
    return around(lambda m, y: F.relu(y + 1))


@barrier
def constant_subtracted_from() -> Example:
    """1 - y, the other way round."""
    return around(lambda m, y: F.relu(1 - y))


@barrier
def constant_added_by_buffer() -> Example:
    return around(lambda m, y: F.relu(y + m.offset), offset=x2(5))


@barrier
def constant_added_by_full() -> Example:
    return around(lambda m, y: F.relu(y + torch.full_like(y, 0.5)))


@barrier
def constant_added_by_alpha() -> Example:
    """add(1, y, alpha) hides the constant in the first argument."""
    return around(lambda m, y: torch.add(torch.ones(()), y, alpha=0.5).relu())


@barrier
def constant_concatenated_then_added() -> Example:
    """A column of ones beside the features, and a sum over all of them."""
    return around(lambda m, y: torch.cat([y, torch.ones_like(y[:, :1])], -1).mean(-1, keepdim=True).expand(-1, 5))


@barrier
def softsign() -> Example:
    """y / (1 + |y|)."""
    return around(lambda m, y: y / (1 + y.abs()))


@barrier
def number_divided_by_activation() -> Example:
    """1 / y has exponent -1: free if that is known, frozen if not."""
    return around(lambda m, y: 1 / (y.abs() + 0.5))


@barrier
def reciprocal() -> Example:
    return around(lambda m, y: y.abs().reciprocal())


@barrier
def ratio_of_activations() -> Example:
    """y / max(y): the scale of y cancels only if all units share it."""
    return around(lambda m, y: y / y.abs().amax(-1, keepdim=True))


@barrier
def division_with_rounding() -> Example:
    """The overload with a rounding mode is not a division."""
    return around(lambda m, y: torch.div(y, 0.3, rounding_mode="floor"))


@barrier
def floor_division() -> Example:
    return around(lambda m, y: y // 0.3)


@barrier
def remainder() -> Example:
    return around(lambda m, y: torch.remainder(y, 0.7))


@barrier
def rounding() -> Example:
    return around(lambda m, y: torch.round(3 * y) + y.floor() + y.frac())


@barrier
def threshold_at_a_number() -> Example:
    return around(lambda m, y: F.threshold(y, 0.3, 0.0))


@barrier
def threshold_to_a_number() -> Example:
    """At zero, but what is below becomes 0.2."""
    return around(lambda m, y: F.threshold(y, 0.0, 0.2))


@barrier
def clamp_at_a_number() -> Example:
    return around(lambda m, y: y.clamp(-0.5, 0.5))


@barrier
def clamp_max_at_a_number() -> Example:
    """min=0 is fine, max=0.7 is not."""
    return around(lambda m, y: y.clamp(min=0, max=0.7))


@barrier
def clamp_at_a_tensor() -> Example:
    return around(lambda m, y: torch.clamp(y, min=torch.tensor(0.1)))


@barrier
def maximum_with_a_number() -> Example:
    return around(lambda m, y: torch.maximum(y, torch.full_like(y, 0.3)))


@barrier
def relu6() -> Example:
    return around(lambda m, y: F.relu6(8 * y))


@barrier
def hardtanh_and_hardswish() -> Example:
    return around(lambda m, y: F.hardtanh(y) + F.hardswish(y))


@barrier
def leaky_relu_written_with_a_shift() -> Example:
    return around(lambda m, y: F.relu(y - 0.2) + 0.2)


@barrier
def pad_with_a_number() -> Example:
    """Padding features by ones, then adding neighbours: ones meet features of any scale."""
    return around(lambda m, y: (p := F.pad(y, (1, 1), value=1.0))[:, :5] + p[:, 2:])


@barrier
def pad_with_a_number_before_a_convolution() -> Example:
    """The border of each channel is 1 whatever the channel's scale."""
    net = Net(
        lambda m, x: m.head(F.relu(m.hidden(F.pad(m.stem(x), (1, 1, 1, 1), value=0.5)))),
        stem=nn.Conv2d(3, 4, 1),
        hidden=nn.Conv2d(4, 5, 3),
        head=nn.Conv2d(5, 2, 1),
    )
    return net, x2(2, 3, 4, 4), AtLeast(5)


@barrier
def masked_fill_with_a_number() -> Example:
    return around(lambda m, y: y.masked_fill(y < 0, 0.3))


@barrier
def masked_fill_with_a_condition_at_a_number() -> Example:
    """The filler is 0 but the condition depends on the scale."""
    return around(lambda m, y: y.masked_fill(y < 0.2, 0.0))


@barrier
def where_with_another_activation() -> Example:
    """Where y > 0 take y, else the buffer."""
    return around(lambda m, y: torch.where(y > 0, y, m.other), other=x2(5))


@barrier
def where_conditioned_on_two_units() -> Example:
    """Which of two units is larger depends on their relative scale: they merge or freeze."""
    return around(lambda m, y: torch.where(y > y.flip(-1), y, 0.0))


@barrier
def comparison_with_a_number() -> Example:
    return around(lambda m, y: (y > 0.1).to(y.dtype))


@barrier
def comparison_between_units() -> Example:
    """y[:, :2] > y[:, 2:4] compares units of different labels."""
    return around(lambda m, y: (y[:, :4] > y[:, 1:]).to(y.dtype), out=4)


@barrier
def equality_with_a_number() -> Example:
    return around(lambda m, y: y * (y.relu() != 0) + (torch.round(y) == 1))


@barrier
def cast_to_integers() -> Example:
    return around(lambda m, y: (4 * y).to(torch.int64).to(y.dtype))


@barrier
def cast_to_integers_by_long() -> Example:
    return around(lambda m, y: (4 * y).long() * y)


@barrier
def power_of_two() -> Example:
    """2 ** y: the activation is the exponent."""
    return around(lambda m, y: 2**y)


@barrier
def power_by_activation() -> Example:
    return around(lambda m, y: (1 + y.abs()).pow(y))


@barrier
def activation_to_the_activation() -> Example:
    """x.pow(y) with both from the stem."""
    return around(lambda m, y: y.abs().pow(y))


@barrier
def activation_to_a_parameter() -> Example:
    """GeM pooling: the exponent is learned."""
    return around(lambda m, y: y.abs().pow(m.p), p=w(1))


@barrier
def activation_to_the_zero() -> Example:
    """y ** 0 is 1: exponent 0 times any label is no label."""
    return around(lambda m, y: y + y.pow(0))


@barrier
def exponential_and_logarithm() -> Example:
    return around(lambda m, y: y.exp() + (y.abs() + 0.1).log())


@barrier
def log_of_activation() -> Example:
    """log(s y) = log s + log y: a shift, not a scale."""
    return around(lambda m, y: y.abs().log())


@barrier
def trigonometry() -> Example:
    return around(lambda m, y: y.sin() + y.cos() + y.atan())


@barrier
def softmax() -> Example:
    return around(lambda m, y: y.softmax(-1))


@barrier
def log_softmax() -> Example:
    return around(lambda m, y: y.log_softmax(-1))


@barrier
def sigmoid() -> Example:
    return around(lambda m, y: y.sigmoid())


@barrier
def tanh() -> Example:
    return around(lambda m, y: y.tanh())


@barrier
def gelu() -> Example:
    return around(lambda m, y: F.gelu(y))


@barrier
def gelu_by_tanh() -> Example:
    return around(lambda m, y: F.gelu(y, approximate="tanh"))


@barrier
def silu_written_out() -> Example:
    """y * sigmoid(y): the frozen factor is made from y itself, which is frozen with it."""
    return around(lambda m, y: y * torch.sigmoid(y))


@barrier
def silu_and_mish() -> Example:
    return around(lambda m, y: F.silu(y) + F.mish(y))


@barrier
def elu_and_relatives() -> Example:
    return around(lambda m, y: F.elu(y) + F.selu(y) + F.celu(y) + F.softplus(y))


@barrier
def softshrink() -> Example:
    return around(lambda m, y: F.softshrink(y, 0.2) + F.hardshrink(y, 0.2) + F.tanhshrink(y))


@barrier
@modes_differ
def alpha_dropout() -> Example:
    """Dropped units become a constant, not zero."""
    return around(lambda m, y: F.alpha_dropout(y, 0.4, training=m.training))


@barrier
def noise_added() -> Example:
    """Input noise of fixed size does not scale (the seed is fixed in the comparison)."""
    return around(lambda m, y: F.relu(y + torch.randn_like(y)))


@barrier
def gather_by_data() -> Example:
    """Which channel is read depends on the input: all labels along that axis merge."""
    net = Net(
        lambda m, x, i: m.head(F.relu(m.hidden(torch.gather(m.stem(x), 1, i)))),
        stem=nn.Linear(3, 5),
        hidden=nn.Linear(2, 4),
        head=nn.Linear(4, 2),
    )
    return net, (x2(6, 3), torch.randint(0, 5, (6, 2))), AtLeast(4)


@barrier
def index_by_data() -> Example:
    net = Net(
        lambda m, x, i: m.head(F.relu(m.hidden(m.stem(x)[:, i]))),
        stem=nn.Linear(3, 5),
        hidden=nn.Linear(2, 4),
        head=nn.Linear(4, 2),
    )
    return net, (x2(6, 3), torch.tensor([3, 1])), AtLeast(4)


@barrier
def index_by_computed_data() -> Example:
    """The index is the sum of a data input: still not a constant."""
    net = Net(
        lambda m, x, i: m.head(F.relu(m.hidden(m.stem(x)[:, (i + 1) % 5]))),
        stem=nn.Linear(3, 5),
        hidden=nn.Linear(2, 4),
        head=nn.Linear(4, 2),
    )
    return net, (x2(6, 3), torch.tensor([3, 1])), AtLeast(4)


@barrier
def argmax_over_channels() -> Example:
    """Which unit is largest depends on their relative scales."""
    return around(lambda m, y: F.one_hot(y.argmax(-1), 5).to(y.dtype))


@barrier
def argmax_as_index() -> Example:
    return around(lambda m, y: torch.gather(y, 1, y.argmax(-1, keepdim=True)).expand(-1, 5))


@barrier
def max_with_indices_over_channels() -> Example:
    """The values merge the channels; the indices depend on their ratios, which merging keeps."""

    def function(m: Any, y: Tensor) -> Tensor:
        values, indices = y.max(-1, keepdim=True)
        return values * y + indices

    return around(function)


@barrier
def top_k_over_channels() -> Example:
    return around(lambda m, y: y.topk(3, -1).values, out=3)


@barrier
def top_k_indices() -> Example:
    """Routing: the indices choose which channels are kept."""
    return around(lambda m, y: torch.zeros_like(y).scatter(-1, y.topk(2, -1).indices, 1.0) * y)


@barrier
def sort_over_channels() -> Example:
    return around(lambda m, y: y.sort(-1).values)


@barrier
def argsort_over_channels() -> Example:
    return around(lambda m, y: y.argsort(-1).to(y.dtype))


@barrier
def median_over_channels() -> Example:
    return around(lambda m, y: y - y.median(-1, keepdim=True).values)


@barrier
def cumulative_sum_over_channels() -> Example:
    return around(lambda m, y: y.cumsum(-1))


@barrier
def cumulative_product_over_channels() -> Example:
    """Exponents 1, 2, 3, ... of a merged scale."""
    return around(lambda m, y: y.cumprod(-1))


@barrier
def product_over_channels() -> Example:
    return around(lambda m, y: y.prod(-1, keepdim=True) * y)


@barrier
def norm_over_channels() -> Example:
    return around(lambda m, y: F.normalize(y, dim=-1))


@barrier
def variance_over_channels() -> Example:
    """Exponent 2 of a merged scale, added to exponent 1."""
    return around(lambda m, y: y + y.var(-1, keepdim=True))


@barrier
def norm_of_the_batch() -> Example:
    """Divided by its own standard deviation plus eps."""
    return around(lambda m, y: y / (y.std(0, keepdim=True) + 0.1))


@barrier
def weight_in_a_regulariser() -> Example:
    """The norm of a weight is an output: the weight cannot move."""
    net = Net(
        lambda m, x: (m.head(F.relu(m.a(x))), m.a.weight.square().sum()),
        a=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), AtLeast(0)


@barrier
def weight_as_an_output() -> Example:
    net = Net(lambda m, x: (m.head(F.relu(m.a(x))), m.a.bias), a=nn.Linear(3, 5), head=nn.Linear(5, 2))
    return net, x2(6, 3), AtLeast(0)


@barrier
def weight_in_a_later_norm() -> Example:
    """Met as a layer first and in a norm afterwards: the earlier role has to be taken back."""
    net = Net(
        lambda m, x: m.head(F.relu(m.b(F.relu(m.a(x)) / m.a.weight.norm()))),
        a=nn.Linear(3, 5),
        b=nn.Linear(5, 4),
        head=nn.Linear(4, 2),
    )
    return net, x2(6, 3), AtLeast(4)


@barrier
def weight_and_its_transpose() -> Example:
    """An autoencoder with tied weights: s_out - s_in and s_in - s_out of the same entry."""
    net = Net(lambda m, x: F.linear(F.relu(F.linear(x, m.a)), m.a.t()), a=w(5, 3))
    return net, x2(6, 3), AtLeast(0)


@barrier
def weight_and_its_transpose_in_the_middle() -> Example:
    net = Net(
        lambda m, x: m.head(F.relu(F.linear(F.relu(F.linear(F.relu(m.stem(x)), m.a)), m.a.t()))),
        stem=nn.Linear(3, 4),
        a=w(5, 4),
        head=nn.Linear(4, 2),
    )
    return net, x2(6, 3), AtLeast(0)


@barrier
def gain_used_twice() -> Example:
    """y * g * g: the gain's scale enters twice."""
    return around(lambda m, y: y * m.gain * m.gain, gain=w(5))


@barrier
def gain_used_on_two_streams() -> Example:
    """g multiplies y and its square."""
    return around(lambda m, y: m.gain * y + m.gain * y * y, gain=w(5))


@barrier
def gain_used_as_gain_and_bias() -> Example:
    return around(lambda m, y: y * m.gain + m.gain, gain=w(5))


@barrier
def bias_used_by_two_layers() -> Example:
    """One bias after two layers whose outputs go different ways: they merge or freeze."""
    net = Net(
        lambda m, x: m.head(F.relu(F.linear(F.relu(F.linear(x, m.a, m.bias)), m.b, m.bias))),
        a=w(5, 3),
        b=w(5, 5),
        bias=w(5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), AtLeast(0)


@barrier
def convolution_used_twice_on_different_channels() -> Example:
    """One depthwise-like kernel for both halves of the channels."""
    net = Net(
        lambda m, x: m.head(torch.cat([F.relu(m.a((y := m.stem(x))[:, :3])), F.relu(m.a(y[:, 3:]))], 1)),
        stem=nn.Conv2d(2, 6, 1),
        a=nn.Conv2d(3, 4, 3),
        head=nn.Conv2d(8, 2, 1),
    )
    return net, x2(2, 2, 5, 5), AtLeast(0)


@barrier
def convolution_used_twice_in_a_row() -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.ReLU(),
        shared := nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        shared,
        nn.Conv2d(4, 2, 1),
    )
    return net, x2(2, 3, 5, 5), AtLeast(0)


@barrier
def layer_used_on_output_and_input() -> Example:
    """A layer whose output is the model's is also used inside: its outputs are frozen there too."""
    net = Net(lambda m, x: m.a(F.relu(m.a(F.relu(m.stem(x))))), stem=nn.Linear(3, 5), a=nn.Linear(5, 5))
    return net, x2(6, 3), AtLeast(0)


@barrier
def two_slices_of_a_weight_overlap() -> Example:
    """Rows 0-4 are one layer and rows 1-5 another."""
    net = Net(
        lambda m, x: m.head(F.relu(F.linear(F.relu(F.linear(m.stem(x), m.a[:5])), m.a[1:]))),
        stem=nn.Linear(3, 5),
        a=w(6, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), AtLeast(0)


@barrier
def weight_norm() -> Example:
    """w = g v / |v|: v is frozen by its norm; g, a gain on the weight's rows, may carry the scale."""
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    return net, x2(6, 3), AtLeast(4)


@barrier
def spectral_norm() -> Example:
    """The weight is divided by its largest singular value, by power iteration on buffers."""
    net = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(3, 5)),
        nn.ReLU(),
        nn.Linear(5, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
    )
    return net, x2(6, 3), AtLeast(4)


@barrier
def orthogonal_weight() -> Example:
    net = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    return net, x2(6, 3), AtLeast(4)


@barrier
def weight_standardization() -> Example:
    """The convolution's weight is centred and divided by its deviation."""

    def standardized(weight: Tensor) -> Tensor:
        var, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
        return (weight - mean) * torch.rsqrt(var + 1e-5)

    net = Net(
        lambda m, x: m.head(F.relu(m.hidden(F.relu(F.conv2d(x, standardized(m.a)))))),
        a=w(4, 3, 3, 3),
        hidden=nn.Conv2d(4, 5, 1),
        head=nn.Conv2d(5, 2, 1),
    )
    return net, x2(2, 3, 5, 5), AtLeast(5)


@barrier
def weight_through_a_nonlinearity() -> Example:
    """Positive weights by softplus."""
    net = Net(lambda m, x: m.head(F.relu(F.linear(x, F.softplus(m.a)))), a=w(5, 3), head=nn.Linear(5, 2))
    return net, x2(6, 3), AtLeast(0)


@barrier
def weight_quantized_with_a_straight_through_estimator() -> Example:
    net = Net(
        lambda m, x: m.head(F.relu(F.linear(x, m.a + (torch.round(4 * m.a) / 4 - m.a).detach()))),
        a=w(5, 3),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), AtLeast(0)


@barrier
def low_rank_adapter() -> Example:
    """LoRA: W x + B A x. The two paths into the 5 units merge; the rank's 2 are free: 2 + 5."""
    net = Net(
        lambda m, x: m.head(F.relu(m.a(x) + 0.5 * m.up(m.down(x)))),
        a=nn.Linear(3, 5),
        down=nn.Linear(3, 2, bias=False),
        up=nn.Linear(2, 5, bias=False),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), 2 + 5


@barrier
def low_rank_weight() -> Example:
    """The weight is a product of two parameters, formed before it meets the input."""
    net = Net(
        lambda m, x: m.head(F.relu(F.linear(x, m.up @ m.down))),
        up=w(5, 2),
        down=w(2, 3),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), AtLeast(0)


@barrier
def weight_from_a_sum_of_parameters() -> Example:
    net = Net(lambda m, x: m.head(F.relu(F.linear(x, m.a + m.b))), a=w(5, 3), b=w(5, 3), head=nn.Linear(5, 2))
    return net, x2(6, 3), AtLeast(0)


@barrier
def hypernetwork() -> Example:
    """The weight of the middle layer is the output of another network."""

    def forward(m: Any, x: Tensor) -> Tensor:
        weight = m.make(x.mean(0)).view(5, 5)
        return m.head(F.relu(F.linear(m.stem(x), weight)))

    return (
        Net(forward, stem=nn.Linear(3, 5), make=nn.Linear(3, 25), head=nn.Linear(5, 2)),
        x2(6, 3),
        AtLeast(0),
    )


@barrier
def intermediate_activation_as_an_output() -> Example:
    """The first hidden layer is returned, so it cannot move; the second can: 4."""
    net = Net(
        lambda m, x: (m.c(F.relu(m.b(y := F.relu(m.a(x))))), y),
        a=nn.Linear(3, 5),
        b=nn.Linear(5, 4),
        c=nn.Linear(4, 2),
    )
    return net, x2(6, 3), 4


@barrier
def slice_of_an_activation_as_an_output() -> Example:
    """Two of the five units are returned: 3."""
    net = Net(lambda m, x: (m.b(y := F.relu(m.a(x))), y[:, :2]), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    return net, x2(6, 3), 3


@barrier
def statistic_of_an_activation_as_an_output() -> Example:
    net = Net(lambda m, x: (m.b(y := F.relu(m.a(x))), y.mean()), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    return net, x2(6, 3), AtLeast(0)


class MovingAverage(nn.Module):
    """A running mean of an activation in a buffer; the next layer reads it if asked to."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.stem, self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)
        self.read = read
        self.register_buffer("average", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x))
        self.average.mul_(0.9).add_(0.1 * y.mean(0))
        return self.head(F.relu(self.hidden(y - self.average if self.read else y)))


@barrier
def activation_written_to_a_buffer() -> Example:
    """The buffer belongs to the model's state: what is written to it cannot move. Hidden 4."""
    return MovingAverage(read=False), x2(6, 3), AtLeast(4)


@barrier
def activation_written_to_a_buffer_and_read() -> Example:
    return MovingAverage(read=True), x2(6, 3), AtLeast(4)


@barrier
def buffer_overwritten() -> Example:
    class Keep(MovingAverage):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.stem(x))
            self.average.copy_(y[0])
            return self.head(F.relu(self.hidden(y)))

    return Keep(read=False), x2(6, 3), AtLeast(4)


@barrier
def attention_with_activations_in_the_mask() -> Example:
    """The bias of the scores comes from a layer: it is frozen, so are its producers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        q, k, v = (heads(t, 2) for t in m.qkv(x).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias(x).transpose(1, 2)[:, :, None, :])
        return m.head(x + m.o(z.transpose(1, 2).flatten(2)))

    net = Net(
        forward,
        stem=nn.Linear(3, 8),
        qkv=nn.Linear(8, 24),
        bias=nn.Linear(8, 2),
        o=nn.Linear(8, 8),
        head=nn.Linear(8, 2),
    )
    return net, x2(2, 6, 3), 24


@barrier
def attention_with_scores_as_output() -> Example:
    """The scores themselves are returned, before the softmax: still q = -k."""

    def forward(m: Any, x: Tensor) -> Any:
        q, k, v = (heads(t, 2) for t in m.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1)
        return m.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), scores

    return Net(forward, qkv=nn.Linear(3, 24), o=nn.Linear(8, 2)), x2(2, 6, 3), 16


@barrier
def attention_where_keys_are_values() -> Example:
    """k also plays the part of v: -q = k = v, which goes on to the next layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k = (heads(t, 2) for t in m.qk(x).chunk(2, -1))
        z = F.scaled_dot_product_attention(q, k, k)
        return m.head(F.relu(m.o(z.transpose(1, 2).flatten(2))))

    return Net(forward, qk=nn.Linear(3, 16), o=nn.Linear(8, 4), head=nn.Linear(4, 2)), x2(2, 6, 3), AtLeast(4)


@barrier
def attention_without_query_projection() -> Example:
    """q = k: q + k = 2 s = 0."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, v = (heads(t, 2) for t in m.qv(x).chunk(2, -1))
        z = F.scaled_dot_product_attention(q, q, v)
        return m.head(F.relu(m.o(z.transpose(1, 2).flatten(2))))

    return Net(forward, qv=nn.Linear(3, 16), o=nn.Linear(8, 4), head=nn.Linear(4, 2)), x2(2, 6, 3), 8 + 4


@barrier
def gram_matrix_as_output() -> Example:
    """y y^T is returned: 2 s summed over units of different labels."""
    net = Net(lambda m, x: (m.head(y := F.relu(m.a(x))), y @ y.t()), a=nn.Linear(3, 5), head=nn.Linear(5, 2))
    return net, x2(6, 3), AtLeast(0)


@barrier
def cosine_similarity_head() -> Example:
    """Normalized features against normalized prototypes."""
    return around(lambda m, y: F.linear(F.normalize(y, dim=-1), F.normalize(m.prototypes, dim=-1)), prototypes=w(5, 5))


@barrier
def distance_to_prototypes() -> Example:
    return around(lambda m, y: torch.cdist(y, m.prototypes), prototypes=w(5, 5))


@barrier
def lstm() -> Example:
    """Gates freeze the state, also where it is read. Hidden 4."""
    net = Net(
        lambda m, x: m.head(F.relu(m.hidden(m.lstm(x)[0]))),
        lstm=nn.LSTM(3, 5, batch_first=True),
        hidden=nn.Linear(5, 4),
        head=nn.Linear(4, 2),
    )
    return net, x2(2, 6, 3), 4


@barrier
def fourier_transform() -> Example:
    """Mixing by an FFT is linear: unknown ops freeze, known ones merge; either way the function stays."""
    return around(lambda m, y: torch.fft.fft(y, dim=-1).real)


@barrier
def in_place_write_of_a_number_to_a_view() -> Example:
    """Column 1 becomes 0.5, which the later sum reads."""

    def function(m: Any, y: Tensor) -> Tensor:
        y = F.relu(y)
        y[:, 1] = 0.5
        return y + y.flip(-1)

    return around(function)


@barrier
def in_place_add_of_a_number_seen_through_a_view() -> Example:
    """The view was taken before the write and must see it."""

    def function(m: Any, y: Tensor) -> Tensor:
        v = y[:, :3]
        y += 0.7
        return torch.cat([v, y[:, 3:]], -1)

    return around(function)


@barrier
def in_place_add_through_a_view_seen_by_its_base() -> Example:
    def function(m: Any, y: Tensor) -> Tensor:
        y = F.relu(y)
        y.view(-1).add_(0.7)
        return y

    return around(function)


@barrier
def in_place_sigmoid_on_a_view() -> Example:
    """Half of the units are squashed in place."""

    def function(m: Any, y: Tensor) -> Tensor:
        y[:, :2].sigmoid_()
        return y

    return around(function)


@barrier
def in_place_copy_between_units() -> Example:
    """Units 3 and 4 overwrite units 0 and 1, and unit 2 follows from the sum."""

    def function(m: Any, y: Tensor) -> Tensor:
        y = F.relu(y)
        y[:, 0:2].copy_(y[:, 3:5])
        return y - y.mean(-1, keepdim=True)

    return around(function)


@barrier
def index_put_of_a_number() -> Example:
    def function(m: Any, y: Tensor) -> Tensor:
        y = F.relu(y)
        y[:, torch.tensor([0, 3])] = 0.25
        return y

    return around(function)


@barrier
def masked_assignment() -> Example:
    """y[y < 0] = 0.1."""

    def function(m: Any, y: Tensor) -> Tensor:
        y = y.clone()
        y[y < 0] = 0.1
        return y

    return around(function)


@barrier
def scatter_add_by_data() -> Example:
    """Units are summed into bins chosen by the input."""
    net = Net(
        lambda m, x, i: m.head(F.relu(m.hidden(torch.zeros(6, 5, dtype=x.dtype).scatter_add(1, i, m.stem(x))))),
        stem=nn.Linear(3, 5),
        hidden=nn.Linear(5, 4),
        head=nn.Linear(4, 2),
    )
    return net, (x2(6, 3), torch.randint(0, 5, (6, 5))), AtLeast(4)


@barrier
def embedding_row_of_an_activation() -> Example:
    """Token ids computed from an activation."""
    return around(lambda m, y: m.emb((y.sum(-1).abs() * 10).long().clamp(max=9)), emb=nn.Embedding(10, 5))


@barrier
def conv_where_a_channel_is_read_at_two_scales() -> Example:
    """Space-to-depth by hand with a sum over positions of different channels."""
    net = Net(
        lambda m, x: m.head(F.relu(m.hidden((y := m.stem(x)) + y.roll(1, dims=1)))),
        stem=nn.Conv2d(3, 4, 1),
        hidden=nn.Conv2d(4, 5, 1),
        head=nn.Conv2d(5, 2, 1),
    )
    return net, x2(2, 3, 4, 4), 1 + 5


@barrier
def local_response_norm() -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.ReLU(),
        nn.LocalResponseNorm(3, k=2.0),
        nn.Conv2d(4, 5, 1),
        nn.ReLU(),
        nn.Conv2d(5, 2, 1),
    )
    return net, x2(2, 3, 4, 4), AtLeast(5)


@barrier
def global_response_norm() -> Example:
    """ConvNeXt V2: the norm over space, divided by its mean over channels plus eps."""

    def function(m: Any, y: Tensor) -> Tensor:
        g = y.norm(p=2, dim=(2, 3), keepdim=True)
        return y + y * (g / (g.mean(1, keepdim=True) + 1e-3)) * m.gain

    net = Net(
        lambda m, x: m.head(F.relu(m.hidden(function(m, m.stem(x))))),
        stem=nn.Conv2d(3, 4, 1),
        gain=w(4, 1, 1),
        hidden=nn.Conv2d(4, 5, 1),
        head=nn.Conv2d(5, 2, 1),
    )
    return net, x2(2, 3, 4, 4), AtLeast(5)


@barrier
def loss_inside_the_model() -> Example:
    """The loss is the output: the hidden layer stays free behind it, 5."""
    net = Net(
        lambda m, x, t: F.cross_entropy(m.head(F.relu(m.stem(x))), t),
        stem=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, (x2(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])), 5


@barrier
def activation_decides_a_loss_weight() -> Example:
    """An auxiliary loss on the activations beside the logits."""
    net = Net(
        lambda m, x: (m.head(y := F.relu(m.stem(x))), (y > 0.5).float().mean()),
        stem=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    return net, x2(6, 3), AtLeast(0)
