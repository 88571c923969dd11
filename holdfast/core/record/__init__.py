"""The record of a job: the account of every second, the report, and the notices for hooks."""
