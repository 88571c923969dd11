"""The control plane simulated in one process: real controller and agent protocol, virtual time, seeded randomness."""
