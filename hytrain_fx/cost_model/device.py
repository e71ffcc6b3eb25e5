"""What a machine can do, and from that a profile nobody measured: for reports made without the machine.

A layer's forward takes the longer of its arithmetic and its memory traffic,

    forward = max( (2 matmul_params + 2 * 2 attention_width * sequence / (2 if causal)) * tokens / achieved_flops,
                   bytes(weights, twice the saved activations) / memory_bytes_per_s )

its backward twice that, and once more with recomputation. Figures are measured ones where `source` says so, else those of data
sheets times the shares named there. A run measures its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hytrain_fx.cost_model.shapes import ModelShape, UnitShape
from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import STATE_BYTES_PER_PARAM

GIB = 1 << 30
GRAD_BYTES_PER_PARAM = 2  # 16-bit training copies: their gradients and their new weights cross the link in 16 bit
UPDATE_MEMORY_BYTES = 28  # an exact AdamW step: g16 in, w16 out, fp32 w, m and v in and out
DEVICE_UPDATE_SHARE = 0.7  # of the memory's peak rate that a fused AdamW reaches on the measured H200 (122.6 of 171 G parameters/s)
MATMUL_SHARE = 0.53  # of the peak that a compiled Llama step reaches on the measured H200 (525 of 989 TFLOP/s)
LINK_SHARE = 0.75  # of a PCIe link's rate each way with both ways busy on the measured H200 (47.9 of 64 GB/s)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Rates of one device and its host.

    achieved_flops            of a compiled training step's matrix products, FLOP/s
    memory_bytes, memory_bytes_per_s    of the device
    d2h_bytes_per_s, h2d_bytes_per_s    pinned copies with both directions busy
    cpu_update_params_per_s   exact fp32 AdamW by all cores of the host
    gpu_update_params_per_s   the same on the device
    host_memory_bytes         of the host
    source                    where the figures come from
    """

    name: str
    achieved_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    cpu_update_params_per_s: float
    gpu_update_params_per_s: float
    host_memory_bytes: int
    source: str

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("name", "source") and not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"device {self.name!r}: found {f.name}={value!r}, expected a number > 0")

    def to_json(self) -> str:
        """This spec as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> DeviceSpec:
        """Read `to_json`'s text back. Raises ConfigError where it is not such a text."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            expected = ", ".join(f.name for f in fields(cls))
            raise ConfigError(f"this is not a device description: {error}; expected a JSON object with {expected}") from error


def known_devices() -> dict[str, DeviceSpec]:
    """Devices known by name."""
    h200 = DeviceSpec(
        "h200", achieved_flops=525e12, memory_bytes=139 * GIB, memory_bytes_per_s=4.8e12, d2h_bytes_per_s=47.9e9, h2d_bytes_per_s=47.9e9,
        cpu_update_params_per_s=4.1e9, gpu_update_params_per_s=122.6e9, host_memory_bytes=128 * GIB,
        source="measured on one H200 with PCIe 5 x16 and 16 Xeon cores: compiled 3.14 G and 6.74 G parameter steps of 4 x 2048 "
               "tokens in 0.309 s and 0.628 s, both copy directions together 95.9 GB/s, "
               "DeepSpeedCPUAdam 4.1 G parameters/s, fused AdamW on the device")
    return {spec.name: spec for spec in (
        h200,
        _from_data_sheet("h100", tflops=989, memory_gib=80, memory_gbytes_per_s=3350, link_gbytes_per_s=64, host_gparams_per_s=4.1,
                         source="NVIDIA H100 SXM data sheet (BF16 dense 989 TFLOP/s, 3.35 TB/s); host as on the measured H200 machine"),
        _from_data_sheet("a100-80", tflops=312, memory_gib=80, memory_gbytes_per_s=2039, link_gbytes_per_s=32, host_gparams_per_s=3.7,
                         source="NVIDIA A100 80GB SXM data sheet (BF16 312 TFLOP/s, 2039 GB/s, PCIe 4); "
                                "host assumed to update at 105 GB/s"),
        _from_data_sheet("rtx4090", tflops=165, memory_gib=24, memory_gbytes_per_s=1008, link_gbytes_per_s=32, host_gparams_per_s=1.6,
                         source="NVIDIA Ada white paper (RTX 4090: FP16 with FP32 accumulate 165 TFLOP/s, 1008 GB/s, PCIe 4); "
                                "host assumed: two channels of DDR5, 45 GB/s"),
        _from_data_sheet("v100", tflops=125, memory_gib=32, memory_gbytes_per_s=900, link_gbytes_per_s=16, host_gparams_per_s=2.1,
                         source="NVIDIA V100 SXM2 data sheet (FP16 125 TFLOP/s, 900 GB/s, PCIe 3; no BF16); "
                                "host assumed to update at 60 GB/s"),
        DeviceSpec("cpu-laptop", achieved_flops=0.4e12, memory_bytes=16 * GIB, memory_bytes_per_s=40e9, d2h_bytes_per_s=10e9,
                   h2d_bytes_per_s=10e9, cpu_update_params_per_s=1.4e9, gpu_update_params_per_s=1.4e9, host_memory_bytes=16 * GIB,
                   source="assumed: 8 cores with AVX2 at half of 0.8 TFLOP/s (fp32), 40 GB/s of memory shared by device and host side"),
    )}


def find_device(source: str | Path) -> DeviceSpec:
    """A known device by name, or one described in a JSON file. Raises ConfigError when it is neither."""
    known = known_devices()
    if str(source).lower() in known:
        return known[str(source).lower()]
    path = Path(source)
    if path.is_file():
        return DeviceSpec.from_json(path.read_text())
    raise ConfigError(f"found neither a file {str(source)!r} nor a device of that name; the names are {', '.join(known)}")


def analytic_profile(
    shape: ModelShape, device: DeviceSpec, tokens: int, recompute: bool = False, *, sequence: int | None = None
) -> Profile:
    """Times of every unit for one micro-batch of `tokens` tokens in 16 bit, from FLOPs and bytes.

    `sequence` is the length of one sequence, by default the shape's longest that is not above `tokens`; `recompute` adds a second
    forward of each layer to its backward. Raises ConfigError for lengths that are not positive.
    """
    sequence = min(tokens, shape.context) if sequence is None else sequence
    if tokens < 1 or sequence < 1:
        raise ConfigError(f"found {tokens} tokens in sequences of {sequence}, expected both >= 1")
    units = tuple(_unit_profile(u, shape, device, tokens, sequence, recompute) for u in shape.units)
    return Profile(units, device.name, f"host of {device.name}", tokens=tokens, steps=0)


def _unit_profile(u: UnitShape, shape: ModelShape, device: DeviceSpec, tokens: int, sequence: int, recompute: bool) -> UnitProfile:
    attention = 4 * u.attention_width * sequence / (2 if shape.causal else 1)
    arithmetic_s = (2 * u.matmul_params + attention) * tokens / device.achieved_flops
    weight_params = u.matmul_params or tokens * u.output_values  # an embedding reads only the rows it looks up
    traffic_bytes = 2 * weight_params + 2 * 2 * (u.saved_values + u.output_values) * tokens
    forward_us = 1e6 * max(arithmetic_s, traffic_bytes / device.memory_bytes_per_s)
    backward_us = forward_us * (3 if recompute and u.attention_width else 2)
    grad_bytes = GRAD_BYTES_PER_PARAM * u.params
    return UnitProfile(
        u.index, u.name, u.params, grad_bytes, forward_us, backward_us,
        cpu_update_us=1e6 * u.params / device.cpu_update_params_per_s,
        gpu_update_us=1e6 * u.params / device.gpu_update_params_per_s,
        d2h_us=1e6 * grad_bytes / device.d2h_bytes_per_s,
        h2d_us=1e6 * grad_bytes / device.h2d_bytes_per_s,
        stream_in_us=1e6 * STATE_BYTES_PER_PARAM * u.params / device.h2d_bytes_per_s,
        stream_out_us=1e6 * STATE_BYTES_PER_PARAM * u.params / device.d2h_bytes_per_s)


def _from_data_sheet(
    name: str, *, tflops: float, memory_gib: int, memory_gbytes_per_s: float, link_gbytes_per_s: float, host_gparams_per_s: float,
    source: str,
) -> DeviceSpec:
    return DeviceSpec(
        name, achieved_flops=MATMUL_SHARE * tflops * 1e12, memory_bytes=memory_gib * GIB, memory_bytes_per_s=memory_gbytes_per_s * 1e9,
        d2h_bytes_per_s=LINK_SHARE * link_gbytes_per_s * 1e9, h2d_bytes_per_s=LINK_SHARE * link_gbytes_per_s * 1e9,
        cpu_update_params_per_s=host_gparams_per_s * 1e9,
        gpu_update_params_per_s=DEVICE_UPDATE_SHARE * memory_gbytes_per_s * 1e9 / UPDATE_MEMORY_BYTES, host_memory_bytes=128 * GIB,
        source=f"{source}; {MATMUL_SHARE:.0%} of peak arithmetic and {LINK_SHARE:.0%} of the link assumed, host memory assumed 128 GiB")
