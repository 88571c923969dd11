"""The control plane in one process: the real controller and the real agents' protocol, virtual time, seeded chance."""
