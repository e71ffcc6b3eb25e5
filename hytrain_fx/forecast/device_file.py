"""A machine described in a file of one's own: `report --device mine.toml`.

Keys are the figures of `DeviceSpec`, each with its unit in its name. The least that a file has:

    name = "my workstation"
    achieved_flops = 90e12             # FLOP/s of a training step's matrix products, not the peak
    memory_bytes = 24e9                # of the device
    memory_bytes_per_s = 1.0e12        # bytes a second of the device's memory
    d2h_bytes_per_s = 24e9             # copies to the host while others come back
    h2d_bytes_per_s = 24e9             # copies to the device, likewise
    cpu_update_params_per_s = 1.6e9    # parameters a second that all cores update with AdamW
    gpu_update_params_per_s = 25e9     # the same on the device
    host_memory_bytes = 64e9

It may also have

    host_memory_gb_per_s = 60          # 10^9 bytes a second that all cores and copies share
    gpu_link_bytes_per_s = 450e9       # of a GPU to the others of its machine, each way
    network_bytes_per_s = 50e9         # of a GPU to other machines, each way
    host_gpus = 8                      # GPUs of the host described; a report for more enlarges it
    workers = 12                       # threads that update at that rate; a report may try fewer

and tables `sources` and `about`. Without `host_gpus` the host is that of any number of GPUs.
JSON has the same keys; `python -m hytrain_fx profile` measures them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.ir.named_files import read_text


def read_device(path: Path) -> DeviceSpec:
    """The device that a file describes: TOML where its name ends in .toml, JSON otherwise.

    Raises ConfigError where it describes none.
    """
    text = read_text(path)
    try:
        return DeviceSpec.from_figures(tomllib.loads(text)) if path.suffix.lower() == ".toml" else DeviceSpec.from_json(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not a device in TOML: {error}; expected lines like memory_bytes = 24e9") from error
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from error
