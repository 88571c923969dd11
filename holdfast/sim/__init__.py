"""A job in virtual time: the same decider, modelled delays, seeded faults, and checks that nothing unsafe happens."""
