"""Simulates jobs with thousands of GPUs for months, under published failures and holdfast's or others' policies."""
