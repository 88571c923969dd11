"""Diagnostics that the controller orders: probes, pair tests and replays."""
