"""Faults for real processes, each with its ground truth: what was done to whom and when, and who should notice."""
