"""Callbacks for Lightning's `Trainer`: ENorm and mean shift rejection in every step of a module's optimizer.

    trainer = Trainer(callbacks=[ENormCallback(c=1.2)])

Either package will do, `lightning` or the older `pytorch_lightning`. The method is made when training starts, when
weights and optimizer of a checkpoint have been loaded; its own state goes into the checkpoint with the callback's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..enorm.enorm import ENorm
from ..models.unwrapping import unwrap
from ..msr.rejection import MeanShiftRejection
from .deferred import Deferred, check_options, inputs_from_batch

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError("equinorm.integrations.lightning needs Lightning: pip install lightning") from error

__all__ = ["ENormCallback", "MeanShiftRejectionCallback"]


class _MethodCallback(Callback):
    """What both callbacks do; a subclass says what is made and what is logged."""

    def __init__(
        self,
        method: type,
        options: Mapping[str, Any],
        model: str | Callable[[Any], nn.Module] | None,
        optimizer: int | None,
        log: bool,
    ) -> None:
        check_options(method, options, given=("model", "optimizer", "example_inputs"))
        self.options, self.model, self.optimizer = dict(options), model, optimizer
        self.logs = log  # Lightning gives callbacks a `log` of its own
        self._deferred = Deferred()
        self._logged = -1

    # -- for a subclass ------------------------------------------------------------------------------------------------

    def _make(self, trainer: Any, module: Any, model: nn.Module, batch: Any) -> Any:
        raise NotImplementedError

    def _values(self) -> dict[str, float]:
        raise NotImplementedError

    # -- what Lightning calls ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._deferred.end()  # of a training that was not ended
        self._logged = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._deferred.active:
            self._deferred.begin(self._make(trainer, pl_module, self._model(pl_module), batch))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if not self.logs or step == self._logged or step % max(trainer.log_every_n_steps, 1):
            return
        self._logged = step
        for name, value in self._values().items():
            pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._deferred.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._deferred.end()

    def state_dict(self) -> dict[str, Any]:
        return self._deferred.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._deferred.load_state_dict(state_dict)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _model(self, module: Any) -> nn.Module:
        if self.model is None:
            found: nn.Module = module
            return found
        return self.model(module) if callable(self.model) else module.get_submodule(self.model)

    def _optimizers(self, trainer: Any) -> Any:
        held = trainer.optimizers
        if self.optimizer is not None:
            if not -len(held) <= self.optimizer < len(held):
                raise ValueError(f"there is no optimizer {self.optimizer}: the module has {len(held)}")
            return held[self.optimizer]
        return held[0] if len(held) == 1 else list(held)


class ENormCallback(_MethodCallback):
    """Keeps the module balanced: an `equinorm.ENorm` attached to its optimizer, from the first step to the last.

    Args:
        example_inputs: as in `equinorm.trace`. Without them the module's `example_input_array` is taken, and where it
            has none the part of the first batch that its `forward` takes.
        model: the part of the module that is balanced, by name (`"net"`) or as a function of the module; by default
            the module itself, whose `forward` is traced.
        optimizer: the number of the optimizer, where a module has several; by default all of them.
        log: log the imbalance as "enorm/imbalance" every `log_every_n_steps` steps.
        options: those of `equinorm.ENorm`.

    Averages of the weights that other callbacks keep (`EMAWeightAveraging`) move along.

    The state is saved with the callback's in every checkpoint that holds more than weights. A second `fit` starts
    anew unless it is given a checkpoint.

    >>> trainer = Trainer(callbacks=[ENormCallback(c=1.2)])
    >>> trainer.fit(module, loader, ckpt_path="last")
    """

    def __init__(
        self,
        example_inputs: Any = None,
        *,
        model: str | Callable[[Any], nn.Module] | None = None,
        optimizer: int | None = None,
        log: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(ENorm, options, model, optimizer, log)
        self.example_inputs = example_inputs

    @property
    def enorm(self) -> ENorm | None:
        """The ENorm that acts now; None before training and after it."""
        found: ENorm | None = self._deferred.method
        return found

    def _make(self, trainer: Any, module: Any, model: nn.Module, batch: Any) -> ENorm:
        inputs = self.example_inputs
        if inputs is None and model is module:
            inputs = getattr(module, "example_input_array", None)
        if inputs is None and "symmetry" not in self.options:
            inputs = inputs_from_batch(model, batch)
        companions = [*self.options.get("companions", ()), *self._averages(trainer)]
        return ENorm(model, self._optimizers(trainer), inputs, **{**self.options, "companions": companions})

    def _averages(self, trainer: Any) -> list[nn.Module]:
        """The averaged models that callbacks of Lightning keep (EMAWeightAveraging): they move along."""
        averages = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
        return [self._model(unwrap(average)) for average in averages if isinstance(average, nn.Module)]

    def _values(self) -> dict[str, float]:
        assert self.enorm is not None
        return {"enorm/imbalance": self.enorm.imbalance()}


class MeanShiftRejectionCallback(_MethodCallback):
    """An `equinorm.MeanShiftRejection` attached to the module's optimizer, from the first step to the last.

    The module's kernels must be scaled when `configure_optimizers` is called: put `mean_shift_rejection_` or `convert`
    into its `__init__`. The options are those of `equinorm.MeanShiftRejection`; `model`, `optimizer` and `log` are as
    for `ENormCallback`. Logged, as "msr/limited", is the share of the steps that `max_step` has shortened.

    >>> trainer = Trainer(callbacks=[MeanShiftRejectionCallback(z=0.85, luma=5e-4)])
    """

    def __init__(
        self,
        *,
        model: str | Callable[[Any], nn.Module] | None = None,
        optimizer: int | None = None,
        log: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(MeanShiftRejection, options, model, optimizer, log)

    @property
    def rejection(self) -> MeanShiftRejection | None:
        """What acts now; None before training and after it."""
        found: MeanShiftRejection | None = self._deferred.method
        return found

    def _make(self, trainer: Any, module: Any, model: nn.Module, batch: Any) -> MeanShiftRejection:
        return MeanShiftRejection(model, self._optimizers(trainer), **self.options)

    def _values(self) -> dict[str, float]:
        assert self.rejection is not None
        return {"msr/limited": self.rejection.limited / max(self.rejection.steps, 1)}
