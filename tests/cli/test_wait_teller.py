"""The console of a job that lacks nodes says what is waited for."""

from holdfast.cli.launch.wait_teller import WaitTeller
from tests.core.test_node_wait_text import Waiting


def test_the_console_is_told_after_a_while_and_again_only_of_news() -> None:
    job, said, now = Waiting(), list[str](), 0.0
    teller = WaitTeller(job.decider.view, lambda: now, said.append)

    def look(at: float) -> int:
        teller.tell_wait(at)
        return len(said)

    job.lose()
    assert [look(at) for at in (21.0, 39.0, 40.0, 41.0)] == [0, 0, 1, 1]
    assert said[0].startswith("the job has waited 20 s for 1 of 2 nodes, to replace b (ranks 2-3): ")
    job.give(42.0, "c")
    assert [look(at) for at in (43.0, 69.0, 70.0, 71.0)] == [1, 1, 2, 2], "news wait a little, too"
    assert [look(at) for at in (669.0, 670.0)] == [2, 3], "a reminder"
    job.ready(680.0, "c")
    assert look(681.0) == 3
