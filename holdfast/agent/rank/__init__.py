"""The ranks of a node: their processes, beats, losses, logs, stacks, and why they ended."""
