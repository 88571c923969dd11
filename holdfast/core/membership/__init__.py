"""The nodes of a job: seats, standbys and how many of them."""
