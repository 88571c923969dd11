"""Errors that say why a file or a database cannot serve as a journal."""


class JournalError(Exception):
    """The file or database cannot serve as a journal; one sentence says why."""


class JournalDamagedError(JournalError):
    """An entry was changed after it was written. Opening a journal file for writing sets damaged entries aside."""


class JournalFullError(JournalError):
    """There is no room for the next entry; all earlier entries are intact."""


class JournalAwayError(JournalError):
    """The database does not answer. It has all entries that were acted on, and returns them when it answers again."""


class LeaseLostError(JournalError):
    """Another controller has the lease of this run, so this one must not act any more."""


class JournalHeldError(JournalError):
    """Another process writes to the journal; it can be opened when that process has ended."""
