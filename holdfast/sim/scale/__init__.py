"""Simulated jobs with thousands of GPUs over months: published failures, holdfast's decisions, others' practices."""
