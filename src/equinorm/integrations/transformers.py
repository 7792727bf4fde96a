"""A callback for transformers' `Trainer`: ENorm in every step of its optimizer, saved in every checkpoint folder.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ENormCallback(c=1.2)])
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..enorm.enorm import ENorm
from .deferred import Deferred, check_options, inputs_from_batch

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("equinorm.integrations.transformers needs transformers: pip install transformers") from error

__all__ = ["FILE", "ENormCallback"]

FILE = "enorm.pt"
"""What a checkpoint folder has besides the Trainer's own files."""


class ENormCallback(TrainerCallback):
    """Keeps the model of a `Trainer` balanced: an `equinorm.ENorm` attached to the optimizer that accelerate wraps.

    Args:
        example_inputs: as in `equinorm.trace`. Without them the inputs of the first training batch are taken.
        log: add the imbalance as "enorm_imbalance" to the training logs. Callbacks before this one have seen them by
            then: `trainer.callback_handler.callbacks.insert(0, callback)` puts it before the reporters.
        resume_from: the checkpoint folder whose `enorm.pt` is loaded, where that is not `checkpoint-STEP` in the
            output folder; False begins anew at the scales that there are.
        options: those of `equinorm.ENorm`.

    Every checkpoint folder gets an `enorm.pt`; training that is resumed without one is refused, since safe biases would
    go on with wrong learning rates.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[ENormCallback(c=1.2)])
    """

    def __init__(
        self,
        example_inputs: Any = None,
        *,
        log: bool = True,
        resume_from: str | Path | bool | None = None,
        **options: Any,
    ) -> None:
        check_options(ENorm, options, given=("model", "optimizer", "example_inputs"))
        if resume_from is True:
            raise ValueError("resume_from is a checkpoint folder, or False; by default the one of the step is found")
        self.example_inputs, self.logs, self.resume_from, self.options = example_inputs, log, resume_from, options
        self._deferred = Deferred()
        self._watch: Any = None
        self._first_inputs: Any = None
        self._size: float | None = None  # of the weights that the state that waits belongs to
        self._folder: Path | None = None

    @property
    def enorm(self) -> ENorm | None:
        """The ENorm that acts now; None before training and after it."""
        found: ENorm | None = self._deferred.method
        return found

    # -- what the Trainer calls ----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._stop()
        self._deferred, self._size = Deferred(), None
        if state.global_step and self.resume_from is not False:
            self._folder = self._checkpoint(args, state)
            saved = torch.load(self._folder / FILE, map_location="cpu", weights_only=True)
            self._deferred.load_state_dict(saved["enorm"])
            self._size = saved["size"]
        model, inputs = given["model"], self.example_inputs
        if inputs is not None or "symmetry" in self.options:
            self._begin(model, given["optimizer"], inputs)
        else:
            self._first_inputs = None
            self._watch = model.register_forward_pre_hook(self._see_inputs, with_kwargs=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not self._deferred.active:
            self._stop_watching()
            model = given["model"]
            if self._first_inputs is None:
                raise ValueError(f"{type(model).__name__} was not called in training: give example_inputs=...")
            inputs, self._first_inputs = self._first_inputs, None
            self._begin(model, given["optimizer"], inputs)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.enorm is None or not args.should_save or not folder.is_dir():
            return
        content = {"enorm": self._deferred.state_dict(), "size": _size(self.enorm.weights().values())}
        unfinished = folder / f"{FILE}.tmp"
        torch.save(content, unfinished)
        unfinished.replace(folder / FILE)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if self.logs and self.enorm is not None and logs is not None and "loss" in logs:
            logs["enorm_imbalance"] = value = self.enorm.imbalance()
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1]["enorm_imbalance"] = value

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._stop()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _checkpoint(self, args: Any, state: Any) -> Path:
        """The folder that training is resumed from."""
        asked = self.resume_from or args.resume_from_checkpoint
        named = asked if isinstance(asked, str | Path) else None
        folder = Path(named) if named else Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not (folder / FILE).is_file():
            raise ValueError(
                f"training is resumed at step {state.global_step}, but there is no {FILE} in {folder}: give "
                "ENormCallback(resume_from=...) the checkpoint folder, or False to begin at the scales that there are"
            )
        return folder

    def _begin(self, model: nn.Module, optimizer: Any, inputs: Any) -> None:
        enorm = ENorm(model, optimizer, inputs, **self.options)
        if self.resume_from is False:
            enorm.load_state_dict(enorm.state_dict())  # as asked: the scales count from here
        if self._size is not None:
            size = _size(enorm.weights().values())
            if not math.isclose(size, self._size, rel_tol=1e-6):
                raise ValueError(
                    f"{FILE} in {self._folder} belongs to other weights (their sizes add up to {self._size:.9g}, those "
                    f"of the model to {size:.9g}): give ENormCallback(resume_from=...) the folder that is resumed from"
                )
        self._size = None
        self._deferred.begin(enorm)

    def _see_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and self._first_inputs is None:
            self._first_inputs = inputs_from_batch(model, kwargs if kwargs else args)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _stop(self) -> None:
        self._stop_watching()
        self._deferred.end()


def _size(weights: Iterable[Tensor]) -> float:
    """Σ |w| over all weights that ENorm moves: tells one training's checkpoint from another's."""
    return float(sum(w.detach().abs().sum(dtype=torch.float64).cpu() for w in weights))
