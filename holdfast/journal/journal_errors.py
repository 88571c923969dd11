"""Errors that say why a file cannot serve as a journal."""


class JournalError(Exception):
    """The file cannot serve as a journal; one sentence says why."""


class JournalDamagedError(JournalError):
    """An entry was changed after it was written. Opening the journal for writing sets damaged entries aside."""


class JournalFullError(JournalError):
    """There is no room for the next entry; all earlier entries are intact."""
