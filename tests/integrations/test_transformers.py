"""transformers: its Trainer with ENorm, stopped and resumed; converted models saved its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
)
from transformers import TrainingArguments as Arguments

import equinorm
from equinorm.integrations.transformers import ENormCallback


def bert(dropout: float = 0.1) -> BertForSequenceClassification:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_act="relu",
        hidden_dropout_prob=dropout,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
        )
    )


def sentences(labels: int | None) -> list[dict[str, Any]]:
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(40, (32, 6), generator=made)
    answers = tokens if labels is None else torch.randint(labels, (32,), generator=made)
    return [{"input_ids": t, "labels": a} for t, a in zip(tokens, answers, strict=True)]


def arguments(folder: Path, **options: Any) -> Arguments:
    given = {"max_steps": 8, "save_steps": 4, "logging_steps": 1, **options}
    return Arguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=5,
        **given,
    )


def train(model: nn.Module, folder: Path, callback: Any, data: Any, resume: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(model, arguments(folder, **options), train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for name, expected in a.state_dict().items():
        assert torch.equal(b.state_dict()[name], expected), name


@pytest.mark.shows("transformers", "ENormCallback: BERT with dropout, resumed bitwise", "transformers", "accelerate")
def test_resumes_bitwise(tmp_path: Path) -> None:
    whole, resumed = bert(), bert()
    train(whole, tmp_path, ENormCallback(c=1.2), sentences(3))
    assert (tmp_path / "checkpoint-4" / "enorm.pt").is_file()
    train(resumed, tmp_path, ENormCallback(c=1.2), sentences(3), resume=str(tmp_path / "checkpoint-4"))
    assert_same(whole, resumed)


@pytest.mark.shows(
    "transformers", "ENormCallback: Llama, accumulated gradients, resumed bitwise", "transformers", "accelerate"
)
def test_a_language_model_resumes_bitwise(tmp_path: Path) -> None:
    whole, resumed = llama(), llama()
    options = {"gradient_accumulation_steps": 2, "optim": "sgd"}
    train(whole, tmp_path, ENormCallback(c=1.2), sentences(None), **options)
    trainer = train(
        resumed, tmp_path, ENormCallback(c=1.2), sentences(None), resume=str(tmp_path / "checkpoint-4"), **options
    )
    assert_same(whole, resumed)
    assert trainer.state.global_step == 8


@pytest.mark.parametrize("option", ["bf16", "gradient_checkpointing", "torch_compile"])
@pytest.mark.shows(
    "transformers",
    "ENormCallback with bf16, gradient_checkpointing and torch_compile, resumed bitwise",
    "transformers",
    "accelerate",
)
def test_options_of_the_trainer(option: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    whole, resumed = llama(), llama()
    train(whole, tmp_path, ENormCallback(c=1.2), sentences(None), **{option: True})
    given = {"resume": str(tmp_path / "checkpoint-4"), option: True}
    train(resumed, tmp_path, ENormCallback(c=1.2), sentences(None), **given)
    assert_same(whole, resumed)


OPTIMIZERS = [
    "adafactor",
    "adamw_8bit",
    "ademamix_8bit",
    "lion_8bit",
    "lion_32bit",
    "rmsprop_bnb_8bit",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
]


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.shows(
    "transformers",
    "ENormCallback with Adafactor, 8-bit Adam, Lion (8 and 32 bits) and schedule-free, resumed bitwise",
    "transformers",
    "bitsandbytes",
    "schedulefree",
)
def test_optimizers_of_the_trainer(optim: str, tmp_path: Path) -> None:
    whole, resumed = bert(), bert()
    options = {"optim": optim, "lr_scheduler_type": "constant"}
    train(whole, tmp_path, ENormCallback(c=1.2), sentences(3), **options)
    train(resumed, tmp_path, ENormCallback(c=1.2), sentences(3), resume=str(tmp_path / "checkpoint-4"), **options)
    assert_same(whole, resumed)


def test_a_resume_without_the_file_is_refused(tmp_path: Path) -> None:
    train(bert(), tmp_path, ENormCallback(c=1.2), sentences(3))
    (tmp_path / "checkpoint-4" / "enorm.pt").unlink()
    with pytest.raises(ValueError, match=r"resumed at step 4, but there is no enorm\.pt"):
        train(bert(), tmp_path, ENormCallback(c=1.2), sentences(3), resume=str(tmp_path / "checkpoint-4"))
    anew = ENormCallback(c=1.2, resume_from=False)
    whole, other = bert(), bert()
    train(whole, tmp_path / "whole", ENormCallback(c=1.2), sentences(3))
    train(other, tmp_path, anew, sentences(3), resume=str(tmp_path / "checkpoint-4"))
    assert not torch.equal(  # which the test for bitwise resumes would see
        whole.bert.encoder.layer[0].intermediate.dense.bias, other.bert.encoder.layer[0].intermediate.dense.bias
    )


def test_the_file_of_another_training_is_refused(tmp_path: Path) -> None:
    train(bert(), tmp_path / "a", ENormCallback(c=1.2), sentences(3))
    other = bert()
    with torch.no_grad():
        other.classifier.weight.mul_(2.0)
        other.bert.encoder.layer[0].intermediate.dense.weight.mul_(2.0)
    train(other, tmp_path / "b", ENormCallback(c=1.2), sentences(3))
    with pytest.raises(ValueError, match="belongs to other weights"):
        train(bert(), tmp_path / "b", ENormCallback(c=1.2), sentences(3), resume=str(tmp_path / "a" / "checkpoint-4"))
    given = ENormCallback(c=1.2, resume_from=tmp_path / "a" / "checkpoint-4")
    train(bert(), tmp_path / "b", given, sentences(3), resume=str(tmp_path / "a" / "checkpoint-4"))


@pytest.mark.shows("transformers", "imbalance in the training logs", "transformers")
def test_what_is_logged(tmp_path: Path) -> None:
    trainer = train(bert(), tmp_path, ENormCallback(c=1.0), sentences(3))
    logged = [entry["enorm_imbalance"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 8
    assert all(0 <= value < 1 for value in logged)
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert saved["log_history"][0]["enorm_imbalance"] == logged[0]


def test_nothing_stays_behind(tmp_path: Path) -> None:
    callback = ENormCallback(c=1.2)
    trainer = train(bert(), tmp_path, callback, sentences(3))
    assert callback.enorm is None
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks
    assert not trainer.model._forward_pre_hooks


# -- saved its way -----------------------------------------------------------------------------------------------------


def resnet() -> ResNetForImageClassification:
    torch.manual_seed(4)
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3, num_channels=3
    )
    return ResNetForImageClassification(config)


IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: nn.Module, inputs: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(**inputs).logits
    return found


@pytest.mark.parametrize("method", ["equinorm", "msr", "weightnorm", "groupnorm"])
@pytest.mark.shows(
    "transformers", "save_pretrained: a converted model is refused, a folded one loads again", "transformers"
)
def test_a_converted_model_is_folded_first(method: str, tmp_path: Path) -> None:
    pixels = {"pixel_values": IMAGES}
    model, _ = equinorm.convert(resnet(), method, pixels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(**pixels, labels=torch.arange(4) % 3).loss.backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"load this ResNetForImageClassification with other outputs.*Fold first"):
        model.save_pretrained(tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
    if method == "groupnorm":  # which depends on the input, so that it cannot be folded
        return
    plain, _ = equinorm.fold(model.eval(), pixels)
    plain.save_pretrained(tmp_path / "folded")
    loaded = ResNetForImageClassification.from_pretrained(tmp_path / "folded")
    torch.testing.assert_close(logits(loaded, pixels), logits(model, pixels), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.shows(
    "transformers", "save_pretrained: a balanced model loads again with the same outputs", "transformers"
)
def test_a_balanced_model_loads_again(make: Any, tmp_path: Path) -> None:
    model, tokens = make().eval(), {"input_ids": torch.arange(12).view(2, 6)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("intermediate.dense.weight", "up_proj.weight")):
                p.mul_(9.0)
    expected = logits(model, tokens)
    assert equinorm.balance_(model, tokens)
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-3, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert logits(type(model).from_pretrained(tmp_path), tokens).equal(logits(model, tokens))
