"""Environment variables by which a rank finds where to report; every script pays for the imports here: none."""

SLOT = "HOLDFAST_SLOT"  # "<path of the arena>:<index>"
GENERATION = "HOLDFAST_GENERATION"
EVERY = "HOLDFAST_REPLICA_EVERY"  # steps between comparisons of replicas
FLIGHT = "HOLDFAST_FLIGHT"  # "<path of the arena>:<where the flight log begins>"
