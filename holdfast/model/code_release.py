"""A release of the user's code, and its fate in a job."""

from enum import StrEnum

import msgspec

from holdfast.model.message_bounds import Number


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of files and how to run it. The job begins with release 1."""

    number: Number
    digest: str = ""  # of the tree's content; "": the user's own tree where it stands, nothing is staged
    root: str = ""  # the tree that it was taken from: what it leaves out is linked from there
    home: str = ""  # the job's own tree, where its work is kept, if that is another one
    script: str = ""  # path below the root; "": argv names it as it is (a module, or a file outside of the root)
    argv: tuple[str, ...] = ()  # as a rank gets it, but for the script's place
    env: dict[str, str] = {}  # on top of the job's environment
    source: str = ""  # in words: "~/train (git 1a2b3c4)"
    message: str = ""
    who: str = ""
    signature: str = ""  # by an ssh key, of all that decides what will run


class Fate(StrEnum):
    """What has become of a release in the job so far."""

    STAGING = "staging"  # it is checked on one node, and then brought to all
    REFUSED = "refused"
    WAITING = "waiting"  # for a restart, or for the end of its window
    MERGED = "merged"  # a newer one came while it waited
    RUNNING = "running"
    REPLACED = "replaced"  # by a newer one
    ROLLED_BACK = "rolled back"
    ENDED = "ended"  # it ran when the job ended
    LEFT = "left"  # it ran when the controller and its front went away
