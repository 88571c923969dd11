"""Nodes that somebody else starts, one `holdfast run` on each host: they come by themselves, and cannot be acquired."""


class JoinFleet:
    can_acquire = False

    def nodes(self) -> tuple[str, ...]:
        return ()

    async def acquire(self, count: int) -> tuple[str, ...]:
        raise OSError(f"this fleet cannot start nodes; start {count} more with the same command on other hosts")

    async def give_back(self, node: str, reason: str) -> None:
        """Its agent has been told to leave; one that cannot be reached stops by itself."""
