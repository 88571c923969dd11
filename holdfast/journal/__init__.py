"""The journal, the record of a job, behind the Journal port."""
