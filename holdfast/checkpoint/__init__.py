"""State that survives: snapshots in memory, how they are laid out, and checkpoints on storage."""
