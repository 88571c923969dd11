"""A job simulated in virtual time: the real decider, modelled delays, seeded faults, and checks for safety."""
