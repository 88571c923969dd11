"""Detectors: each turns signals into alarms, and holds no opinion on what to do about them."""
