"""The command line: one module per command, and the only place that wires the parts together."""

from holdfast.cli.command_dispatch import main as main
