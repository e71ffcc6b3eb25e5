"""What the makers' documents say of GPUs, and of the hosts that one would find them in.

Peak rates only, as read. What a training run reaches of them is estimated in `named_devices.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSheet:
    """A host assumed for a GPU: no document says which one it stands in.

    `update_gb_per_s` is what its cores move in updates, 10^9 bytes a second (an estimate);
    `memory_gb_per_s` the peak of `channels`.
    """

    update_gb_per_s: float
    channels: str
    memory_gb_per_s: float
    memory_gib: int = 128


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One GPU. `document` is where its figures were read.

    peak_tflops       dense matrix products in `precision`, 10^12 FLOP/s, without sparsity
    memory_gib        2^30 bytes, as drivers count them; of GDDR with ECC what that leaves
    memory_gb_per_s   peak of the device's memory, 10^9 bytes a second
    link_gb_per_s     peak of `link`, the way to the host, in one direction
    gpus_link         what joins it to the other GPUs of its machine: its peak in one direction and
                      its name; None = nothing but `link`
    """

    name: str
    document: str
    peak_tflops: float
    precision: str
    memory_gib: int
    memory_gb_per_s: float
    link: str
    link_gb_per_s: float
    host: HostSheet
    gpus_link: tuple[float, str] | None = None


_PCIE_3, _PCIE_4, _PCIE_5 = ("PCIe 3 x16", 16.0), ("PCIe 4 x16", 32.0), ("PCIe 5 x16", 64.0)
_BF16 = "BF16 dense"
_FP32_SUMS = "FP16 with FP32 accumulate, dense"
_DDR4_SERVER = HostSheet(105, "8 channels of DDR4-3200", 204.8)
_DDR5_SERVER = HostSheet(165, "8 channels of DDR5-4800, like the measured H200 machine's", 307.2)
_DESKTOP = HostSheet(45, "2 channels of DDR5-5600", 89.6)
_OLD_SERVER = HostSheet(60, "6 channels of DDR4-2666", 128)
_GRACE = HostSheet(250, "LPDDR5X of Grace (NVIDIA GH200 Grace Hopper Superchip data sheet, 2023: up to 512 GB/s)", 512, memory_gib=447)
_NVLINK_2, _NVLINK_3, _NVLINK_4, _NVLINK_5 = ((each, f"NVLink {number}, {2 * each} GB/s both ways")
                                              for number, each in ((2, 150), (3, 300), (4, 450), (5, 900)))
NVLINK_OF_H200 = _NVLINK_4
_INFINITY_FABRIC = (448, "7 links of Infinity Fabric, 128 GB/s each both ways")

DATA_SHEETS = (
    DataSheet("h100", "NVIDIA H100 Tensor Core GPU data sheet, 2023, column SXM", 989, _BF16, 80, 3350, *_PCIE_5, _DDR5_SERVER,
              _NVLINK_4),
    DataSheet("gh200", "NVIDIA GH200 Grace Hopper Superchip data sheet, 2023, 96 GB HBM3", 990, _BF16, 96, 4000,
              "NVLink-C2C, 900 GB/s both ways", 450, _GRACE, _NVLINK_4),
    DataSheet("b200", "NVIDIA HGX B200 data sheet, 2024, per GPU: 4.5 PFLOP/s with sparsity, 180 GB, 8 TB/s", 2250, _BF16, 179, 8000,
              *_PCIE_5, _DDR5_SERVER, _NVLINK_5),
    DataSheet("a100-80", "NVIDIA A100 Tensor Core GPU data sheet, 2021, column 80GB SXM", 312, _BF16, 80, 2039, *_PCIE_4, _DDR4_SERVER,
              _NVLINK_3),
    DataSheet("a100-40", "NVIDIA A100 Tensor Core GPU Architecture white paper, 2020, A100 SXM4 40GB", 312, _BF16, 40, 1555, *_PCIE_4,
              _DDR4_SERVER, _NVLINK_3),
    DataSheet("l40s", "NVIDIA L40S GPU data sheet, 2023, 48 GB with ECC", 362, _BF16, 45, 864, *_PCIE_4, _DDR4_SERVER),
    DataSheet("rtx4090", "NVIDIA Ada GPU Architecture white paper, 2022, GeForce RTX 4090", 165.2, _FP32_SUMS, 24, 1008, *_PCIE_4,
              _DESKTOP),
    DataSheet("rtx5090", "NVIDIA RTX Blackwell GPU Architecture white paper, 2025, GeForce RTX 5090", 209.5, _FP32_SUMS, 32, 1792, *_PCIE_5,
              _DESKTOP),
    DataSheet("v100", "NVIDIA V100 Tensor Core GPU data sheet, 2020, V100 SXM2 32GB", 125, "FP16; it has no BF16", 32, 900, *_PCIE_3,
              _OLD_SERVER, _NVLINK_2),
    DataSheet("mi300x", "AMD Instinct MI300X data sheet, 2023", 1307.4, _BF16, 192, 5300, *_PCIE_5, _DDR5_SERVER,
              _INFINITY_FABRIC),
)
