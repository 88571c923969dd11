"""A doubt about states of the job: which of them no launch may restore."""

import msgspec


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A ban on restoring states that this generation or an older one made after step `not_after`."""

    generation: int
    not_after: int
    proved: bool = False  # these states were wrong, as replicas differed; else they are only suspected
    until: int | None = None  # sound steps were made again up to here: what is older is not doubted for later runs

    @property
    def for_later_runs(self) -> "Doubt":
        """Return the doubt as later runs are to have it."""
        until = self.until
        return self if until is None else msgspec.structs.replace(self, not_after=until, until=None)

    def bans_state(self, generation: int, step: int) -> bool:
        return generation <= self.generation and step > self.not_after
