"""What the command line offers without a training run: reports on a model and a machine, and the measured profile of this machine."""
