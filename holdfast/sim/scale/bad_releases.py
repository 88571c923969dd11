"""Releases that fail: which ones do, and whether the running release is one of them."""

from holdfast.sim.scale.failure_mixes import FailureMode


class BadReleases:
    def __init__(self) -> None:
        self.running = ""  # digest of what runs
        self._bad: dict[str, FailureMode] = {}  # by their digest
        self._brought = 0
        self._lasting: FailureMode | None = None  # in whichever release runs

    def add_release(self, fault: FailureMode) -> str:
        """Add a release with this failure; return its digest."""
        self._brought += 1
        digest = f"bad-{self._brought}"
        self._bad[digest] = fault
        return digest

    def make_lasting(self, fault: FailureMode) -> None:
        """Make a fault appear in every release, so that a rollback does not help."""
        self._lasting = fault

    def find_fault(self, digest: str) -> FailureMode | None:
        return self._bad.get(digest) or self._lasting

    def mend_fault(self, name: str) -> bool:
        """Fix a fault in all releases; return whether the running release had it."""
        shown = self.find_fault(self.running)
        if self._lasting is not None and self._lasting.name == name:
            self._lasting = None
        self._bad = {digest: bad for digest, bad in self._bad.items() if bad.name != name}
        return shown is not None and shown.name == name
