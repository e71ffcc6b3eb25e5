"""The tables of an offline report as text cells, for Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hytrain_fx.forecast.capacity import WAYS
from hytrain_fx.forecast.memory import DEVICE_SHARE, HOST_SHARE
from hytrain_fx.forecast.peers import Peer
from hytrain_fx.forecast.report import Report
from hytrain_fx.forecast.sharded_weights import ShardedWeights, shards_free_text
from hytrain_fx.forecast.streamed_weights import GPU_GB, HOST_GB, PUBLISHED, OfMachine, StreamedWeights, free_text
from hytrain_fx.forecast.sweep import Point
from hytrain_fx.forecast.systems import OURS, SYSTEMS
from hytrain_fx.ir.figures import Table, bytes_text, count_text, time_text
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM

IDLE_WORDS = {"gpu": "GPU", "cpu": "CPU", "d2h": "copies to the host", "h2d": "copies to the GPU", "collectives": "collectives",
              "host_memory": "host memory"}
FIGURE_WORDS = {
    "achieved_flops": "matrix products in a training step", "memory_bytes": "GPU memory", "memory_bytes_per_s": "GPU memory bandwidth",
    "d2h_bytes_per_s": "copies to the host", "h2d_bytes_per_s": "copies to the GPU", "cpu_update_params_per_s": "updates by the CPU",
    "gpu_update_params_per_s": "updates on the GPU", "host_memory_bytes": "host memory", "host_memory_gb_per_s": "host memory bandwidth",
    "gpu_link_bytes_per_s": "a GPU to the others of its machine, each way", "network_bytes_per_s": "a GPU to other machines, each way",
}
_UNITS = {"flops": (1e12, "TFLOP/s"), "bytes_per_s": (1e9, "GB/s"), "params_per_s": (1e9, "G parameters/s"), "gb_per_s": (1, "GB/s"),
          "memory_bytes": (1e9, "GB")}


def tables(report: Report) -> Iterator[Table]:
    """All tables, in reading order."""
    yield steps_table(report)
    if report.peers:
        yield peers_table(report)
    if report.streamed:
        yield from streamed_tables(report, report.streamed)
    if report.sharded:
        yield from sharded_tables(report, report.sharded)
    yield changes_table(report)
    yield idle_table(report)
    yield memory_table(report)
    yield capacity_table(report)
    if report.sweep.tokens:
        yield sweep_table(f"Step by {report.counted} in a micro-batch", "tokens", report.sweep.tokens)
    if report.sweep.sizes:
        yield sweep_table("Step by size of the model: more of the same layers", "layers", report.sweep.sizes)
    yield rates_table(report)


def steps_table(report: Report) -> Table:
    """What each system is predicted to take."""
    heads = ("system", "units on the GPU (k)", "share of the rest streamed", "step", "times forward and backward",
             f"{report.counted} a second", "the GPU waits", "updates on the GPU", "fits", "CPU workers")
    rows = tuple((r.system, str(r.k), f"{r.stream_share:.0%}", time_text(r.step_us), f"{r.step_us / report.compute_us:.2f}",
                  _per_s(report, report.tokens, r.step_us), time_text(r.stall_us), time_text(r.gpu_update_us),
                  "yes" if r.fits else "no", str(r.workers)) for r in report.rows)
    notes = dict.fromkeys(f"{row.system}: {note}" for row in report.rows for note in row.notes)
    others = "; ".join(system.name for system in SYSTEMS if not system.is_ours)
    kept = () if report.moments == "fp32" else (f"Moments rest in {report.moments} in this library's ways. In fp32 stay: {others}.",)
    return Table("Step", heads, rows, ("All systems are played with the same rates: what differs is the schedule.", *kept, *notes))


def _per_s(report: Report, tokens: int, step_us: float) -> str:
    """Tokens or samples of all ranks a second."""
    return count_text(1e6 * tokens * report.ranks.count / step_us)


def peers_table(report: Report) -> Table:
    """Other ways to train on several GPUs, and what each keeps where."""
    return _ways_table(f"Ways to train on {report.ranks.words}", report.peers, (
        "Calculated with the same rates and kernels for all. The largest model has these activations beside it.",))


def _ways_table(title: str, ways: Iterable[Peer], remarks: tuple[str, ...]) -> Table:
    heads = ("system", "step", "a GPU's memory", "a host's memory", "fits", "largest model, parameters", "how it was calculated")
    rows = tuple((p.system, time_text(p.step_us), bytes_text(p.device_bytes), bytes_text(p.host_bytes), "yes" if p.fits else "no",
                  count_text(p.most_params), p.how) for p in ways)
    return Table(title, heads, rows, remarks, words=(0, 6))


def streamed_tables(report: Report, found: StreamedWeights) -> Iterator[Table]:
    """What weights on the host cost by tokens, other ways, and the largest model by machine."""
    heads: tuple[str, ...] = (f"{report.counted} in a micro-batch", "forward and backward", "weights on the GPU", "weights on the host",
                              "times as long", "the GPU stands still while weights come")
    rows: tuple[tuple[str, ...], ...] = tuple((str(p.tokens), time_text(p.compute_us), time_text(p.resident_us), time_text(p.streamed_us),
                  f"{p.streamed_us / p.resident_us:.3f}", time_text(p.fetch_stall_us)) for p in found.by_tokens)
    yield Table("Step by where weights rest, all updates by the CPU", heads, rows, (free_text(found, report.counted),))
    yield _ways_table("Ways to train a model larger than the GPU", found.ways, (
        "Calculated with the same rates and kernels for all. This library's largest model has more of the same layers, with their "
        "activations; the others' has these activations beside it.", *PUBLISHED))
    heads = ("GPU's memory", *(f"host of {gb} GB" for gb in HOST_GB))
    sizes = {(of.gpu_gb, of.host_gb): of for of in found.machines}
    rows = tuple((f"{gpu} GB", *(_sizes_text(sizes[gpu, host]) for host in HOST_GB)) for gpu in GPU_GB)
    yield Table("Largest model by machine, all updates by the CPU", heads, rows, (
        f"Parameters with weights on the host, and in brackets with weights on the GPU: more of these layers, at {report.tokens} "
        f"{report.counted}, activations recomputed.",))


def sharded_tables(report: Report, found: ShardedWeights) -> Iterator[Table]:
    """What weights in shards cost by tokens, and the largest model by machine."""
    heads: tuple[str, ...] = (f"{report.counted} in a micro-batch", "forward and backward", "weights on each GPU", "in shards",
                              "shards on the host", "the GPU stands still for shards")
    rows = tuple((str(p.tokens), *map(time_text, (p.compute_us, p.resident_us, p.sharded_us, p.sharded_host_us, p.gather_stall_us)))
                 for p in found.by_tokens)
    yield Table(f"Step by where weights rest on {report.ranks.words}, all updates by the CPU", heads, rows,
                (shards_free_text(found, report.counted),))
    gpus, hosts = (tuple(dict.fromkeys(sizes)) for sizes in zip(*((of.gpu_gb, of.host_gb) for of in found.machines), strict=True))
    sizes = {(of.gpu_gb, of.host_gb): of.params for of in found.machines}
    heads = ("each GPU's memory", *(f"host of {gb} GB" for gb in hosts))
    rows = tuple((f"{gpu} GB", *(_params_text(sizes[gpu, host]) for host in hosts)) for gpu in gpus)
    yield Table(f"Largest model by machine, {report.ranks.words}, all updates by the CPU", heads, rows, (
        "Parameters with weights whole on each GPU, in shards on the GPUs, and in shards on the host: more of these layers, at "
        f"{report.tokens} {report.counted} a GPU, activations recomputed.",))


def _params_text(params: Mapping[str, int | None]) -> str:
    return " / ".join("-" if of is None else count_text(of) for of in params.values())


def _sizes_text(of: OfMachine) -> str:
    if of.streamed_params is None or of.resident_params is None:
        return "-"
    return f"{count_text(of.streamed_params)} ({count_text(of.resident_params)})"


def idle_table(report: Report) -> Table:
    """Shares of the step in which each resource does nothing.

    For host memory it is the share of its bandwidth that is left.
    """
    known = tuple(name for name in IDLE_WORDS if name in report.rows[0].idle_shares)
    rows = tuple((r.system, *(f"{r.idle_shares[name]:.0%}" for name in known)) for r in report.rows)
    return Table("Idle share of the step", ("system", *(IDLE_WORDS[name] for name in known)), rows)


def memory_table(report: Report) -> Table:
    """Bytes by tier."""
    heads = ("system", "GPU: weights", "gradients", "optimizer states", "activations", "GPU in all", "host: optimizer states",
             "gradients and weights in transit", "host in all")
    rows = []
    for r in report.rows:
        m = r.memory
        figures = (m.weights_bytes, m.gradients_bytes, m.gpu_states_bytes, m.activations_bytes, m.device_bytes,
                   m.host_states_bytes, m.host_slots_bytes, m.host_bytes)
        rows.append((r.system, *map(bytes_text, figures)))
    d = report.device
    shared = () if report.ranks.count == 1 else (
        f"The GPU's figures are of each one, the host's of each machine with all states of its {report.ranks.gpus} ranks.",)
    return Table("Memory", heads, tuple(rows), (*shared,
        f"There are {bytes_text(d.memory_bytes)} on the device and {bytes_text(d.host_memory_bytes)} on the host; a plan may take "
        f"{DEVICE_SHARE:.0%} and {HOST_SHARE:.0%} of them.",))


def capacity_table(report: Report) -> Table:
    """The largest model and the largest batch by way of placing states."""
    rows = tuple((WAYS[c.way], "-" if c.params is None else count_text(c.params), "-" if c.layers is None else str(c.layers),
                  str(c.tokens), str(c.tokens // report.sequence)) for c in report.capacities)
    largest = ", ".join(f"{count_text(params)} ({name})" for name, params in report.largest_params.items())
    heads = ("optimizer states", "largest model at this micro-batch, parameters", "its layers",
             f"largest micro-batch of this model, {report.counted}", "sequences")
    return Table("What fits", heads, rows,
                 (f"Most parameters of any shape beside these activations: {largest}.",))


def sweep_table(title: str, over: str, points: tuple[Point, ...]) -> Table:
    """Step over compute time by system; * where a tier does not hold it."""
    heads = (over, "parameters", "forward and backward", *(system.name for system in SYSTEMS), "units on the GPU (k) of our plan")
    rows = []
    for p in points:
        cells = (f"{p.steps_us[s.name] / p.compute_us:.2f}{'' if p.fits[s.name] else '*'}" for s in SYSTEMS)
        rows.append((str(getattr(p, over)), count_text(p.params), time_text(p.compute_us), *cells, str(p.k[OURS])))
    return Table(title, heads, tuple(rows), ("Steps in times forward and backward alone; * does not fit.",))


def changes_table(report: Report) -> Table:
    """What our plan takes with one thing changed."""
    rows = tuple((c.words, str(c.tokens), time_text(c.step_us), _per_s(report, c.tokens, c.step_us), f"{c.gain:+.0%}",
                  "yes" if c.fits else "no") for c in report.changes)
    heads = ("change", f"{report.counted} in a micro-batch", "step", f"{report.counted} a second", "gain", "fits")
    return Table("Our plan with one thing changed", heads, rows)


def rates_table(report: Report) -> Table:
    """The machine's figures with their sources."""
    figures = report.device.figures()
    rows = tuple((FIGURE_WORDS[name], figure_text(name, value), report.device.sources[name]) for name, value in figures.items())
    about = tuple(f"{name}: {value}" for name, value in report.device.about.items())
    return Table(f"Rates of {report.device.name}", ("figure", "value", "source"), rows, (*_rates_with_moments(report), *about))


def _rates_with_moments(report: Report) -> tuple[str, ...]:
    """What is taken of rates that were measured with fp32 states."""
    if report.moments == "fp32":
        return ()
    bandwidth = "what moves in the host's memory" if report.device.host_memory_gb_per_s is not None else (
        "what moves in the host's memory, whose bandwidth is not known here")
    return (f"Rates of updates are those with fp32 states, for moments in {report.moments} too: for each parameter a core then does 1.3 to "
            "1.5 times the arithmetic, so no rate rises, and where cores bind, not memory, updates may take longer than predicted. "
            f"What shrinks is what crosses the link, and {bandwidth}.",)


def figure_text(name: str, value: float) -> str:
    """A figure of a device in the unit that its name ends in."""
    scale, unit = next((known for ending, known in _UNITS.items() if name.endswith(ending)), (1, ""))
    return f"{value / scale:.4g} {unit}"


def headline(report: Report) -> str:
    """What was asked, in two sentences."""
    of_length = f" in sequences of {report.sequence}" if report.counted == "tokens" else ""
    of_rank = "" if report.ranks.count == 1 else f" on each of {report.ranks.words}"
    narrow = "" if report.moments == "fp32" else (
        f"moments in {report.moments} ({report.plan.inputs['state_bytes_per_param']:g} bytes of master and states a parameter instead of "
        f"{STATE_BYTES_PER_PARAM}), ")
    return (f"{count_text(report.params)} parameters, micro-batch of {report.tokens} {report.counted}{of_length}{of_rank}, "
            f"{'with' if report.recompute else 'no'} recomputation, {narrow}{bytes_text(report.budget_bytes)} of device memory for "
            f"optimizer states. Predicted, not measured. Forward and backward alone take {time_text(report.compute_us)}.")


def limits(report: Report) -> tuple[str, ...]:
    """From which micro-batch on updates are hidden, and the closed form with its sensitivities."""
    hidden = ", ".join(f"{count_text(tokens)} ({name})" for name, tokens in report.hidden_from_tokens.items())
    e = report.equal_layers
    return (f"All CPU updates of equal layers are hidden from this many {report.counted} in a micro-batch on: {hidden}.",
            f"{e['n']:.0f} equal layers would balance at k = {e['k']:.1f}; 1% more backward time moves k by "
            f"{e['k_per_percent_t_bwd']:+.2f}, 1% more CPU update time by {e['k_per_percent_t_cpu']:+.2f}, "
            f"1% more alpha by {e['k_per_percent_alpha']:+.3f}.")


def placement(report: Report) -> tuple[str, ...]:
    """Where each unit is updated, and why."""
    return tuple(f"{row.unit} {row.unit_name}: {row.reason}" for row in report.plan.rows)
