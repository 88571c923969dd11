"""Replay: groups of nodes repeat the job's own work, to find a machine that computes wrongly."""
