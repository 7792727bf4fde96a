"""Random architectures: a plan is a list of steps, a step a kind and two numbers that say the rest.

A plan prints as plain data, so a failing one can be pasted into a test, and hypothesis shrinks it by dropping
steps and lowering numbers. Whatever the numbers are, the network is a valid one: every choice is taken modulo
the choices there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from support.nets import Net, heads, randomize_constants

Step = tuple[str, int, int]
Function = Callable[[Tensor], Tensor]

SIZE = 4  # images are SIZE x SIZE throughout, so that any two tensors can be added, joined or compared
WIDTHS = (2, 4, 6)

# Functions of a (batch, channels, height, width) tensor that commute with positive scales of channels.
HOMOGENEOUS: dict[str, Function] = {
    "relu": F.relu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.1),
    "abs": torch.abs,
    "relu_squared": lambda y: F.relu(y) ** 2,
    "square_by_product": lambda y: y * y,
    "clamp": lambda y: y.clamp(min=0),
    "where": lambda y: torch.where(y > 0, y, 0.3 * y),
    "masked_fill": lambda y: y.masked_fill(y < 0, 0.0),
    "negated": lambda y: -1.5 * y,
    "max_pool": lambda y: F.max_pool2d(y, 3, 1, 1),
    "avg_pool": lambda y: F.avg_pool2d(y, 3, 1, 1),
    "pool_and_upsample": lambda y: F.interpolate(F.max_pool2d(y, 2), scale_factor=2, mode="bilinear"),
    "global_pool": lambda y: y.mean((2, 3), keepdim=True).expand_as(y),
    "roll_space": lambda y: y.roll(1, -1),
    "crop_and_pad": lambda y: F.pad(y[..., 1:, :-1], (0, 1, 1, 0)),
    "reflect": lambda y: F.pad(y[..., 1:-1], (1, 1, 0, 0), mode="reflect"),
    "dropout": lambda y: F.dropout(y, 0.3, training=False),
    "relu_in_place": lambda y: y.clone().relu_(),
    "half_relu_in_place": lambda y: _half_in_place(y),
    "layout": lambda y: (
        y.permute(0, 2, 3, 1).reshape(-1, y.shape[1]).relu().view(-1, SIZE, SIZE, y.shape[1]).movedim(-1, 1)
    ),
}

# Functions that mix or compare channels: labels merge, or freeze.
MIXING: dict[str, Function] = {
    "flip": lambda y: y + y.flip(1),
    "shuffle": lambda y: y.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
    "rotate_channels": lambda y: y[:, [*range(1, y.shape[1]), 0]],
    "halves_added": lambda y: torch.cat([y.chunk(2, 1)[0] + y.chunk(2, 1)[1], y.chunk(2, 1)[0]], 1),
    "channel_mean": lambda y: y - y.mean(1, keepdim=True),
    "channel_max": lambda y: F.relu(y) - y.amax(1, keepdim=True),
    "glu": lambda y: torch.cat([F.glu(y, 1)] * 2, 1),
    "half_gate": lambda y: torch.cat([y.chunk(2, 1)[0] * torch.sigmoid(y.chunk(2, 1)[1]), y.chunk(2, 1)[0]], 1),
    "crelu": lambda y: torch.cat([F.relu(y), F.relu(-y)], 1)[:, : y.shape[1]],
    "zeros_joined": lambda y: torch.cat([y[:, 1:], torch.zeros_like(y[:, :1])], 1),
    "zero_written": lambda y: _write(y, 0.0),
}

# Functions that do not commute with scales: everything they touch has to stay.
BARRIERS: dict[str, Function] = {
    "plus_one": lambda y: y + 1,
    "one_minus": lambda y: 1 - y,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu6": lambda y: F.relu6(5 * y),
    "softsign": lambda y: y / (1 + y.abs()),
    "clamp_at_number": lambda y: y.clamp(-0.4, 0.6),
    "threshold": lambda y: F.threshold(y, 0.1, 0.0),
    "floor_division": lambda y: torch.div(y, 0.5, rounding_mode="floor"),
    "rounded": lambda y: torch.round(y * 4),
    "integers": lambda y: (3 * y).to(torch.int32).to(y.dtype),
    "exponential": lambda y: 2 ** torch.tanh(y),
    "own_power": lambda y: (1 + y.abs()) ** torch.tanh(y),
    "greater_than_number": lambda y: (y > 0.1).to(y.dtype),
    "masked_fill_number": lambda y: y.masked_fill(y < 0, 0.2),
    "channel_softmax": lambda y: y.softmax(1),
    "channel_sort": lambda y: y.sort(1).values,
    "channel_cumsum": lambda y: y.cumsum(1),
    "channel_argmax": lambda y: F.one_hot(y.argmax(1), y.shape[1]).movedim(-1, 1).to(y.dtype),
    "normalized": lambda y: F.normalize(y, dim=1),
    "padded_with_ones": lambda y: F.pad(y[..., 1:], (1, 0), value=1.0),
    "one_written": lambda y: _write(y, 1.0),
    "square_beside": lambda y: y + 0.3 * y * y,
    "log": lambda y: torch.log1p(y.abs()),
    "added_in_place": lambda y: y.clone().add_(0.3),
    "added_to_view": lambda y: _add_to_view(y),
    "compared": lambda y: torch.where(y > y.flip(1), y, 0.0),
    "ratio": lambda y: y / (y.flip(1).abs() + 0.5),
}


def _half_in_place(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, : y.shape[1] // 2].relu_()
    return y


def _write(y: Tensor, number: float) -> Tensor:
    y = y.clone()
    y[:, :1] = number
    return y


def _add_to_view(y: Tensor) -> Tensor:
    y = y.clone()
    y.flatten(2)[:, :1].add_(0.3)
    return y


class Architecture(nn.Module):
    """The network of a plan. A step reads the present tensor, and may read earlier ones of its width."""

    def __init__(self, plan: list[Step], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = nn.Conv2d(3, 4, 3, padding=1)
            self.steps = nn.ModuleList()
            self.shared = nn.ModuleDict()
            widths = [4]
            for kind, a, b in plan:
                step, width = self._step(kind, a, b, widths)
                self.steps.append(step)
                widths.append(width)
            self.head = nn.Linear(widths[-1] * SIZE * SIZE, 3)
            randomize_constants(self)

    def forward(self, x: Tensor) -> Tensor:
        history = [self.stem(x)]
        for step in self.steps:
            y = step(history)
            # keeps products and powers from running away; a number does not change what is free
            history.append(y * 0.5)
        return self.head(history[-1].flatten(1))

    def _step(self, kind: str, a: int, b: int, widths: list[int]) -> tuple[nn.Module, int]:
        n = widths[-1]
        out = WIDTHS[a % len(WIDTHS)]
        groups = 2 if b % 2 else 1
        earlier = [k for k, width in enumerate(widths) if width == n]
        k = earlier[a % len(earlier)]
        if kind in HOMOGENEOUS | MIXING | BARRIERS:
            function = (HOMOGENEOUS | MIXING | BARRIERS)[kind]
            return Net(lambda m, h: function(h[-1])), n
        if kind == "conv":
            conv = nn.Conv2d(n, out, 3, padding=1, groups=groups, bias=b % 3 > 0)
            return Net(lambda m, h: m.conv(h[-1]), conv=conv), out
        if kind == "dilated_conv":
            conv = nn.Conv2d(n, out, 3, padding=2, dilation=2, groups=groups)
            return Net(lambda m, h: m.conv(h[-1]), conv=conv), out
        if kind == "depthwise_conv":
            conv = nn.Conv2d(n, n, 3, padding=1, groups=n, padding_mode=("zeros", "circular")[b % 2])
            return Net(lambda m, h: m.conv(h[-1]), conv=conv), n
        if kind == "transposed_conv":
            conv = nn.ConvTranspose2d(n, out, 3, padding=1, groups=groups)
            return Net(lambda m, h: m.conv(h[-1]), conv=conv), out
        if kind == "linear":
            return Net(lambda m, h: m.lin(h[-1].movedim(1, -1)).movedim(-1, 1), lin=nn.Linear(n, out)), out
        if kind == "einsum":
            weight = nn.Parameter(torch.randn(out, n) / n**0.5)
            return Net(lambda m, h: torch.einsum("oi,bihw->bohw", m.weight, h[-1]), weight=weight), out
        if kind == "prelu":
            return Net(lambda m, h: m.act(h[-1]), act=nn.PReLU(n if a % 2 else 1)), n
        if kind == "norm":
            norms: list[Callable[[], nn.Module]] = [
                lambda: nn.BatchNorm2d(n),
                lambda: nn.GroupNorm(2, n),
                lambda: nn.InstanceNorm2d(n, affine=True),
                lambda: nn.BatchNorm2d(n, affine=False),
            ]
            return Net(lambda m, h: m.norm(h[-1]), norm=norms[a % 4]()), n
        if kind == "layer_norm":
            norm = nn.LayerNorm(n) if a % 2 else nn.RMSNorm(n)
            return Net(lambda m, h: m.norm(h[-1].movedim(1, -1)).movedim(-1, 1), norm=norm), n
        if kind == "gain":
            gain = nn.Parameter(torch.randn(n, 1, 1))
            return Net(lambda m, h: h[-1] * m.gain, gain=gain), n
        if kind == "bias":
            return Net(lambda m, h: h[-1] + m.bias, bias=nn.Parameter(torch.randn(n, 1, 1))), n
        if kind == "block":
            wide = nn.Conv2d(n, out, 3, padding=1), nn.Conv2d(out, n, 1)
            return Net(lambda m, h: h[-1] + m.b(F.relu(m.a(h[-1]))), a=wide[0], b=wide[1]), n
        if kind == "block_in_place":
            return Net(_block_in_place, a=nn.Conv2d(n, out, 1), b=nn.Conv2d(out, n, 1)), n
        if kind == "skip":
            return Net(lambda m, h: h[-1] + h[k]), n
        if kind == "maximum":
            return Net(lambda m, h: torch.maximum(h[-1], h[k])), n
        if kind == "lerp":
            return Net(lambda m, h: torch.lerp(h[-1], h[k], 0.3)), n
        if kind == "product":
            return Net(lambda m, h: h[k] * h[-1]), n
        if kind == "concat":
            j = a % len(widths)
            conv = nn.Conv2d(n + widths[j], out, 1)
            return Net(lambda m, h: m.conv(torch.cat([h[-1], h[j]], 1)), conv=conv), out
        if kind == "gate":
            gate = nn.Conv2d(n, n, 1)
            return Net(lambda m, h: h[-1] * torch.sigmoid(m.gate(h[k])), gate=gate), n
        if kind == "squeeze_excite":
            parts = {"down": nn.Linear(n, 2), "up": nn.Linear(2, n)}
            return Net(_squeeze_excite, **parts), n
        if kind == "shared_conv":
            # one layer per width, whoever asks for it
            if str(n) not in self.shared:
                self.shared[str(n)] = nn.Conv2d(n, n, 1)
            conv = self.shared[str(n)]
            return Net(lambda m, h: F.relu(m.conv(h[-1])), conv=conv), n
        if kind == "tied_transpose":
            weight = nn.Parameter(torch.randn(out, n) / n**0.5)
            return Net(_tied_transpose, weight=weight), n
        if kind == "attention":
            return Net(_attention, qkv=nn.Linear(n, 3 * n), o=nn.Linear(n, n), fused=bool(a % 2)), n
        raise ValueError(kind)


def _block_in_place(m: Any, history: list[Tensor]) -> Tensor:
    z = m.b(F.relu(m.a(history[-1]), inplace=True))
    z += history[-1]
    return z.relu_()


def _squeeze_excite(m: Any, history: list[Tensor]) -> Tensor:
    y = history[-1]
    return y * torch.sigmoid(m.up(F.relu(m.down(y.mean((2, 3))))))[:, :, None, None]


def _tied_transpose(m: Any, history: list[Tensor]) -> Tensor:
    y = history[-1].movedim(1, -1)
    return (F.relu(y @ m.weight.t()) @ m.weight).movedim(-1, 1)


def _attention(m: Any, history: list[Tensor]) -> Tensor:
    tokens = history[-1].flatten(2).transpose(1, 2)
    q, k, v = (heads(t, 2) for t in m.qkv(tokens).chunk(3, -1))
    z = F.scaled_dot_product_attention(q, k, v) if m.fused else (q @ k.mT * 0.7).softmax(-1) @ v
    return (tokens + m.o(z.transpose(1, 2).flatten(2))).transpose(1, 2).unflatten(-1, (SIZE, SIZE))


LAYERS = (
    *("conv", "dilated_conv", "depthwise_conv", "transposed_conv", "linear", "einsum", "shared_conv"),
    *("prelu", "norm", "layer_norm", "gain", "bias", "tied_transpose", "attention"),
    *("block", "block_in_place", "skip", "maximum", "lerp", "product", "concat", "gate", "squeeze_excite"),
)


def plans(*kinds: str, max_size: int = 8) -> st.SearchStrategy[list[Step]]:
    """Plans made of these kinds."""
    step = st.tuples(st.sampled_from(kinds), st.integers(0, 11), st.integers(0, 11))
    return st.lists(step, min_size=1, max_size=max_size)


homogeneous_plans = plans(*LAYERS, *HOMOGENEOUS)
mixed_plans = plans(*LAYERS, *HOMOGENEOUS, *MIXING, *BARRIERS)


def example_input(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
