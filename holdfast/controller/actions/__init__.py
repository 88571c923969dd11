"""The decider's actions carried out: launches, probes, staging, replays."""
