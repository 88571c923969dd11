"""Who keeps whose snapshots."""

import pytest

from holdfast.client.elastic.kept_snapshots import choose_reach
from holdfast.core.elastic.first_plan import first_plan
from holdfast.model.pipeline_routes import PipelineJob


@pytest.mark.parametrize(
    ("stages", "workers", "node_ranks", "reach"),
    [
        (2, 4, 2, 1),  # two further on is a replica, which has the same layers
        (4, 8, 2, 2),  # on the next node
        (2, 4, 1, 1),
        (1, 3, 1, 1),  # all have the same
        (1, 1, 1, 0),
        (4, 4, 4, 1),  # one node
    ],
)
def test_snapshots_are_kept_by_others_than_replicas(stages: int, workers: int, node_ranks: int, reach: int) -> None:
    plan = first_plan(PipelineJob(layers=8, microbatches=8, stages=stages), workers)
    assert choose_reach(plan, node_ranks) == reach
