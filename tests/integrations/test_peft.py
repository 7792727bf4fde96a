"""PEFT: adapters trained with ENorm, saved alone and loaded on the untouched base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, VeraConfig, get_peft_model
from test_transformers import llama, sentences, train

import equinorm
from equinorm.integrations.transformers import ENormCallback

TOKENS = torch.arange(12).view(2, 6)


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
ADAPTERS = {
    "LoRA": partial(LoraConfig, **LORA),
    "DoRA": partial(LoraConfig, **LORA, use_dora=True),
    "LoRA and all biases": partial(LoraConfig, **LORA, bias="all"),
    "LoRA and the head": partial(LoraConfig, **LORA, modules_to_save=["lm_head"]),
    "AdaLoRA": partial(AdaLoraConfig, **LORA, total_step=10),
    "VeRA": partial(VeraConfig, r=4, target_modules=["q_proj", "o_proj"]),
}


def adapted(kind: str) -> Any:
    torch.manual_seed(7)
    return get_peft_model(llama(), ADAPTERS[kind]())


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.shows("PEFT", "LoRA, DoRA and kin with ENorm, saved alone, loaded on the untouched base, merged", "peft")
def test_an_adapter_saved_alone(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    enorm = equinorm.ENorm(model, optimizer, {"input_ids": TOKENS})
    with enorm.attach():
        for _ in range(4):
            optimizer.zero_grad()
            model.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
    for name, value in base.items():
        assert model.get_parameter(name).equal(value), name
    assert all(not model.get_parameter(name).equal(value) for name, value in before.items())
    expected = outputs(model)
    assert not torch.allclose(expected, outputs(llama()), rtol=0.0, atol=1e-3)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(outputs(PeftModel.from_pretrained(llama(), tmp_path)), expected)
    torch.testing.assert_close(outputs(model.merge_and_unload()), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
@pytest.mark.shows("PEFT", "balance_ of an adapter: the base stays, what is saved alone loads on it", "peft")
def test_a_balanced_adapter_saved_alone(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # which begins at zero
                p.normal_()
    expected = outputs(model)
    report = equinorm.balance_(model, {"input_ids": TOKENS})
    assert report.frozen == "keep"
    assert "frozen parameters stayed (model." in str(report)
    assert report.norm_after < 0.9 * report.norm_before
    for name, value in base.items():
        assert model.get_parameter(name).equal(value), name
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    torch.testing.assert_close(outputs(loaded), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.shows("PEFT", "LoRA in transformers' Trainer with ENormCallback, resumed bitwise", "peft", "transformers")
def test_an_adapter_in_a_trainer(tmp_path: Path) -> None:
    whole, resumed = adapted("LoRA"), adapted("LoRA")
    train(whole, tmp_path, ENormCallback(c=1.2), sentences(None))
    train(resumed, tmp_path, ENormCallback(c=1.2), sentences(None), resume=str(tmp_path / "checkpoint-4"))
    for name, expected in whole.state_dict().items():
        assert resumed.state_dict()[name].equal(expected), name
