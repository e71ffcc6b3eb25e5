"""Machines known by name, each figure with its source.

Of the H200 machine rates were measured. Of the others the peaks are those of data sheets. What is
reached of a peak is estimated as the share that the H200 reached of its own; hosts are estimated.
"""

from __future__ import annotations

from pathlib import Path

from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.data_sheets import DATA_SHEETS, NVLINK_OF_H200, DataSheet
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.device_file import read_device
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
    return {spec.name: spec for spec in (_h200(), *map(_from_data_sheet, DATA_SHEETS), _cpu_laptop())}


def find_device(source: str | Path) -> DeviceSpec:
    """A known device by name, or one described in a TOML or JSON file.

    Raises ConfigError when it is neither.
    """
    known = known_devices()
    if str(source).lower() in known:
        return known[str(source).lower()]
    path = Path(source)
    if path.is_file():
        return read_device(path)
    raise ConfigError(f"found neither a file {str(source)!r} nor a device of that name; the names are {', '.join(known)}")


def _h200() -> DeviceSpec:
    copies = "measured: pinned copies of 16 MB, both ways at once, 95.9 GB/s together; PCIe 5 x16"
    return DeviceSpec(
        "h200", achieved_flops=525e12, memory_bytes=139 * GIB, memory_bytes_per_s=4.8e12, d2h_bytes_per_s=47.9e9, h2d_bytes_per_s=47.9e9,
        cpu_update_params_per_s=5.9e9, gpu_update_params_per_s=122.6e9, host_memory_bytes=128 * GIB, host_memory_gb_per_s=215,
        gpu_link_bytes_per_s=NVLINK_OF_H200[0] * 1e9, host_gpus=1, workers=14,
        sources={
            "achieved_flops": "measured: compiled forward and backward, 3.14 G and 6.74 G parameters, 4 x 2048 tokens: 0.309 and 0.628 s",
            "memory_bytes": "measured: what the driver gives",
            "memory_bytes_per_s": "data sheet: NVIDIA H200, 4.8 TB/s",
            "d2h_bytes_per_s": copies, "h2d_bytes_per_s": copies,
            "cpu_update_params_per_s": "measured: the native engine in place, 14 workers, 16 Xeon cores, bf16, every state on the host",
            "gpu_update_params_per_s": "measured: fused AdamW",
            "host_memory_bytes": "measured: what the system gives",
            "host_memory_gb_per_s": "measured: AdamW of 14 threads beside copies both ways (python -m benchmarks contention)",
            "gpu_link_bytes_per_s": f"data sheet: NVIDIA H200, {NVLINK_OF_H200[1]}",
        })


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


def _from_data_sheet(sheet: DataSheet) -> DeviceSpec:
    """Peaks times the shares that the H200 reached."""
    host = sheet.host
    link_bytes_per_s = LINK_SHARE * sheet.link_gb_per_s * 1e9
    of_h200 = "the share measured on the H200"
    copies = f"estimated: {LINK_SHARE:.0%} ({of_h200}) of {sheet.link}, {sheet.link_gb_per_s:g} GB/s each way"
    return DeviceSpec(
        sheet.name, achieved_flops=MATMUL_SHARE * sheet.peak_tflops * 1e12, memory_bytes=sheet.memory_gib * GIB,
        memory_bytes_per_s=sheet.memory_gb_per_s * 1e9, d2h_bytes_per_s=link_bytes_per_s, h2d_bytes_per_s=link_bytes_per_s,
        cpu_update_params_per_s=host.update_gb_per_s * 1e9 / UPDATE_BYTES_PER_PARAM,
        gpu_update_params_per_s=DEVICE_UPDATE_SHARE * sheet.memory_gb_per_s * 1e9 / UPDATE_BYTES_PER_PARAM,
        host_memory_bytes=host.memory_gib * GIB, host_memory_gb_per_s=CHANNELS_SHARE * host.memory_gb_per_s,
        gpu_link_bytes_per_s=None if sheet.gpus_link is None else sheet.gpus_link[0] * 1e9, host_gpus=1,
        sources={
            "achieved_flops": f"estimated: {MATMUL_SHARE:.0%} ({of_h200}) of {sheet.peak_tflops:g} TFLOP/s ({sheet.precision}) of the "
                              f"{sheet.document}",
            "memory_bytes": f"data sheet: {sheet.document}",
            "memory_bytes_per_s": f"data sheet: {sheet.document}, {sheet.memory_gb_per_s:g} GB/s",
            "d2h_bytes_per_s": copies, "h2d_bytes_per_s": copies,
            "cpu_update_params_per_s": f"estimated: cores that update at {host.update_gb_per_s:g} GB/s, {UPDATE_BYTES_PER_PARAM} bytes a "
                                       "parameter",
            "gpu_update_params_per_s": f"estimated: {DEVICE_UPDATE_SHARE:.0%} ({of_h200}) of the memory, {UPDATE_BYTES_PER_PARAM} bytes a "
                                       "parameter",
            "host_memory_bytes": f"estimated: {host.memory_gib} GiB",
            "host_memory_gb_per_s": f"estimated: {CHANNELS_SHARE:.0%} of {host.channels}, {host.memory_gb_per_s:g} GB/s",
            **({} if sheet.gpus_link is None else {"gpu_link_bytes_per_s": f"data sheet: {sheet.document}, {sheet.gpus_link[1]}"}),
        })
