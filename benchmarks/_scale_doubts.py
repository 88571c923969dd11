"""What if: assumptions of the simulator at scale that nobody has measured, changed one at a time."""

# What is doubted -> prices and shares (holdfast/sim/scale/prices.toml), and how many times what they are.
DOUBTS: dict[str, dict[str, float]] = {
    "people take twice as long": {"person": 2.0, "person_corruption": 2.0, "page": 2.0},
    "people take half as long": {"person": 0.5, "person_corruption": 0.5, "page": 0.5},
    "a restart takes twice what ByteRobust's does": {"first_step": 2.0},
    "nobody is named for any hang": {"hang_unnamed": 1 / 0.3},
    "every hang is seen and named": {"hang_unnamed": 0.0, "hang_spinning": 0.0},
    "no hang without a name is of a GPU that stands": {"hang_gpu": 0.0},
    "all hangs without a name are of GPUs that stand": {"hang_gpu": 2.0},
    "no slow host is named": {"slow_named": 0.0},
    "bad machines fail again after 20 minutes to 5 hours": {"relapse": 20.0},
    "probes find nobody": {"probe_finds": 0.0, "probe_finds_corruption": 0.0},
    "copies to peers take 0.7 % of every step": {"backup_drag": 2.8},
    "copies to peers take nothing": {"backup_drag": 0.0},
    "the fleet takes an hour for a machine": {"boot": 12.0},
    "64 GB of state on every GPU": {"own_state": 8.0, "peer_state": 8.0, "stored_state": 8.0, "save_stall_s": 8.0},
}
