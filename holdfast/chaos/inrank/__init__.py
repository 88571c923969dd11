"""Faults inside a rank: torch hooks that do what chaos's orders, files in the node's folder, tell the rank to do.

`holdfast run --preload holdfast.chaos.inrank` loads the hooks into the process that ranks are forked from. Without an
order they cost one look at a folder per step. Orders are for the node, not for the job, so ranks of a replay obey too.
"""

from holdfast.chaos.inrank.order_hooks import install_hooks

install_hooks()
