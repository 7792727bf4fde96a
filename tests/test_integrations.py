"""The adapters of `equinorm.integrations` with stand-ins for the programs; tests/integrations has the real ones."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.integrations.deferred import check_options, inputs_from_batch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 4, generator=made), torch.randint(3, (5,), generator=made)) for _ in range(count)]


def stand_in(monkeypatch: pytest.MonkeyPatch, adapter: str, modules: dict[str, dict[str, Any]]) -> Any:
    """An adapter, imported with modules of these names and contents in the place of the real ones."""
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"equinorm.integrations.{adapter}", raising=False)
    return import_module(f"equinorm.integrations.{adapter}")


# -- what they share ---------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return x * mask * scale


def test_inputs_from_a_batch() -> None:
    x, y = torch.rand(2, 3), torch.rand(2)
    assert inputs_from_batch(nn.Linear(3, 1), (x, y))[0].equal(x)
    assert len(inputs_from_batch(nn.Linear(3, 1), [x, y])) == 1
    assert len(inputs_from_batch(nn.Linear(3, 1), x)) == 1
    assert len(inputs_from_batch(Two(), (x, x, y))) == 2
    assert list(inputs_from_batch(Two(), {"mask": x, "labels": y, "x": x, "idx": 3})) == ["mask", "x"]
    with pytest.raises(ValueError, match="takes 2 arguments and a batch has 1 entries"):
        inputs_from_batch(Two(), (x,))
    with pytest.raises(ValueError, match="takes none of 'image'"):
        inputs_from_batch(Two(), {"image": x})


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="ENorm has no option 'speed' here; it has p, c, cycles"):
        check_options(equinorm.ENorm, {"speed": 3}, given=("model", "optimizer", "example_inputs"))


def test_there_is_nothing_else() -> None:
    assert dir(equinorm.integrations) == ["lightning", "opacus", "transformers"]
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        equinorm.integrations.keras  # noqa: B018


# -- Lightning ---------------------------------------------------------------------------------------------------------


class Module(nn.Sequential):
    """As a LightningModule, as far as callbacks see."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: float, **_: Any) -> None:
        self.logged[name] = value


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    content = {"Callback": type("Callback", (), {})}
    return stand_in(monkeypatch, "lightning", {"lightning": {}, "lightning.pytorch": content})


def fit(
    module: Module, callback: Any, data: list[tuple[Tensor, Tensor]], state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """In the order in which Lightning's Trainer does it; returns what a checkpoint has at the end."""
    if state is not None:
        callback.load_state_dict(state["callback"])
        module.load_state_dict(state["module"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    trainer = SimpleNamespace(optimizers=[optimizer], global_step=0, log_every_n_steps=2, callbacks=[callback])
    callback.on_train_start(trainer, module)
    for index, (x, y) in enumerate(data):
        callback.on_train_batch_start(trainer, module, (x, y), index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, (x, y), index)
    callback.on_train_end(trainer, module)
    return {
        "module": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "callback": callback.state_dict(),
    }


def test_a_lightning_callback_resumes(lightning: Any) -> None:
    data, whole, first, second = batches(8), Module(*net()), Module(*net()), Module(*net())
    fit(whole, lightning.ENormCallback(c=1.2), data)
    state = fit(first, lightning.ENormCallback(c=1.2), data[:4])
    fit(second, lightning.ENormCallback(c=1.2), data[4:], state)
    for name, expected in whole.state_dict().items():
        assert second.state_dict()[name].equal(expected), name
    assert 0 <= whole.logged["enorm/imbalance"] < 10


def test_a_lightning_callback_takes_a_part_of_the_module(lightning: Any) -> None:
    module = Module(net(), nn.Linear(3, 3))
    callback = lightning.ENormCallback(model="0", optimizer=0)
    state = fit(module, callback, batches(2))
    assert len(state["callback"]["log_t"]) == 12
    with pytest.raises(ValueError, match="there is no optimizer 2: the module has 1"):
        fit(module, lightning.ENormCallback(optimizer=2), batches(1))


def test_a_lightning_callback_stops_where_training_fails(lightning: Any) -> None:
    module, callback = Module(*net()), lightning.ENormCallback()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = SimpleNamespace(optimizers=[optimizer], global_step=0, log_every_n_steps=2, callbacks=[callback])
    callback.on_train_start(trainer, module)
    callback.on_train_batch_start(trainer, module, batches(1)[0], 0)
    assert callback.enorm is not None
    assert len(optimizer._optimizer_step_post_hooks) == 1
    callback.on_exception(trainer, module, KeyboardInterrupt())
    assert callback.enorm is None
    assert not optimizer._optimizer_step_post_hooks


def test_a_lightning_callback_for_mean_shift_rejection(lightning: Any) -> None:
    def made() -> Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.ReLU())
        model.extend([nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(8, 3)])
        equinorm.mean_shift_rejection_(model, generator=torch.Generator().manual_seed(0))
        return Module(*model)

    data, whole, first, second = batches(6), made(), made(), made()
    fit(whole, lightning.MeanShiftRejectionCallback(), data)
    state = fit(first, lightning.MeanShiftRejectionCallback(), data[:2])
    assert state["callback"]["steps"] == 2
    fit(second, lightning.MeanShiftRejectionCallback(), data[2:], state)
    for name, expected in whole.state_dict().items():
        assert second.state_dict()[name].equal(expected), name
    assert 0 <= whole.logged["msr/limited"] <= 1


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "equinorm.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match="pip install lightning"):
        import_module("equinorm.integrations.lightning")


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    content = {"TrainerCallback": type("TrainerCallback", (), {})}
    return stand_in(monkeypatch, "transformers", {"transformers": content})


def train(model: nn.Module, callback: Any, folder: Path, start: int, end: int) -> None:
    """From one step to another in the order in which transformers' Trainer does it, with a checkpoint after each."""
    args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=None, should_save=True)
    state, control = SimpleNamespace(global_step=start, log_history=[]), object()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if start:
        checkpoint = torch.load(folder / f"checkpoint-{start}" / "all.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    given: dict[str, Any] = {"model": model, "optimizer": SimpleNamespace(optimizer=optimizer)}
    callback.on_train_begin(args, state, control, **given)
    for x, y in batches(end)[start:]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        callback.on_pre_optimizer_step(args, state, control, **given)
        optimizer.step()
        state.global_step += 1
        logs = {"loss": 1.0}
        state.log_history.append({**logs, "step": state.global_step})
        callback.on_log(args, state, control, logs=logs, **given)
        assert state.log_history[-1]["enorm_imbalance"] == logs["enorm_imbalance"] >= 0
        inner = folder / f"checkpoint-{state.global_step}"
        inner.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, inner / "all.pt")
        callback.on_save(args, state, control, **given)
    callback.on_train_end(args, state, control, **given)
    assert not optimizer._optimizer_step_post_hooks


def test_a_trainer_callback_resumes(transformers: Any, tmp_path: Path) -> None:
    whole, second = net(), net()
    train(whole, transformers.ENormCallback(c=1.2), tmp_path, 0, 6)
    assert sorted(path.name for path in (tmp_path / "checkpoint-3").iterdir()) == ["all.pt", "enorm.pt"]
    train(second, transformers.ENormCallback(c=1.2), tmp_path, 3, 6)
    for name, expected in whole.state_dict().items():
        assert second.state_dict()[name].equal(expected), name


def test_a_trainer_callback_refuses_a_resume_that_would_go_wrong(transformers: Any, tmp_path: Path) -> None:
    train(net(), transformers.ENormCallback(torch.zeros(2, 4)), tmp_path, 0, 2)
    saved = tmp_path / "checkpoint-1" / "enorm.pt"
    content = torch.load(saved)
    torch.save({**content, "size": content["size"] * 1.01}, saved)
    with pytest.raises(ValueError, match="belongs to other weights"):
        train(net(), transformers.ENormCallback(torch.zeros(2, 4)), tmp_path, 1, 2)
    saved.unlink()
    with pytest.raises(ValueError, match=r"there is no enorm\.pt in .*checkpoint-1"):
        train(net(), transformers.ENormCallback(), tmp_path, 1, 2)
    train(net(), transformers.ENormCallback(resume_from=False), tmp_path, 1, 2)
    with pytest.raises(ValueError, match="resume_from is a checkpoint folder, or False"):
        transformers.ENormCallback(resume_from=True)


# -- Opacus ------------------------------------------------------------------------------------------------------------


class ModuleValidator:
    """As Opacus' own, as far as functions registered with it go."""

    VALIDATORS: ClassVar[dict[type, Any]] = {}
    FIXERS: ClassVar[dict[type, Any]] = {}

    @classmethod
    def validate(cls, module: nn.Module) -> list[Exception]:
        found = [error for each in module.modules() for error in cls.VALIDATORS.get(type(each), lambda _: [])(each)]
        return found if module.training else [ValueError("not in training mode"), *found]


@pytest.fixture
def opacus(monkeypatch: pytest.MonkeyPatch) -> Any:
    batchnorm = {nn.BatchNorm1d: lambda _: [ValueError("a batch norm")], nn.BatchNorm2d: lambda _: [ValueError("one")]}
    monkeypatch.setattr(ModuleValidator, "VALIDATORS", batchnorm)
    monkeypatch.setattr(ModuleValidator, "FIXERS", {})
    errors = {"ShouldReplaceModuleError": type("ShouldReplaceModuleError", (Exception,), {})}
    modules = {
        "opacus": {},
        "opacus.validators": {"ModuleValidator": ModuleValidator},
        "opacus.validators.errors": errors,
    }
    return stand_in(monkeypatch, "opacus", modules)


def equinorm_net() -> nn.Module:
    conv, linear = equinorm.nn.EquiNormConv2d, equinorm.nn.EquiNormLinear
    return nn.Sequential(
        conv(3, 4, 3), nn.ReLU(), conv(4, 4, 3), nn.ReLU(), nn.Flatten(), linear(16, 4), nn.Linear(4, 2)
    )


@pytest.mark.parametrize("method", ["groupnorm", "msr"])
def test_models_are_fixed_for_opacus(opacus: Any, method: str) -> None:
    model, images = equinorm_net().eval(), torch.randn(4, 3, 6, 6)
    with torch.no_grad():
        model[0].gain.fill_(2.0)
        model[2].bias.fill_(3.0)
    assert len(opacus.validate(model.train())) == 3
    fixed, report = opacus.fix(model.eval(), images, method)
    assert len(report.converted) >= 3
    assert not fixed.training
    assert not opacus.validate(fixed.train())
    together = fixed(images)
    torch.testing.assert_close(torch.cat([fixed(image[None]) for image in images]), together)
    offsets = fixed[2][1].bias if method == "groupnorm" else fixed[2][0].bias
    assert offsets.detach().eq(3.0).all()
    if method == "groupnorm":
        assert fixed[0][1].weight.detach().eq(2.0).all()
        assert fixed[0][0].weight.equal(model[0].weight)


def test_what_opacus_would_still_refuse_is_named(opacus: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    images = torch.randn(4, 3, 6, 6)
    with pytest.raises(ValueError, match=r"(?s)still refuse.*a parametrized weight and no bias"):
        opacus.fix(model, images, "msr", bias=False)
    with pytest.raises(ValueError, match="method must be one of 'groupnorm', 'msr', got 'bn'"):
        opacus.fix(model, images, "bn")
    plain = nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4))
    fixed, report = opacus.fix(plain, torch.randn(2, 3))
    assert not report.converted
    assert fixed is not plain


def test_module_by_module_it_is_group_norm(opacus: Any) -> None:
    layer = equinorm.nn.EquiNormLinear(8, 6)
    fixed = ModuleValidator.FIXERS[type(layer)](layer)
    assert fixed[1].num_groups == 1
    assert ModuleValidator.FIXERS[equinorm.nn.EquiNormConv2d](equinorm.nn.EquiNormConv2d(2, 6, 3))[1].num_groups == 2
    assert fixed(torch.randn(1, 8)).shape == (1, 6)


# -- the table of what was tested --------------------------------------------------------------------------------------

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "integrations_table.py"))


def test_a_table_of_a_log() -> None:
    log = """
commit: 0123abcd
hardware: 2 CPU cores
row | torch.compile | as eager | torch 2.13.0 | passed | test_a[1]
row | torch.compile | as eager | torch 2.13.0 | xfailed | test_a[2]
row | AMP | bfloat16 | torch 2.13.0, timm 1.0 | passed | test_b
row | timm | its optimizers | timm 1.0 | passed | test_timm[sgd]
row | timm | its optimizers | timm 1.0 | failed | test_timm[adam]
row | timm | those of others | timm 1.0 | skipped | test_timm_on_a_gpu[fusedadam]
== 4 passed, 1 skipped in 2 s =="""
    assert SCRIPT["table"](log).splitlines()[2:] == [
        "| AMP | bfloat16 | torch 2.13.0, timm 1.0 | yes | 1 |",
        "| timm | its optimizers | timm 1.0 | **no**, yes | 2 |",
        "| timm | those of others | timm 1.0 | not run | 1 |",
        "| torch.compile | as eager | torch 2.13.0 | **not yet**, yes | 2 |",
    ]
    assert SCRIPT["optimizers_of_timm"](log).splitlines()[2:] == [
        "| works | 1 | sgd |",
        "| works: **no** | 1 | adam |",
        "| needs CUDA: not run | 1 | fusedadam |",
        "| all | 3 | |",
    ]
    assert "commit 0123abcd, 2 CPU cores; unknown; 4 passed, 1 skipped." in SCRIPT["source"](log)
    with pytest.raises(ValueError, match="needs the two markers"):
        SCRIPT["page_with"]("no table here", "| a |")


def test_the_page_says_what_the_committed_log_says() -> None:
    page, log = (SCRIPT[name].read_text(encoding="utf-8") for name in ("PAGE", "LOG"))
    assert SCRIPT["page_with"](page, SCRIPT["made"](log)) == page, "run python scripts/integrations_table.py"
    assert not [row for row in SCRIPT["rows"](log) if row.outcome in ("failed", "error")]
