"""The web page of a job: it reads the journal, so live, finished and simulated jobs look alike."""
