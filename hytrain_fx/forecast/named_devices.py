"""Machines known by name, each figure with its source.

Of the H200 machine rates were measured. Of the others arithmetic, memory and link are those of data
sheets times the shares that the H200 reached of its own data sheet; their hosts are estimated.
"""

from __future__ import annotations

from pathlib import Path

from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.ir.named_files import read_text
from hytrain_fx.ir.states import UPDATE_BYTES_PER_PARAM

GIB = 1 << 30
# Share of the memory's peak rate that a fused AdamW reaches on the measured H200 (122.6 of 171 G
# parameters/s).
DEVICE_UPDATE_SHARE = 0.7
# share of the peak that a compiled Llama step reaches on the measured H200 (525 of 989 TFLOP/s)
MATMUL_SHARE = 0.53
# share of a PCIe link's rate each way with both ways busy on the measured H200 (47.9 of 64 GB/s)
LINK_SHARE = 0.75
CHANNELS_SHARE = 0.7  # share of the peak of a host's memory channels, assumed


def known_devices() -> dict[str, DeviceSpec]:
    """Devices known by name."""
    return {spec.name: spec for spec in (_h200(), _h100(), _a100(), _rtx4090(), _v100(), _cpu_laptop())}


def find_device(source: str | Path) -> DeviceSpec:
    """A known device by name, or one described in a JSON file.

    Raises ConfigError when it is neither.
    """
    known = known_devices()
    if str(source).lower() in known:
        return known[str(source).lower()]
    path = Path(source)
    if path.is_file():
        return DeviceSpec.from_json(read_text(path))
    raise ConfigError(f"found neither a file {str(source)!r} nor a device of that name; the names are {', '.join(known)}")


def _h200() -> DeviceSpec:
    copies = "measured: pinned copies of 16 MB, both ways at once, 95.9 GB/s together; PCIe 5 x16"
    return DeviceSpec(
        "h200", achieved_flops=525e12, memory_bytes=139 * GIB, memory_bytes_per_s=4.8e12, d2h_bytes_per_s=47.9e9, h2d_bytes_per_s=47.9e9,
        cpu_update_params_per_s=5.9e9, gpu_update_params_per_s=122.6e9, host_memory_bytes=128 * GIB, host_memory_gb_per_s=215,
        sources={
            "achieved_flops": "measured: compiled forward and backward, 3.14 G and 6.74 G parameters, 4 x 2048 tokens: 0.309 and 0.628 s",
            "memory_bytes": "measured: what the driver gives",
            "memory_bytes_per_s": "data sheet: NVIDIA H200, 4.8 TB/s",
            "d2h_bytes_per_s": copies, "h2d_bytes_per_s": copies,
            "cpu_update_params_per_s": "measured: the native engine in place, 14 workers, 16 Xeon cores, bf16, every state on the host",
            "gpu_update_params_per_s": "measured: fused AdamW",
            "host_memory_bytes": "measured: what the system gives",
            "host_memory_gb_per_s": "measured: AdamW of 14 threads beside copies both ways (python -m benchmarks contention)",
        })


def _h100() -> DeviceSpec:
    h200 = _h200()
    as_measured = {name: f"estimated: as {h200.sources[name].split(': ', 1)[1]}, on the H200 machine"
                   for name in ("cpu_update_params_per_s", "host_memory_gb_per_s")}
    return _from_data_sheet(
        "h100", "NVIDIA H100 SXM", tflops=(989, "BF16 dense"), memory_gib=80, memory_gb_per_s=3350, link=("PCIe 5 x16", 64),
        host_gparams_per_s=h200.cpu_update_params_per_s / 1e9, host_memory_gb_per_s=215, host_sources=as_measured)


def _a100() -> DeviceSpec:
    return _from_data_sheet(
        "a100-80", "NVIDIA A100 80GB SXM", tflops=(312, "BF16 dense"), memory_gib=80, memory_gb_per_s=2039, link=("PCIe 4 x16", 32),
        host_gparams_per_s=3.7, host_memory_gb_per_s=CHANNELS_SHARE * 204.8,
        host_sources=_host("cores that update at 105 GB/s", "8 channels of DDR4-3200, 204.8 GB/s"))


def _rtx4090() -> DeviceSpec:
    return _from_data_sheet(
        "rtx4090", "NVIDIA Ada white paper, RTX 4090", tflops=(165, "FP16 with FP32 accumulate"), memory_gib=24, memory_gb_per_s=1008,
        link=("PCIe 4 x16", 32), host_gparams_per_s=1.6, host_memory_gb_per_s=CHANNELS_SHARE * 89.6,
        host_sources=_host("cores that update at 45 GB/s", "2 channels of DDR5-5600, 89.6 GB/s"))


def _v100() -> DeviceSpec:
    return _from_data_sheet(
        "v100", "NVIDIA V100 SXM2", tflops=(125, "FP16; it has no BF16"), memory_gib=32, memory_gb_per_s=900, link=("PCIe 3 x16", 16),
        host_gparams_per_s=2.1, host_memory_gb_per_s=CHANNELS_SHARE * 128,
        host_sources=_host("cores that update at 60 GB/s", "6 channels of DDR4-2666, 128 GB/s"))


def _cpu_laptop() -> DeviceSpec:
    figures = {
        "achieved_flops": (0.4e12, "8 cores with AVX2, half of 0.8 TFLOP/s in fp32"), "memory_bytes": (16 * GIB, "16 GiB, the host's own"),
        "memory_bytes_per_s": (40e9, "2 channels, shared with the host side"), "d2h_bytes_per_s": (10e9, "copies within that memory"),
        "h2d_bytes_per_s": (10e9, "copies within that memory"), "cpu_update_params_per_s": (1.4e9, "that memory at 28 bytes a parameter"),
        "gpu_update_params_per_s": (1.4e9, "the same cores"), "host_memory_bytes": (16 * GIB, "16 GiB"),
        "host_memory_gb_per_s": (40.0, "2 channels, shared with the device side"),
    }
    values = {name: value for name, (value, _) in figures.items()}
    return DeviceSpec("cpu-laptop", sources={name: f"estimated: {why}" for name, (_, why) in figures.items()}, **values)  # type: ignore[arg-type]


def _host(cores: str, channels: str) -> dict[str, str]:
    return {"cpu_update_params_per_s": f"estimated: {cores}",
            "host_memory_gb_per_s": f"estimated: {CHANNELS_SHARE:.0%} of {channels}"}


def _from_data_sheet(
    name: str, sheet: str, *, tflops: tuple[float, str], memory_gib: int, memory_gb_per_s: float, link: tuple[str, float],
    host_gparams_per_s: float, host_memory_gb_per_s: float, host_sources: dict[str, str],
) -> DeviceSpec:
    peak, precision = tflops
    bus, link_gb_per_s = link
    copies = f"data sheet: {LINK_SHARE:.0%} of {bus}, {link_gb_per_s:g} GB/s each way"
    return DeviceSpec(
        name, achieved_flops=MATMUL_SHARE * peak * 1e12, memory_bytes=memory_gib * GIB, memory_bytes_per_s=memory_gb_per_s * 1e9,
        d2h_bytes_per_s=LINK_SHARE * link_gb_per_s * 1e9, h2d_bytes_per_s=LINK_SHARE * link_gb_per_s * 1e9,
        cpu_update_params_per_s=host_gparams_per_s * 1e9,
        gpu_update_params_per_s=DEVICE_UPDATE_SHARE * memory_gb_per_s * 1e9 / UPDATE_BYTES_PER_PARAM, host_memory_bytes=128 * GIB,
        host_memory_gb_per_s=host_memory_gb_per_s,
        sources={
            "achieved_flops": f"data sheet: {sheet}, {MATMUL_SHARE:.0%} of {peak:g} TFLOP/s ({precision})",
            "memory_bytes": f"data sheet: {sheet}",
            "memory_bytes_per_s": f"data sheet: {sheet}, {memory_gb_per_s:g} GB/s",
            "d2h_bytes_per_s": copies, "h2d_bytes_per_s": copies,
            "gpu_update_params_per_s": f"estimated: {DEVICE_UPDATE_SHARE:.0%} of the memory, {UPDATE_BYTES_PER_PARAM} bytes a parameter",
            "host_memory_bytes": "estimated: 128 GiB",
            **host_sources,
        })
