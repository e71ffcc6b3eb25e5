"""The optimizer that `compile` returns: the user's own param_groups, the session's update."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.gradients.loss_scale import left_by_scaler, steps_without_wait
from hytrain_fx.session import open_share
from hytrain_fx.session.own_class import OVERRIDABLE, has_own, overrides, own_methods, takes, tell_of_unused
from hytrain_fx.session.rank_stages import stages_with
from hytrain_fx.session.session import Session
from hytrain_fx.session.sharded_state import load_sharded_states, sharded_states
from hytrain_fx.session.state_dict import ParameterStates, follow_weights, load_states, read_states, require_form
from hytrain_fx.torch_private.optimizers import hand_over_hooks, load_state_dict_hooks


class OffloadedOptimizer(torch.optim.Optimizer):
    """The user's optimizer with states that rest on host and device as the plan says.

    `param_groups` is the user's own list, so schedulers made before or after change the same
    groups. `state` has the keys that the user's optimizer would have, and for 16-bit parameters
    `master` besides, as copies made when asked for (`ParameterStates`).

    Attributes and methods of the user's class are there too, and what is set is set on the user's
    optimizer, whose attributes each step reads (`own_class`).
    """

    def __init__(self, original: torch.optim.Optimizer, session: Session) -> None:
        super().__init__(original.param_groups, original.defaults)
        common = frozenset(vars(self))
        self.param_groups = original.param_groups
        self.session = session
        self._states: Any = ParameterStates(session)
        self.state = self._states  # type: ignore[assignment]
        self._stages = stages_with(session)
        methods = own_methods(original, {name: partial(getattr(OffloadedOptimizer, name), self) for name in OVERRIDABLE})
        if methods:  # in a class: a wrapper may derive from it, as Lightning's does
            body = {name: staticmethod(method) for name, method in methods.items()}
            self.__class__ = types.new_class("OffloadedOptimizer", (OffloadedOptimizer,), exec_body=lambda of: of.update(body))
        self._original = original  # from here on, attributes are its
        tell_of_unused(original, OffloadedOptimizer, vars(self).keys() - common)
        if self._stages:
            self._stages.add(session, self)
        _hand_over(original, self)

    def __getattr__(self, name: str) -> Any:
        original = vars(self).get("_original")  # not there while one is made, or copied
        if original is None or not has_own(original, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        original = vars(self).get("_original")
        ours = original is None or name in vars(self) or hasattr(type(self), name) or not takes(original, name, value)
        super().__setattr__(name, value) if ours else setattr(original, name, value)

    def __delattr__(self, name: str) -> None:
        original = vars(self).get("_original")
        ours = original is None or name in vars(self) or name not in vars(original)
        super().__delattr__(name) if ours else delattr(original, name)

    @property
    def before_compile(self) -> torch.optim.Optimizer:
        """The user's own object, which can be compiled again when the model was closed."""
        return self._original

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit this step: fixes the hyper-parameters and returns while updates run.

        Raises EngineError, GradientConsumedError, and UnsupportedError within `share`.
        """
        self._require_own()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        open_share.require_none(self.session, "optimizer.step()")
        if self._stages:
            self._stages.add_up_ties()
        with left_by_scaler(self, self.session.table.device) as found_inf:
            self.session.step(found_inf)
        self._original._opt_called = True  # type: ignore[attr-defined]  # what a scheduler made before compile() looks at
        if self._stages:
            self._stages.dropped(self.session)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        before = _nobody_shares if self._stages is None else partial(self._stages.share_inf, self)
        return steps_without_wait(self, before) and self.session.engine.can_skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        open_share.dropped(self.session)
        if self._stages:
            self._stages.dropped(self.session)
        if set_to_none:
            self.session.zero_grad()
            if self.session.eager.move_waits:  # weights may be the training's here
                with self.session.turns.state:
                    self.session.follow_plan()
        else:
            super().zero_grad(set_to_none=False)
            if self.session.nodes.of_ranks:
                self.session.nodes.of_ranks.zeroed()

    def state_dict(self) -> dict[str, Any]:
        """Committed states as `torch.optim.Optimizer.state_dict` has them, on the CPU.

        Waits for running updates.
        """
        self._require_own()
        with self.session.turns.state:
            self.session.drain()
            states = read_states(self.session)
        # Another object shows them, with all else that this one has: another thread may step
        # meanwhile, and a user's hook may wait for it.
        shown = object.__new__(type(self))
        vars(shown).update(vars(self) | {"state": states})
        return torch.optim.Optimizer.state_dict(shown)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Committed states for `torch.distributed.checkpoint`, by the parameters' names.

        Each rank has its shards, as DTensors on the CPU. Of an optimizer without a kernel it has
        the parameters that it owns. Waits for running updates. Every rank must call it.
        """
        self._require_own()
        with self.session.turns.state:
            self.session.drain()
            return sharded_states(self.session, self._saved_names)

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` gave and `torch.distributed.checkpoint.load` has filled.

        Raises ValueError, and changes nothing, where it does not fit.
        """
        self._require_own()
        state_dict = {**state_dict, "param_groups": self.session.update.completed(state_dict["param_groups"])}
        with self.session.turns.state:
            self.session.drain()
            load_sharded_states(self.session, self._saved_names, state_dict, self.defaults)
        if self._stages:
            self._stages.loaded(self.session)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or `torch.optim.AdamW.state_dict` gave.

        Raises ValueError, and changes nothing, where it does not fit.

        A 16-bit parameter without `master` takes its present weight for it. Options that the groups
        lack become what the optimizer's class takes for them, as in torch.
        """
        self._require_own()
        state_dict = copy.copy(state_dict)
        before, after = load_state_dict_hooks(self)
        for hook in before:
            state_dict = hook(self, state_dict) or state_dict
        require_form(state_dict)
        state_dict = {**state_dict, "param_groups": self.session.update.completed(state_dict["param_groups"])}
        with self.session.turns.state:
            self.session.drain()
            load_states(self.session, self, state_dict)
        if self._stages:
            self._stages.loaded(self.session)
        for hook in after:
            hook(self)

    @property
    def _saved_names(self) -> Sequence[str]:
        return self._stages.names(self.session) if self._stages else self.session.table.names

    def _require_own(self) -> None:
        """Raise UnsupportedError where `state` or `param_groups` was replaced.

        Here or in the old object: nothing would read them.
        """
        if any(each.state is not self._states for each in (self, self._original)):
            raise UnsupportedError("optimizer.state was replaced, which would have no effect; empty it with optimizer.state.clear(), "
                                   "or write it with optimizer.load_state_dict() or optimizer.state[parameter] = {...}")
        if any(each.param_groups is not self.session.groups for each in (self, self._original)):
            raise UnsupportedError("optimizer.param_groups was replaced, which would have no effect; write the options into the groups "
                                   "that are there (optimizer.param_groups[0]['lr'] = ...), or use optimizer.load_state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "the optimizer of a compiled model was copied or pickled: its states belong to a running engine. Save or copy "
            "optimizer.state_dict() instead; a copied or pickled model is a plain one, for which a new optimizer can load it"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once compiled. Raises UnsupportedError."""
        if hasattr(self, "session"):
            raise UnsupportedError("a parameter group was added after hytrain_fx.compile(); add it to the optimizer first, then compile")
        super().add_param_group(param_group)


def states_before(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state_dict() of an optimizer in torch's own form, whatever its class makes of it.

    Of one that was compiled before, what its session has left.
    """
    earlier = getattr(vars(optimizer).get("add_param_group"), "__self__", None)
    if isinstance(earlier, OffloadedOptimizer):
        found = OffloadedOptimizer.state_dict(earlier)
        follow_weights(optimizer, found)
        return found
    return torch.optim.Optimizer.state_dict(optimizer) if overrides(type(optimizer), "state_dict") else optimizer.state_dict()


def _hand_over(original: torch.optim.Optimizer, ours: OffloadedOptimizer) -> None:
    """Calls on the user's old object reach ours: it no longer owns the states."""
    for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        setattr(original, name, getattr(ours, name))

    def step(closure: Callable[[], Any] | None = None) -> Any:
        return ours.step(closure)

    # A scheduler made before compile() looks for its mark on step() and warns where it is gone;
    # ours notes the call in its place.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    original.step = step  # type: ignore[method-assign]
    original.state = ours.state
    original._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # fused: GradScaler would leave its numbers at the old object
    hand_over_hooks(original, ours, _refuse_old_step)


def _nobody_shares(scaler: torch.amp.GradScaler) -> None:
    return None


def _refuse_old_step(*_: Any) -> None:
    """For a `step` that a wrapper took from the old object before it was replaced.

    It would keep no moments.
    """
    raise UnsupportedError(
        "step() of the optimizer as it was before hytrain_fx.compile() was called: something took that method before (a wrapper with a "
        "GradScaler, as accelerator.prepare() makes); call hytrain_fx.compile() before it, and wrap the optimizer that is returned"
    )
