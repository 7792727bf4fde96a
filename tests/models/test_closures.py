"""The closure of a step is found and replaced where it is, by position or by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equinorm.models.closures import closure_of, with_closure


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_calls_the_closure_that_takes_the_place_of_another(by_name: bool) -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    calls: list[str] = []

    def closure() -> float:
        calls.append("theirs")
        return 1.0

    def replace(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = closure_of(args, kwargs)
        assert found is closure

        def adapted() -> float:
            calls.append("ours")
            return 2 * found()

        return with_closure(args, kwargs, adapted)

    optimizer.register_step_pre_hook(replace)
    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert calls == ["ours", "theirs"]
    assert loss == 2.0


def test_without_a_closure_there_is_none() -> None:
    assert closure_of((object(),), {}) is None
    assert closure_of((object(),), {"closure": None}) is None
    assert closure_of((object(), None), {}) is None
    assert with_closure((1, None, 2), {"a": 3}, print) == ((1, print, 2), {"a": 3})
