"""Snapshots of a rank's state: which tensors, by which route, on which stream they are copied."""
