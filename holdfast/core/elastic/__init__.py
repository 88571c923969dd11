"""Policies that keep a pipeline training when workers are lost or join. Each policy proposes a plan, and the cheapest
plan is chosen."""
