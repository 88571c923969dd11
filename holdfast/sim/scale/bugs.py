"""Releases that fail: which of them do, and whether what runs is one of them."""

from holdfast.sim.scale.mixes import Fault


class Bugs:
    def __init__(self) -> None:
        self.running = ""  # digest of what runs
        self._bad: dict[str, Fault] = {}  # by their digest
        self._brought = 0
        self._lasting: Fault | None = None  # in whichever release runs

    def bring(self, fault: Fault) -> str:
        """The digest of a release that fails like this."""
        self._brought += 1
        digest = f"bad-{self._brought}"
        self._bad[digest] = fault
        return digest

    def last(self, fault: Fault) -> None:
        """Going back does not help against this one."""
        self._lasting = fault

    def of(self, digest: str) -> Fault | None:
        return self._bad.get(digest) or self._lasting

    def mend(self, name: str) -> bool:
        """Whether what runs had it."""
        shown = self.of(self.running)
        if self._lasting is not None and self._lasting.name == name:
            self._lasting = None
        self._bad = {digest: bad for digest, bad in self._bad.items() if bad.name != name}
        return shown is not None and shown.name == name
