"""`python -m benchmarks steps ...`: one case, one JSON line."""

from __future__ import annotations

import argparse

from benchmarks import steps


def main() -> None:
    """Read the command line and run one case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    steps.add_arguments(commands.add_parser("steps", help="step time of one way of training", description=steps.__doc__,
                                            formatter_class=argparse.RawDescriptionHelpFormatter))
    arguments = parser.parse_args()
    steps.report(steps.run(arguments))


if __name__ == "__main__":
    main()
