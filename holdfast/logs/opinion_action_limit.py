"""Limits on opinions: what a language model says or a past failure suggests never evicts a machine."""

CAP = 0.6  # what a language model says is never surer than this: below all on which a machine is sent away
TEST = "run_diagnostics"
_EVICT = "evict_and_restart"


def limit_action(action: str) -> str:
    """Return the action, or run_diagnostics if it would evict a machine, so that probes decide."""
    return TEST if action == _EVICT else action
