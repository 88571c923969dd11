"""Limits on opinions: what a language model says or a past failure suggests never evicts a machine."""

from holdfast.core.log_analysis.failure_catalog import FailureClass

CAP = 0.6  # what a language model says is never surer than this: below all on which a machine is sent away
TEST = "run_diagnostics"
_EVICT = "evict_and_restart"


def careful_action(klass: FailureClass) -> str:
    """Return the class's action, or run_diagnostics if that action is an eviction: then probes decide."""
    return TEST if klass.action == _EVICT else klass.action
