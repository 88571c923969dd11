"""How a process of holdfast's own ended, in words."""

from holdfast.core.incident.incident_text import describe_exit


def describe_own_exit(code: int) -> str:
    """Return how a process of holdfast's own ended. Nobody knows who sent a SIGKILL: a person, or the OOM killer."""
    return describe_exit(code) + (" (sender unknown)" if code == -9 else "")
