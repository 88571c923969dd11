"""Faults inside a rank: hooks of torch that obey orders left in the node's folder.

`holdfast run --preload holdfast.chaos.inrank` brings them into the process that ranks are forked from. Without an order
they cost a look at one folder per step. They belong to the node, not to the job: ranks of a replay obey them, too.
"""

from holdfast.chaos.inrank.order_hooks import install_hooks

install_hooks()
