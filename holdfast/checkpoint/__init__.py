"""Snapshots in memory, their layout, and checkpoints on storage."""
