"""Detectors, which turn signals into alarms; they do not decide what to do about an alarm."""
