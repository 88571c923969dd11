"""Diagnosis: from alarms to a verdict."""
