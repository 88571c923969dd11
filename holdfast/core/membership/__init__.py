"""The nodes of a job: their seats, the standbys, and how many standbys to hold."""
