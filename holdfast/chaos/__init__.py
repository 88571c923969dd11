"""Faults injected into real processes, each with its ground truth: the target, the time, and the expected alarm."""
