"""Recurrent layers. Gates are frozen; what goes in is free, and so are the states of ReLU networks and projections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..interpreter import Arguments, Interpreter
from ..values import Value, activation
from .elementwise import joined
from .linear import layer
from .registry import rule
from .shape import joined_along


@rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(t: Interpreter, a: Arguments) -> Any:
    """A stack of layers, each in one or both directions, as `nn.LSTM` and its kin call it.

    Time and batch are axes like any others: a state has one scale throughout, so that of its start has it too.
    """
    a.everything()
    x: Value = a["input"]
    start: Value = a["hx"][0] if t.op_name == "lstm" else a["hx"]
    if t.op_name == "lstm":
        t.freeze(a["hx"][1])
    directions = 2 if a["bidirectional"] else 1
    weights = list(_cells(a["params"], a["num_layers"] * directions, a["has_biases"]))
    lead = t.result_shape(0)[:-1]
    states: list[Tensor] = []
    for number, cell in enumerate(weights):
        states.append(_state(t, x, start.mapped(lambda s, i=number: s[i], start.shape[1:]), *cell))
        if (number + 1) % directions == 0:
            made = [state.expand(*lead, -1) for state in states[-directions:]]
            x = activation(joined_along(made, len(lead), [*lead, sum(m.shape[-1] for m in made)]))
    _, *last = t.frozen_result()
    if start.shape == t.result_shape(1):
        last[0] = activation(torch.stack(states).unsqueeze(1).expand(start.shape))
    else:  # some versions of torch record an axis too many for the states of an LSTM: what reads them is anyone's guess
        t.freeze(*map(activation, states))
    return x, *last


def _cells(params: Sequence[Value], count: int, biased: bool) -> Iterator[tuple[Value, Value, Any, Any, Any]]:
    """The parameters of each cell: weights of input and state, their biases, and an LSTM's projection."""
    each = len(params) // count
    for i in range(0, len(params), each):
        cell = list(params[i : i + each])
        biases = cell[2:4] if biased else [None, None]
        yield cell[0], cell[1], biases[0], biases[1], cell[-1] if each % 2 else None


def _state(t: Interpreter, x: Value, start: Value, *params: Any) -> Tensor:
    """One label for each unit of the state of a cell."""
    of_input, of_state, input_bias, state_bias, projection = params
    before = layer(t, x, of_input, input_bias)
    if t.op_name == "rnn_relu":
        state = _per_unit(before)
    elif projection is not None:
        state = _per_unit(layer(t, activation(t.frozen_labels([1, projection.shape[1]])), projection, None))
    else:
        state = t.frozen_labels([of_state.shape[1]])
    t.merge(t.labels(start), state)
    after = layer(t, activation(state.unsqueeze(0)), of_state, state_bias)
    if t.op_name == "rnn_relu":
        t.merge(_per_unit(after), state)
    else:
        t.freeze(before, after)
    return state


def _per_unit(value: Value) -> Tensor:
    """The labels along the last axis, of a layer's output: they are the same along the others."""
    return value.labels[(0,) * (value.ndim - 1)]


@rule("lstm_cell.default", "gru_cell.default", "rnn_tanh_cell.default", "rnn_relu_cell.default")
def cell(t: Interpreter, a: Arguments) -> Any:
    """A single step. That states have one scale through time follows from the weights, which all steps share."""
    a.everything()
    state: Value = a["hx"][0] if t.op_name == "lstm_cell" else a["hx"]
    before, after = layer(t, a["input"], a["w_ih"], a["b_ih"]), layer(t, state, a["w_hh"], a["b_hh"])
    if t.op_name == "rnn_relu_cell":
        return joined(t, before, after)
    t.freeze(before, after, *(a["hx"] if t.op_name == "lstm_cell" else [state]))
    return t.frozen_result()
