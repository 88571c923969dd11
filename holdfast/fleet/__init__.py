"""Fleets, where nodes come from: one module for each kind."""
