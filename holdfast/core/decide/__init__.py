"""The decider and its phases: launching, recovery, planned restarts and orders from people."""
