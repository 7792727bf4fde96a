"""PEFT: adapters trained with ENorm, saved alone and loaded on the untouched base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_transformers import llama, sentences, train

import equinorm
from equinorm.integrations.transformers import ENormCallback

TOKENS = torch.arange(12).view(2, 6)


def adapted(dora: bool) -> Any:
    torch.manual_seed(7)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], use_dora=dora)
    return get_peft_model(llama(), config)


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.shows("PEFT", "LoRA and DoRA with ENorm, saved alone, loaded on the untouched base, merged", "peft")
def test_an_adapter_saved_alone(dora: bool, tmp_path: Path) -> None:
    model = adapted(dora)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    enorm = equinorm.ENorm(model, optimizer, {"input_ids": TOKENS})
    with enorm.attach():
        for _ in range(4):
            optimizer.zero_grad()
            model.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
    for name, value in base.items():
        assert model.get_parameter(name).equal(value), name
    expected = outputs(model)
    assert not torch.allclose(expected, outputs(llama()), atol=1e-3)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(outputs(PeftModel.from_pretrained(llama(), tmp_path)), expected)
    torch.testing.assert_close(outputs(model.merge_and_unload()), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.shows("PEFT", "LoRA in transformers' Trainer with ENormCallback, resumed bitwise", "peft", "transformers")
def test_an_adapter_in_a_trainer(tmp_path: Path) -> None:
    whole, resumed = adapted(False), adapted(False)
    train(whole, tmp_path, ENormCallback(c=1.2), sentences(None))
    train(resumed, tmp_path, ENormCallback(c=1.2), sentences(None), resume=str(tmp_path / "checkpoint-4"))
    for name, expected in whole.state_dict().items():
        assert resumed.state_dict()[name].equal(expected), name
