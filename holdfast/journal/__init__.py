"""The journal, which is the record of a job: implementations of the Journal interface."""
