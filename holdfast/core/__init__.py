"""The decision logic of a job: pure functions and one state machine, which get the time and events as arguments."""
