"""The CPU trains a share of each batch beside the device: `share`, in the loop."""
