"""The start-up as a table or in two lines, the memory by tier as a table."""

from __future__ import annotations

from hytrain_fx.ir.figures import Table, bytes_text, table, time_text
from hytrain_fx.ir.startup import Phase, Startup
from hytrain_fx.runtime.states.memory_estimate import MemoryEstimate, MemoryInUse

_NONE = "-"
_LEAST_SHARE = 0.02  # of the start-up: shorter phases are not worth a word there
PHASE_WORDS = {
    Phase.SETUP: "reading model and optimizer",
    Phase.ENGINE: "engine built or loaded",
    Phase.HOST_MEMORY: "host memory made and pinned",
    Phase.MASTERS: "masters loaded",
    Phase.LOOP: "the loop, before its first forward",
    Phase.COMPILE_FORWARD: "torch.compile, forward",
    Phase.COMPILE_BACKWARD: "torch.compile, backward",
    Phase.PASSES: "passes of this library",
    Phase.WARM_UP: "warm-up steps",
    Phase.PLAN: "solving the plan",
    Phase.MOVE: "moving states",
    Phase.FIRST_STEP: "first full-speed step",
}


def startup_text(s: Startup) -> str:
    """Each phase with its time, what is this library's own, and the rate of pinning."""
    rows = [(words, time_text(s.spent_us(phase)), _note(s, phase)) for phase, words in PHASE_WORDS.items()]
    state = "from compile() to the first full-speed step" if s.complete else "from compile() to now, before the first full-speed step"
    rows.append(("all", time_text(s.total_us), f"{time_text(s.own_us)} besides torch.compile, the loop and the full-speed step"))
    return f"start-up, measured: {state}\n" + table(("phase", "time", ""), rows, words=(0, 2))


def startup_line(s: Startup) -> str:
    """The start-up in two lines.

    The sum, and the phases that took 2% of it or more, the longest first.
    """
    phases = sorted((phase for phase in PHASE_WORDS if s.spent_us(phase) >= _LEAST_SHARE * s.total_us), key=s.spent_us, reverse=True)
    words = "; ".join(f"{PHASE_WORDS[phase]} {time_text(s.spent_us(phase))}" for phase in phases)
    pinned = f"; {bytes_text(s.pinned_bytes)} pinned at {s.pinned_gb_per_s:.3g} GB/s" if s.pinned_bytes else ""
    until = "to the first full-speed step" if s.complete else "so far"
    return (f"start-up, measured: {time_text(s.total_us)} {until}, {time_text(s.own_us)} besides torch.compile, the loop and that step\n"
            f"  {words}{pinned}")


def _note(s: Startup, phase: Phase) -> str:
    if phase is Phase.HOST_MEMORY and s.pinned_bytes:
        return f"{bytes_text(s.pinned_bytes)} at {s.pinned_gb_per_s:.3g} GB/s"
    return f"steps: {s.warm_up_steps}" if phase is Phase.WARM_UP else ""


def estimate_text(e: MemoryEstimate) -> str:
    """What is about to be taken, in one line."""
    slots = f", slots for streamed weights {bytes_text(e.weight_slots_bytes)}" if e.weight_slots_bytes else ""
    return (
        f"memory, estimated: device {bytes_text(e.device_bytes)} and activations, which are known after the first steps "
        f"(weights {bytes_text(e.weights_bytes)}{slots}, states {bytes_text(e.device_states_bytes)}, "
        f"gradients up to {bytes_text(e.device_gradients_bytes)}, ring {bytes_text(e.ring_bytes)}, staging {bytes_text(e.staging_bytes)}); "
        f"host {bytes_text(e.host_bytes)} (states {bytes_text(e.host_states_bytes)}, slots {bytes_text(e.host_slots_bytes)}, "
        f"streamed {bytes_text(e.host_streamed_bytes)}), of it pinned {bytes_text(e.pinned_bytes)}"
    )


def memory_table(m: MemoryInUse) -> Table:
    """Estimated beside what is in use, by tier."""
    streams = m.weight_slots_bytes or (m.estimate is not None and m.estimate.weight_slots_bytes)
    in_slots = _estimated(m, "weight_slots_bytes"), _figure(m.weight_slots_bytes)
    slots = ("device: slots for streamed weights", *in_slots, "at least")
    rows = (
        ("device: weights", _estimated(m, "weights_bytes"), _figure(m.weights_bytes), ""),
        *((slots,) if streams else ()),
        ("device: states resting there", _estimated(m, "device_states_bytes"), _figure(m.device_states_bytes), ""),
        ("device: gradients until their update", _estimated(m, "device_gradients_bytes"), _NONE, "at most"),
        ("device: ring for gradients to the host", _estimated(m, "ring_bytes"), _figure(m.ring_bytes), ""),
        ("device: staging of streamed states", _estimated(m, "staging_bytes"), _figure(m.staging_bytes), ""),
        ("device: peak", _NONE, _figure(m.device_peak_bytes), "with activations, which are known once a step has run"),
        ("host: states and slots", _estimated(m, "host_bytes"), _figure(m.host_bytes), ""),
        ("host: of it pinned", _estimated(m, "pinned_bytes"), _figure(m.pinned_bytes), _unpinned(m)),
        ("host: states beside, in updates on a guess", _NONE, _figure(m.shadow_bytes), "the most so far; shadow_memory=... limits it"),
    )
    return Table("memory; in use: counted, the peak by CUDA's allocator", ("", "estimated", "in use", ""), rows, words=(0, 3))


def _unpinned(m: MemoryInUse) -> str:
    if not m.unpinned_bytes:
        return ""
    return f"{bytes_text(m.unpinned_bytes)} could not be: copies hold up the thread that asks for them, no states are streamed"


def _estimated(m: MemoryInUse, name: str) -> str:
    return _NONE if m.estimate is None else bytes_text(getattr(m.estimate, name))


def _figure(nbytes: int | None) -> str:
    return _NONE if nbytes is None else bytes_text(nbytes)
