"""Programs of one node: the holder, and the agent that it starts to do the node's work."""
