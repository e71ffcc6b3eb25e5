"""Hugging Face's Trainer with its optimizer offloaded.

    from hytrain_fx.integrations.transformers import HyTrainer

    trainer = HyTrainer(model=model, args=args, train_dataset=data)

Started by torchrun, each process trains with a GPU of its own, and hytrain_fx averages gradients.

`OffloadMixin` does the same for any subclass of Trainer: your own, or TRL's.

    class HySFTTrainer(OffloadMixin, SFTTrainer): ...

The hook is `create_optimizer`, which the Trainer's documentation names for this: the model is on
its device by then, and is not prepared by Accelerate yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from transformers import Trainer

import hytrain_fx
from hytrain_fx.errors import HytrainWarning, UnsupportedError
from hytrain_fx.integrations.accelerate import prepare_unwrapped, require_plain
from hytrain_fx.session.call_gate import find_session
from hytrain_fx.session.optimizer import OffloadedOptimizer

TRIED = "adamw_torch, adamw_torch_fused, adafactor, adagrad, rmsprop and sgd"


class OffloadMixin:
    """Stands before a Trainer among a class's bases.

    `compile_options` are those of `hytrain_fx.compile`.

    The model stays compiled after `train()`: it can be evaluated, saved and trained further.
    `hytrain_fx.close(trainer.model)` makes it a plain one, until it is trained again.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    is_in_train: bool

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **others: Any) -> None:
        self.compile_options = dict(compile_options or {})
        super().__init__(*args, **others)

    def create_optimizer(self, model: Any = None) -> Any:
        """The Trainer's optimizer, or the one that it was given, offloaded.

        A second `train()` goes on with it, also where the model was closed in between. With
        `model_init` each `train()` has a model and an optimizer of its own. Raises UnsupportedError
        where the Trainer would wrap the model.
        """
        self._require_one_device()
        given = self.optimizer is not None
        above: Any = super()
        made = above.create_optimizer() if model is None else above.create_optimizer(model)  # a subclass's may take no model
        optimizer = self.optimizer if made is None else made  # and may only set it
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper is there from the second train() on
        if isinstance(inner, OffloadedOptimizer):
            if not inner.session.closed:
                return optimizer
            optimizer = inner.before_compile  # it shows the states of the closed session, which compile() takes along
        self._warn_of_waits()
        try:
            _, self.optimizer = hytrain_fx.compile(self.model, optimizer, **self.compile_options)
        except UnsupportedError as error:
            if not given:
                error.add_note(f"the Trainer made its {type(optimizer).__name__} for optim={self.args.optim.value!r}; tried are {TRIED}")
            raise
        if self.accelerator.num_processes > 1:
            prepare_unwrapped(self.accelerator, self.model)
        return self.optimizer

    def create_scheduler(self, *args: Any, **others: Any) -> Any:
        """As the Trainer's, which comes after the optimizer in each training.

        Raises UnsupportedError where another `create_optimizer` ran in place of the one above:
        nothing would be offloaded.
        """
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(inner, OffloadedOptimizer) and self.optimizer is not None and find_session(self.model) is None:
            owner = next((each for each in type(self).__mro__ if "create_optimizer" in vars(each)), type(self)).__name__
            raise UnsupportedError(
                f"the Trainer's optimizer is a {type(inner).__name__}, and nothing is offloaded; expected that of OffloadMixin: "
                f"{owner}.create_optimizer replaces OffloadMixin's. Write class {owner}(OffloadMixin, YourTrainer), and put "
                "create_optimizer into YourTrainer"
            )
        return super().create_scheduler(*args, **others)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **others: Any) -> Any:
        """As the Trainer's.

        With `bf16_full_eval` or `fp16_full_eval` it converts the model, which is closed before. A
        further `train()` compiles it again. Raises EngineError where the engine has failed.
        """
        converts = (self.args.bf16_full_eval or self.args.fp16_full_eval) and not self.is_in_train
        if converts and find_session(self.model) is not None:
            hytrain_fx.close(self.model)
        return super().evaluation_loop(*args, **others)  # type: ignore[misc]

    def save_model(self, *args: Any, **others: Any) -> None:
        """As the Trainer's. One process reads weights that all of them have settled."""
        if self._is_shared:
            hytrain_fx.settle(self.model)
        super().save_model(*args, **others)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        """As the Trainer's. One process asks for all states, and the others give theirs."""
        if self._is_shared and not self.args.should_save:
            self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    @property
    def _is_shared(self) -> bool:
        """Whether several processes train the model together."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return self.accelerator.num_processes > 1 and isinstance(inner, OffloadedOptimizer) and not inner.session.closed

    def _require_one_device(self) -> None:
        require_plain(self.accelerator)
        if self.args.n_gpu > 1:
            raise UnsupportedError(
                f"the Trainer would wrap the model in DataParallel, for {self.args.n_gpu} GPUs; expected one device. "
                "Show it one GPU (CUDA_VISIBLE_DEVICES=0)"
            )

    def _warn_of_waits(self) -> None:
        if self.args.logging_nan_inf_filter and self.args.device.type == "cuda":
            warnings.warn(
                "logging_nan_inf_filter=True waits for the GPU between backward() and step(), which takes most of the overlap away; "
                "set logging_nan_inf_filter=False in the TrainingArguments: losses are logged as they are then",
                HytrainWarning,
                stacklevel=3,
            )


class HyTrainer(OffloadMixin, Trainer):  # type: ignore[misc]
    """A Trainer whose optimizer is offloaded."""
