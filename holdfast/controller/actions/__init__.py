"""Carries out the decider's actions: launches, probes, staging, replays."""
