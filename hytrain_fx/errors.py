"""Every error this library raises on purpose.

    HytrainError
    ├── ConfigError            an option has a wrong type, range or combination
    ├── UnsupportedError       the model, optimizer or torch version is outside what is supported
    ├── CaptureError           a captured graph does not have the shape the rewrite needs
    ├── GraphInvariantError    a pass failed, or left a graph that is invalid or breaks a rule of
                               `passes.verify`
    ├── PlanError              a plan does not fit the model, or no plan fits the memory
    ├── HostMemoryError        the host cannot hold the optimizer states
    ├── EngineError            the runtime failed: build, worker, copy, time-out
    │   ├── DroppedNodeError   an inserted node did not run
    │   └── NonFiniteGradientError  a step was left out: its gradients held NaN or infinities
    ├── RankError              ranks do not train alike, or one of them does not answer
    ├── StatesError            loading optimizer states ended half-way, so they are a mixture of old
                               and new ones
    └── GradientConsumedError  `.grad` was read after another gradient had taken its memory

Each message says what was found, what was expected and what to do. HytrainWarning is a warning of
the same kind, where training goes on.
"""


class HytrainWarning(UserWarning):
    """Something works, but not as well as it could; the message says what to write."""


class HytrainError(Exception):
    """Base of every error raised by hytrain_fx."""


class ConfigError(HytrainError, ValueError):
    """An option has a wrong type, range or combination."""


class UnsupportedError(HytrainError, TypeError):
    """The model, the optimizer or the torch version is outside what is supported."""


class CaptureError(HytrainError, RuntimeError):
    """A captured graph does not have the shape the rewrite needs."""


class GraphInvariantError(HytrainError, RuntimeError):
    """A pass failed, or left a graph that is invalid or breaks a rule of `passes.verify`.

    The message names the pass.
    """


class PlanError(HytrainError, ValueError):
    """A plan does not fit the model, or no plan fits the memory."""


class HostMemoryError(HytrainError, MemoryError):
    """The host cannot hold the optimizer states; raised before anything is allocated."""


class EngineError(HytrainError, RuntimeError):
    """The runtime failed: its build, a worker, a copy, or a wait that ran out of time."""


class DroppedNodeError(EngineError):
    """A node that the passes inserted did not run; training would have gone on without it."""


class NonFiniteGradientError(EngineError):
    """A step was left out because a gradient held NaN or infinities, with `on_nonfinite="raise"`.

    Training may go on.
    """


class RankError(HytrainError, RuntimeError):
    """The ranks of a process group do not train alike, or one of them does not answer.

    It cannot be trained on with: start all ranks again, from a checkpoint.
    """


class StatesError(HytrainError, RuntimeError):
    """Loading optimizer states ended in an error half-way.

    They cannot be trained with or saved until they are loaded again.
    """


class GradientConsumedError(HytrainError, RuntimeError):
    """A gradient was read after it was dropped and another had taken its memory."""
