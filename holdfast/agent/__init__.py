"""What runs on a node: the holder, and under it the agent that does the node's work."""
