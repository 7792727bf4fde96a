"""A decoder in the shape of Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped queries, SwiGLU.

The weights are random and the text is too: only its speed is of interest here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Llama"]


class Llama(nn.Module):
    """`Llama()` has 1.1 billion parameters. `norm` makes the norms: nn.RMSNorm, nn.LayerNorm, or nn.Identity."""

    def __init__(
        self,
        layers: int = 22,
        width: int = 2048,
        heads: int = 32,
        groups: int = 4,
        hidden: int = 5632,
        vocabulary: int = 32000,
        norm: type[nn.Module] = nn.RMSNorm,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, groups, hidden, norm) for _ in range(layers))
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        turn = rotation(tokens.shape[1], self.blocks[0].size, x.device)  # type: ignore[arg-type]
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            f(y).unflatten(-1, (n, self.size)).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        repeat = self.heads // self.groups
        k, v = (t.repeat_interleave(repeat, 1) for t in (rotated(k, turn), v))
        y = F.scaled_dot_product_attention(rotated(q, turn), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotation(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(length, device=device)[:, None] * rates.repeat(2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t.to(x.dtype) for t in turn)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
