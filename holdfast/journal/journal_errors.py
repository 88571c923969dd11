"""Errors that say why a file cannot serve as a journal."""


class JournalError(Exception):
    """The file cannot serve as a journal; one sentence says why."""


class JournalDamagedError(JournalError):
    """An entry is not as it was written. Opening the journal for writing sets it aside and goes on."""


class JournalFullError(JournalError):
    """There is no room for the next entry; what was written before is whole."""
