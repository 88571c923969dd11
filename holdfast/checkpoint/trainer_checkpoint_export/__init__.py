"""Makes of trainers' own checkpoints what another number of ranks, or another program, can load."""
