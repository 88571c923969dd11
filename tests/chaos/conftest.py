"""Jobs to be struck: those of the command line's own tests."""

from tests.cli.conftest import port_only, start

__all__ = ["port_only", "start"]
