"""From alarms to a verdict."""
