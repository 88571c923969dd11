"""A job of thousands of GPUs over months: published failures, our decisions, and others' practice."""
