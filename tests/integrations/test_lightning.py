"""Lightning: short trainings with the real Trainer, stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import equinorm
from equinorm.integrations.lightning import ENormCallback, MeanShiftRejectionCallback


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module, optimizer: str = "SGD") -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def dense() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def convolutional() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)
    )
    equinorm.mean_shift_rejection_(net, generator=torch.Generator().manual_seed(2))
    return net


def loader(*shape: int) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, *shape, generator=made), torch.randint(3, (32,), generator=made)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fit(module: Classifier, callback: pl.Callback, folder: Path, epochs: int, data: Any, **options: Any) -> pl.Trainer:
    given = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **options}
    resume = given.pop("ckpt_path", None)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[callback],
        log_every_n_steps=1,
        **given,
    )
    trainer.fit(module, data, ckpt_path=resume)
    return trainer


def assert_resumes(make: Any, callback: Any, folder: Path, data: Any, **options: Any) -> None:
    whole = make()
    fit(whole, callback(), folder / "whole", 4, data, **options)
    first = make()
    trainer = fit(first, callback(), folder / "first", 2, data, **options)
    trainer.save_checkpoint(folder / "half.ckpt")
    resumed = make()
    fit(resumed, callback(), folder / "second", 4, data, ckpt_path=folder / "half.ckpt", **options)
    for name, expected in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], expected), name
    assert not torch.equal(next(first.parameters()), next(whole.parameters()))


@pytest.mark.shows("Lightning", "ENormCallback: trained, stopped, resumed bitwise, SGD", "lightning", "torch")
def test_enorm_resumes_bitwise(tmp_path: Path) -> None:
    assert_resumes(lambda: Classifier(dense()), lambda: ENormCallback(c=1.2), tmp_path, loader(6))


@pytest.mark.shows("Lightning", "ENormCallback: trained, stopped, resumed bitwise, AdamW", "lightning", "torch")
def test_enorm_resumes_bitwise_with_adamw(tmp_path: Path) -> None:
    assert_resumes(lambda: Classifier(dense(), "AdamW"), lambda: ENormCallback(c=1.2), tmp_path, loader(6))


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.shows(
    "Lightning", "ENormCallback with bf16-mixed, accumulated and clipped gradients: resumed bitwise", "lightning"
)
def test_enorm_with_options_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(lambda: Classifier(dense()), lambda: ENormCallback(c=1.2), tmp_path, loader(6), **options)


@pytest.mark.parametrize("part", [None, "net"])
@pytest.mark.shows("Lightning", "ENormCallback on a module with a compiled net: resumed bitwise", "lightning", "torch")
def test_enorm_with_a_compiled_net(part: str | None, tmp_path: Path) -> None:
    def made() -> Classifier:
        torch._dynamo.reset()
        return Classifier(torch.compile(dense()))

    assert_resumes(made, lambda: ENormCallback(c=1.2, model=part), tmp_path, loader(6))


@pytest.mark.shows("Lightning", "a warning where safe biases are resumed without their state", "lightning")
def test_a_resume_without_the_state_is_another_training(tmp_path: Path) -> None:
    """That the test above can fail: the callback's state matters."""
    data = loader(6)
    whole, first, resumed = (Classifier(dense()) for _ in range(3))
    fit(whole, ENormCallback(c=1.2), tmp_path / "whole", 4, data)
    trainer = fit(first, ENormCallback(c=1.2), tmp_path / "first", 2, data)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=False)
    assert list(checkpoint["callbacks"].pop("ENormCallback")) == ["log_t", "calls"]
    torch.save(checkpoint, tmp_path / "half.ckpt")
    callback = ENormCallback(c=1.2)
    with pytest.warns(
        UserWarning, match="SGD has made steps already and this ENorm begins anew: if training is resumed"
    ):
        fit(resumed, callback, tmp_path / "second", 4, data, ckpt_path=tmp_path / "half.ckpt")
    assert not torch.equal(resumed.net[2].bias, whole.net[2].bias)


@pytest.mark.shows("Lightning", "MeanShiftRejectionCallback: trained, stopped, resumed bitwise", "lightning", "torch")
def test_mean_shift_rejection_resumes_bitwise(tmp_path: Path) -> None:
    callback = lambda: MeanShiftRejectionCallback(luma=5e-4)  # noqa: E731
    assert_resumes(lambda: Classifier(convolutional()), callback, tmp_path, loader(1, 8, 8))


@pytest.mark.shows("Lightning", "imbalance and shortened steps are logged", "lightning")
def test_what_is_logged(tmp_path: Path) -> None:
    trainer = fit(Classifier(dense()), ENormCallback(c=1.0), tmp_path, 1, loader(6))
    assert 0 <= trainer.callback_metrics["enorm/imbalance"] < 1
    trainer = fit(Classifier(convolutional()), MeanShiftRejectionCallback(), tmp_path, 1, loader(1, 8, 8))
    assert 0 <= trainer.callback_metrics["msr/limited"] <= 1


def test_equal_to_a_loop_by_hand(tmp_path: Path) -> None:
    data, module, net = loader(6), Classifier(dense()), dense()
    fit(module, ENormCallback(torch.zeros(2, 6), c=1.2, model="net"), tmp_path, 2, data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    equinorm.ENorm(net, optimizer, torch.zeros(2, 6), c=1.2).attach()
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    for name, expected in net.state_dict().items():
        assert torch.equal(module.net.state_dict()[name], expected), name


def test_example_input_array_is_taken(tmp_path: Path) -> None:
    module = Classifier(dense())
    module.example_input_array = torch.zeros(2, 6)
    callback = ENormCallback()
    seen = []
    module.on_train_batch_end = lambda *_: seen.append(callback.enorm)  # type: ignore[method-assign]
    fit(module, callback, tmp_path, 1, loader(6))
    assert seen[-1].symmetry.num_scales == 24
    assert callback.enorm is None  # nothing stays behind
    assert callback.state_dict()["calls"] == 4


@pytest.mark.parametrize("part", [None, "net"])
@pytest.mark.shows("Lightning", "EMAWeightAveraging beside ENormCallback: the average moves along", "lightning")
def test_averaged_weights_move_along(part: str | None, tmp_path: Path) -> None:
    """The average of a training in which every step is balanced is the average of what was trained."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Watching(EMAWeightAveraging):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_batch_end(*args, **kwargs)
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
            with torch.no_grad():
                self.seen = [*getattr(self, "seen", ()), self._average_model.module(x)]

    class Early(ENormCallback):
        """Balances hard in one step, the first: an average that stays behind computes something else then."""

    data, seen = loader(6), []
    for c in (None, 1.0):
        module = Classifier(dense())
        with torch.no_grad():
            module.net[0].weight.mul_(20.0)
            module.net[0].bias.mul_(20.0)
            module.net[2].weight.div_(20.0)
        average = Watching(decay=0.9)
        callbacks = [average] if c is None else [average, Early(c=c, model=part, bias="plain")]
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        module.configure_optimizers = lambda module=module: torch.optim.SGD(module.parameters(), lr=1e-6)
        trainer.fit(module, data)
        seen.append(average.seen)
    for expected, found in zip(*seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class ByHand(Classifier):
    """Two optimizers, stepped by the module itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        muon, adamw = self.optimizers()
        muon.zero_grad()
        adamw.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        muon.step()
        adamw.step()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)


@pytest.mark.shows(
    "Lightning", "ENormCallback on a module's two optimizers, Muon and AdamW: resumed bitwise", "lightning"
)
def test_two_optimizers_resume_bitwise(tmp_path: Path) -> None:
    assert_resumes(lambda: ByHand(dense()), lambda: ENormCallback(c=1.2), tmp_path, loader(6))
