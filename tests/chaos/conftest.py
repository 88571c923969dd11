"""Jobs to be struck: those of the command line's own tests."""

from tests.cli.conftest import start

__all__ = ["start"]
