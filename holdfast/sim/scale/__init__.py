"""Simulated jobs with thousands of GPUs over months: published failures, met by holdfast or by others' practices."""
