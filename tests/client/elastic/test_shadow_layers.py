"""Shadows: what each worker keeps beside its own layers, and who sends it."""

from holdfast.client.elastic.recovery_settlement import RankReport, describe_situation, settle_step
from holdfast.client.elastic.shadow_layers import add_shadows
from holdfast.core.elastic.first_plan import first_plan
from holdfast.model.pipeline_routes import LayerTransfer, PipelineJob

BARE = first_plan(PipelineJob(layers=3, microbatches=2, stages=3), 3)


def test_each_has_the_layers_of_whom_it_sends_to() -> None:
    plan = add_shadows(BARE, BARE.held)
    assert plan.held == ((0, 1), (1, 2), (0, 2)), "the last sends to the first"
    assert plan.transfers == (LayerTransfer(1, 1, 0), LayerTransfer(2, 2, 1), LayerTransfer(0, 0, 2))
    assert plan.routes == BARE.routes


def test_what_is_there_is_not_sent() -> None:
    assert add_shadows(BARE, ((0, 1), (1, 2), (0, 2))).transfers == ()


def test_shadows_are_told_apart_from_what_a_worker_has_as_its_own() -> None:
    held = ((0, 1), (1, 2), (0, 2))
    reports = [
        RankReport(meeting=1, worker=worker, plan=BARE, layers=tuple((layer, 4) for layer in held[worker]))
        for worker in (0, 2)
    ]
    situation = describe_situation(reports, settle_step(reports))
    assert situation.held == ((0,), (2,)) and situation.shadows == ((1,), (0,))
