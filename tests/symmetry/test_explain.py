"""What an explanation can be asked."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import equinorm


@pytest.fixture(scope="module")
def explanation() -> equinorm.symmetry.Explanation:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return equinorm.trace(model, torch.zeros(1, 3)).explain()


def test_a_slice_is_an_explanation_of_these_rows(explanation: equinorm.symmetry.Explanation) -> None:
    assert explanation[:2].rows == explanation.rows[:2]
    assert explanation[1] is explanation.rows[1]
    assert str(explanation[:2]).count("\n") < str(explanation).count("\n")
    assert len(explanation) == len(list(explanation)) == len(explanation.rows)


def test_rows_are_found_by_name_and_pattern(explanation: equinorm.symmetry.Explanation) -> None:
    assert {row.parameter for row in explanation["2.*"]} == {"2.weight", "2.bias"}
    with pytest.raises(KeyError, match=r"2\.wieght.*did you mean 2\.weight"):
        explanation["2.wieght"]


def test_a_summary_has_no_rows() -> None:
    symmetry = equinorm.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    assert str(symmetry.explain(summary=True)) == symmetry.explain().summary
    assert "<table>" in symmetry.explain()._repr_html_()
    assert "4 free scales" in repr(symmetry)


def test_symmetries_can_be_copied_and_pickled() -> None:
    symmetry = equinorm.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    for twin in (copy.deepcopy(symmetry), pickle.loads(pickle.dumps(symmetry))):
        assert str(twin.explain()) == str(symmetry.explain())
