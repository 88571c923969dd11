"""Faults inside a rank: torch hooks that carry out chaos's orders, which are files in the node's folder.

`holdfast run --preload holdfast.chaos.inrank` loads the hooks into the process that ranks are forked from. Without an
order, the hooks cost one look at a folder per step. An order is for the node, so ranks of a replay there obey it too.
"""

from holdfast.chaos.inrank.order_hooks import install_hooks

install_hooks()
