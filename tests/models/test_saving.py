"""transformers models that were changed: `save_pretrained` writes what loads again, or refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedModel, ResNetConfig, ResNetForImageClassification

import equinorm

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = {"input_ids": torch.arange(12).view(2, 6)}


def resnet() -> Any:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=3)
    model = ResNetForImageClassification(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0.0, 0.3)
                module.running_var.uniform_(0.5, 2.0)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0.0, 0.3)
    return model.eval()


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(**sizes, intermediate_size=24, max_position_embeddings=16)).eval()


@torch.no_grad()
def outputs(model: nn.Module, inputs: Any) -> Tensor:
    found: Any = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    tensor: Tensor = found[0]
    return tensor


def assert_loads_again(model: Any, inputs: Any, folder: Path) -> None:
    expected = outputs(model.eval(), inputs)
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    torch.testing.assert_close(outputs(loaded, inputs), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs(model, inputs), expected)  # nothing is changed by saving


@pytest.mark.parametrize("method", ["equinorm", "weightnorm", "groupnorm", "mean_only_batchnorm"])
def test_a_converted_model_is_refused(method: str, tmp_path: Path) -> None:
    model, _ = equinorm.convert(resnet(), method, IMAGES)
    with pytest.raises(ValueError, match=r"(?s)with other outputs.*Fold first"):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("method", ["equinorm", "weightnorm", "msr"])
def test_a_folded_model_loads_again(method: str, tmp_path: Path) -> None:
    model, _ = equinorm.convert(resnet(), method, IMAGES)
    model.train()
    for _ in range(3):
        outputs(model, IMAGES)
    plain, _ = equinorm.fold(model.eval(), IMAGES)
    assert_loads_again(plain, IMAGES, tmp_path)


def test_numbers_that_no_state_dict_has_are_refused(tmp_path: Path) -> None:
    """Guards against a model whose ε followed a rescaling, saved under a config that says the old one."""
    model = bert()
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(1e-3)  # so that ε counts
        model.embeddings.position_embeddings.weight.mul_(1e-3)
    expected = outputs(model, TOKENS)
    symmetry = equinorm.trace(model, TOKENS, invariances=True)
    before = model.embeddings.LayerNorm.eps
    symmetry.rescale_(symmetry.absorbed * 3.0)
    assert model.embeddings.LayerNorm.eps > 100 * before
    torch.testing.assert_close(outputs(model, TOKENS), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"LayerNorm has eps = \S*, not 1e-12.*Save the whole module"):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]
    symmetry.rescale_(symmetry.absorbed * -3.0)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = before  # which it is already, but for rounding
    assert_loads_again(model, TOKENS, tmp_path)


def test_a_batch_norm_with_another_epsilon_is_named(tmp_path: Path) -> None:
    model = resnet()
    symmetry = equinorm.trace(model, IMAGES, invariances=True)
    symmetry.rescale_(torch.full((symmetry.num_scales,), 0.5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"normalization has eps = \S*, not 1e-05.*Save the whole module"):
        model.save_pretrained(tmp_path)


def test_half_precision_without_invariances_loads_again(tmp_path: Path) -> None:
    """The remedy that the refusal names."""
    model = bert()
    symmetry = equinorm.trace(model, TOKENS)
    equinorm.balance_(model, TOKENS, criterion=equinorm.criteria.Half(TOKENS), symmetry=symmetry)
    assert_loads_again(model, TOKENS, tmp_path)


def test_a_model_whose_norms_were_folded_loads_again(tmp_path: Path) -> None:
    plain, report = equinorm.fold(resnet(), IMAGES)
    assert len(report.converted) > 5
    assert_loads_again(plain, IMAGES, tmp_path)


def test_a_balanced_model_loads_again(tmp_path: Path) -> None:
    model = resnet()
    equinorm.balance_(model, IMAGES)
    assert_loads_again(model, IMAGES, tmp_path)


@pytest.mark.parametrize("put", [equinorm.weight_norm_, equinorm.centred_weight_norm_, equinorm.unit_filters_])
def test_language_models_changed_in_place(put: Any, tmp_path: Path) -> None:
    model = bert()
    put(model)
    with pytest.raises(ValueError, match=r"(?s)ParametrizedLinear with bias.*and \d+ more.*Fold first"):
        model.save_pretrained(tmp_path)
    plain, _ = equinorm.fold(model)
    assert_loads_again(plain, TOKENS, tmp_path)


def test_copies_are_guarded_too(tmp_path: Path) -> None:
    model = bert()
    equinorm.weight_norm_(model)
    twin = copy.deepcopy(model)
    plain, _ = equinorm.fold(model, inplace=True)
    with pytest.raises(ValueError, match="Fold first"):
        twin.save_pretrained(tmp_path)
    assert_loads_again(plain, TOKENS, tmp_path)


def test_a_trainers_checkpoint_is_written_with_a_warning(tmp_path: Path) -> None:
    model = bert()
    equinorm.weight_norm_(model)
    with pytest.warns(UserWarning, match=r"(?s)checkpoint-5 resumes this training, but .*fold first"):
        model.save_pretrained(tmp_path / "checkpoint-5")
    assert (tmp_path / "checkpoint-5" / "model.safetensors").is_file()


def test_other_models_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    equinorm.weight_norm_(model)
    assert "save_pretrained" not in vars(model)
    assert issubclass(BertModel, PreTrainedModel)
