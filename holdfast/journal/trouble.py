"""Why a file cannot serve as a journal."""


class JournalError(Exception):
    """The file cannot serve as a journal; one sentence says why."""


class JournalFullError(JournalError):
    """There is no room for the next entry; what was written before is whole."""
