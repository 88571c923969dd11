"""Environment variables that tell a rank where to report. This module imports nothing: every script loads it."""

SLOT = "HOLDFAST_SLOT"  # "<path of the arena>:<index>"
KEEPER = "HOLDFAST_KEEPER"  # path of the socket of the node's keeper
GENERATION = "HOLDFAST_GENERATION"
EVERY = "HOLDFAST_REPLICA_EVERY"  # steps between comparisons of replicas
FLIGHT = "HOLDFAST_FLIGHT"  # "<path of the arena>:<where the flight log begins>"
MADE_UP = "HOLDFAST_MADE_UP"  # "1": optimizers that the job has saved have counted a step that was none
TOLD = "HOLDFAST_TOLD"  # "1": the newest steps of the job had the script's own numbers
LOSS_SOURCE = "loss-source"  # the file beside the keeper's socket in which a rank says where its losses are read from
TRACKED_RUN = "HOLDFAST_TRACKED_RUN"  # the run's name and mark; without it W&B, MLflow and TensorBoard are left alone
TRACKERS = "trackers"  # the file beside the keeper's socket in which a rank says which of these the script uses
FIGURES = "job-figures.json"  # and the file in which it finds the job's incidents, restarts and ETTR
PATIENCE = "HOLDFAST_SURVIVE_S"  # seconds that a rank whose groups broke waits for an order; 0: nobody survives
REHEARSAL = "HOLDFAST_REHEARSAL"  # set for a new rank that joins ranks which went on: its groups are fake until it does
RESUME = "HOLDFAST_RESUME"  # the step that this launch is to restore; 0: none
SEATLESS = "seatless"  # as its value: it is not known yet when that will be
STANDING = "standing"  # the same, and there is time: no rank has died yet
