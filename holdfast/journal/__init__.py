"""The record of a job, behind the Journal port."""
