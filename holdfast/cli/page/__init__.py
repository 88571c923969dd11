"""The web page of a run: where its facts come from, and how it is written into one file."""
