"""Faults inside a rank."""
