"""Policies that keep a pipeline training when workers are lost or join. Each proposes a plan, and the cheapest is
taken."""
