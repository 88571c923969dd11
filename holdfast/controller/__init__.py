"""One per job: reads events, steps the decider, writes the journal, carries actions out."""
