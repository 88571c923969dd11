"""The decider and its phases: launching, recovery, planned restarts, orders of people."""
