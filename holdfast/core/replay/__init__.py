"""Replays: the job's own work done again in groups, to name a machine that computes wrongly."""
