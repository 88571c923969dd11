"""The controller, one per job: hears events, steps the decider, writes the journal, carries actions out."""
