"""Who is believed about the checkpoints at the job's storage."""

from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.model.job_and_seats import Job
from holdfast.wire import agent_messages
from tests.controller.conftest import Open


class ListedTable:
    """What has been put into the table of checkpoints."""

    def __init__(self) -> None:
        self.told: list[CheckpointListing] = []

    def put_listing(self, listing: CheckpointListing) -> None:
        self.told.append(listing)


async def test_what_is_on_storage_is_believed_of_the_node_of_rank_0_alone(desk_of: Open) -> None:
    table = ListedTable()
    job = Job(run_id="r", min_nodes=1, max_nodes=1, standbys=1, can_acquire=False)
    async with desk_of(job, checkpoints=table) as desk:
        trains, waits = await desk.train("a"), await desk.link("b")
        await waits.hello()
        await desk.until(lambda: "b" in desk.controller.view.pool, "a standby")
        told = [
            CheckpointListing(generation=generation, base=base)
            for generation, base in ((1, "/forged"), (2, "/early"), (1, "/ckpt"))
        ]
        for agent, listing in zip((waits, trains, trains), told, strict=True):
            await agent.ws.send_bytes(agent_messages.encode(listing))
        await desk.until(lambda: table.told, "a listing")
        assert table.told == told[2:]


async def test_a_listing_that_no_table_waits_for_is_left_alone(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train("a")
        await agent.ws.send_bytes(agent_messages.encode(CheckpointListing(generation=1, base="/ckpt")))
        await agent.beat(2)
        await desk.until(lambda: desk.controller.registry.beats["a"].step == 2, "that the link goes on")
