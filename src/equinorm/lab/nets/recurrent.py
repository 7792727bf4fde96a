"""A recurrent network that reads an image row by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .chain import Chain
from .norms import Layers
from .registry import model

__all__ = ["RowLSTM"]


class RowLSTM(nn.Module):
    """An LSTM over the rows of an image; gives its last hidden state.

    A norm of activations acts on the pre-activation of all gates together, a_t = W_x x_t + W_h h_(t-1) (arpit2019,
    section 6, after Ba et al. 2016): statistics of one example at one time, when it is layer norm. A method on weights
    acts on W_x and W_h. The forget gates start at 1.
    """

    def __init__(self, make: Layers, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input, self.from_state = make.linear(inputs, 4 * width), make.linear(width, 4 * width)
        self.norm = make.norm(4 * width, ndim=2)
        self.bias = nn.Parameter(torch.zeros(4 * width))
        with torch.no_grad():
            self.bias[width : 2 * width] = 1.0

    def forward(self, images: Tensor) -> Tensor:
        rows = images.permute(2, 0, 1, 3).flatten(2)  # (rows, batch, channels x columns)
        state = cell = torch.zeros(rows.shape[1], self.width, dtype=rows.dtype, device=rows.device)
        with parametrize.cached():  # weights are made once, not for every row
            for row in self.from_input(rows):
                gates = self.norm(row + self.from_state(state)) + self.bias
                let_in, keep, let_out, new = gates.chunk(4, 1)
                cell = keep.sigmoid() * cell + let_in.sigmoid() * new.tanh()
                state = let_out.sigmoid() * cell.tanh()
        return state


@model("row_lstm", "an LSTM that reads images row by row", toy={"width": 8})
def row_lstm(make: Layers, in_shape: tuple[int, int, int], classes: int, *, width: int = 128) -> Chain:
    """One layer of LSTM and a classifier. Its maps have no biases of their own: build it with `bias=False`."""
    channels, _, columns = in_shape
    return Chain([RowLSTM(make, channels * columns, width)], make.head(width, classes, pool=False))
