"""Opens the web page of a run: where its facts come from, and its file for a mail."""
