"""The phase of a job, from its start to its end."""

from enum import StrEnum


class Phase(StrEnum):
    """The phase of a job, from its start to its end."""

    NEW = "new"
    WAITING = "waiting"  # for nodes
    LAUNCHING = "launching"  # ranks are being started
    STARTING = "starting"  # ranks run, not every one has made a step
    TRAINING = "training"
    STOPPING = "stopping"
    PROBING = "probing"  # no rank runs, and nodes are tried
    PAUSING = "pausing"  # ranks are being ended on purpose: for a release, for a person, or to grow
    HELD = "held"  # no rank runs, nodes and state are kept, and a person is waited for
    ENDING = "ending"
    DONE = "done"
