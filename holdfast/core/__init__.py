"""The decisions: pure functions and one state machine, told the time and the news."""
