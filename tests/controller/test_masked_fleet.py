"""What a cluster says is masked before it is anything to the controller, and else as it was."""

from collections.abc import Collection

import pytest

from holdfast.controller.masked_fleet import MaskedFleet
from holdfast.controller_interfaces import Fleet, FleetRefusal
from holdfast.logs.secret_masking import Masker
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.observation import Departure

SECRET = "correct-horse-battery"
QUOTED = f'Pod "n1" is invalid: spec.containers[0].env[3].value: Invalid value: "{SECRET}"'


class Cluster:
    can_acquire, survey_s = True, 2.0

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.ended: list[tuple[str, str, Dismissal]] = []

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        if self.error:
            raise self.error
        return tuple(f"n{number}" for number in range(count) if f"n{number}" not in evicted)

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        if self.error:
            raise self.error
        self.ended.append((node, reason, cause))

    async def survey(self) -> dict[str, FleetNode]:
        if self.error:
            raise self.error
        return {
            "n0": FleetNode(state=FleetState.UP, host="h0"),
            "n1": FleetNode(state=FleetState.QUEUED, reason=QUOTED, host="h1", near=("rack",)),
        }

    def nodes(self) -> tuple[str, ...]:
        return ("n0", "n1")

    def departures(self) -> tuple[Departure, ...]:
        return ()


def masked(cluster: Cluster) -> Fleet:
    return MaskedFleet(cluster, Masker(hosts=False, known=[SECRET]))


@pytest.mark.parametrize("kind", [OSError, FleetRefusal, PermissionError])
async def test_what_a_cluster_refuses_is_told_without_secrets(kind: type[OSError]) -> None:
    fleet = masked(Cluster(kind(QUOTED)))
    for call in (fleet.acquire(2), fleet.give_back("n0", "over"), fleet.survey()):
        with pytest.raises(OSError, match="Invalid value") as told:
            await call
        assert str(told.value) == QUOTED.replace(SECRET, "<secret>")
        assert isinstance(told.value, FleetRefusal) is (kind is FleetRefusal)


async def test_an_error_without_secrets_stays_what_it_is() -> None:
    error = TimeoutError("no answer within 5 s")
    with pytest.raises(TimeoutError) as told:
        await masked(Cluster(error)).acquire(1)
    assert told.value is error


async def test_reasons_are_masked_and_all_else_is_passed_on() -> None:
    cluster = Cluster()
    fleet, plain = masked(cluster), await cluster.survey()
    seen = await fleet.survey()
    assert seen["n0"] == plain["n0"]
    assert seen["n1"].reason == QUOTED.replace(SECRET, "<secret>")
    assert (seen["n1"].host, seen["n1"].near) == ("h1", ("rack",))
    assert await fleet.acquire(3, ("n1",)) == ("n0", "n2")
    await fleet.give_back("n0", "over", Dismissal.ENDED)
    assert cluster.ended == [("n0", "over", Dismissal.ENDED)]
    assert (fleet.can_acquire, fleet.survey_s, fleet.nodes(), fleet.departures()) == (True, 2.0, ("n0", "n1"), ())
