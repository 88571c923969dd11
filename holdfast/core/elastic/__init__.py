"""Policies that keep a pipeline training when workers go or come: each proposes a plan, and the cheapest is taken."""
