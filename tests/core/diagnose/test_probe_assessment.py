"""The judge of probes: who is bad, who is under suspicion with others, and when nobody is named."""

import msgspec
import pytest

from holdfast.core.diagnose.fleet_baseline import MeasurementHistory
from holdfast.core.diagnose.probe_assessment import (
    GoldenRow,
    ProbeAssessment,
    add_to_history,
    assess_probes,
    finding_sentence,
)
from holdfast.model.probe_findings import Finding

GPU, TORCH, FORM = "NVIDIA H200", "2.11.0", "bfloat16 4096"
ROW = GoldenRow(probe="gemm_bits", device=GPU, torch=TORCH, form=FORM, digest="aaa", source="a test")
GOLDEN = {ROW.key: ROW.digest}


def bits(digest: str, place: str = "cuda:0", device: str = GPU) -> Finding:
    return Finding(
        probe="gemm_bits", level=2, ok=True, place=place, device=device, torch=TORCH, form=FORM, digest=digest
    )


def speed(value: float, *, ok: bool = True, rough: bool = False, place: str = "cuda:0") -> Finding:
    return Finding(
        probe="memory_speed",
        level=2,
        ok=ok,
        place=place,
        device=GPU,
        torch=TORCH,
        value=value,
        unit="GB/s",
        samples=tuple(value * (1 + 0.001 * i) for i in range(-3, 4)),
        rough=rough,
    )


def failed(probe: str = "memory", detail: str = "7 words lost the pattern 0x0") -> Finding:
    return Finding(probe=probe, level=1, ok=False, detail=detail, place="cuda:1")


def nodes(*findings: Finding) -> dict[str, list[Finding]]:
    return {f"n{i}": [finding] for i, finding in enumerate(findings)}


def test_nothing_wrong_names_nobody() -> None:
    judged = assess_probes(nodes(*[bits("aaa")] * 4), GOLDEN)
    assert judged == ProbeAssessment()
    assert assess_probes({}, {}) == ProbeAssessment()


def test_a_failed_probe_names_its_node() -> None:
    ok = Finding(probe="memory", level=1, ok=True)
    judged = assess_probes(nodes(ok, failed(), ok), {})
    assert list(judged.bad) == ["n1"] and failed().detail in judged.bad["n1"] and "cuda:1" in judged.bad["n1"]
    assert assess_probes(nodes(failed()), {}).bad, "one node alone has nobody to excuse it"


def test_what_could_not_be_judged_accuses_nobody() -> None:
    unknown = Finding(probe="copy_speed", level=2, ok=None, detail="there is no GPU")
    assert assess_probes(nodes(unknown, unknown), {}) == ProbeAssessment()


def test_what_fails_on_most_nodes_is_no_nodes_fault() -> None:
    full = failed("disk", "No space left on device")
    judged = assess_probes(nodes(full, full, full, Finding(probe="disk", level=1, ok=True)), {})
    assert (
        not judged.bad and len(judged.notes) == 1 and " 3 of 4 " in judged.notes[0] and full.detail in judged.notes[0]
    )
    assert not assess_probes(nodes(full, full), {}).bad


@pytest.mark.parametrize("golden", [{}, GOLDEN])
def test_one_wrong_bit_among_four_is_named(golden: dict[tuple[str, str, str, str], str]) -> None:
    judged = assess_probes(nodes(bits("aaa"), bits("aaa"), bits("bbb"), bits("aaa")), golden)
    assert list(judged.bad) == ["n2"] and not judged.suspects


def test_golden_bits_judge_one_node_alone() -> None:
    assert list(assess_probes(nodes(bits("bbb")), GOLDEN).bad) == ["n0"]
    assert "golden" in assess_probes(nodes(bits("bbb")), GOLDEN).summary_text
    assert assess_probes(nodes(bits("bbb")), {}) == ProbeAssessment()


def test_two_that_differ_are_suspects_together_unless_there_is_gold() -> None:
    judged = assess_probes(nodes(bits("aaa"), bits("bbb")), {})
    assert not judged.bad and sorted(judged.suspects) == ["n0", "n1"]
    assert "n0, n1" in judged.summary_text
    assert list(assess_probes(nodes(bits("aaa"), bits("bbb")), GOLDEN).bad) == ["n1"]


def test_without_a_majority_all_are_suspects() -> None:
    assert len(assess_probes(nodes(bits("b"), bits("b"), bits("c"), bits("c")), {}).suspects) == 4
    assert len(assess_probes(nodes(bits("b"), bits("c"), bits("d")), {}).suspects) == 3


def test_machines_that_agree_against_the_gold_have_another_library() -> None:
    for count in (2, 3, 5):
        judged = assess_probes(nodes(*[bits("bbb")] * count), GOLDEN)
        assert not judged.bad and not judged.suspects and "golden" in judged.notes[0]
    judged = assess_probes(nodes(*[bits("bbb")] * 3, bits("aaa")), GOLDEN)
    assert list(judged.bad) == ["n3"], "most nodes are believed"


def test_other_devices_versions_and_forms_are_not_compared() -> None:
    others = [bits("bbb", device="NVIDIA A100"), msgspec.structs.replace(bits("ccc"), torch="2.10.0")]
    others += [msgspec.structs.replace(bits("ddd"), form="float32 4096")]
    assert assess_probes(nodes(*[bits("aaa")] * 3, *others), {}) == ProbeAssessment()


def test_devices_of_one_node_that_differ_accuse_it() -> None:
    found = {"n0": [bits("aaa", f"cuda:{i}") for i in range(3)] + [bits("bbb", "cuda:3")]}
    judged = assess_probes(found, {})
    assert list(judged.bad) == ["n0"] and judged.bad["n0"].endswith("cuda:3")


def test_a_node_with_fewer_devices_stands_out() -> None:
    count = Finding(probe="device", level=1, ok=True, device=GPU, form="count", digest="8")
    seven = msgspec.structs.replace(count, digest="7")
    assert list(assess_probes(nodes(count, count, seven, count), {}).bad) == ["n2"]


def test_a_slow_node_is_named_with_its_value() -> None:
    judged = assess_probes(nodes(*[speed(4000.0 + i) for i in range(7)], speed(3000.0)), {})
    assert list(judged.bad) == ["n7"]
    assert "25%" in judged.bad["n7"] and "(3000 GB/s)" in judged.bad["n7"]


def test_what_is_a_little_slower_explains_no_crash() -> None:
    """Seen on a GPU that four shared: one copied 4 % slower, and was blamed for a loss that was not finite."""
    found = nodes(speed(100), speed(100), speed(96), speed(100))
    assert list(assess_probes(found, {}).bad) == ["n2"]
    spared = assess_probes(found, {}, least=0.2)
    assert spared.bad == {} and len(spared.notes) == 1 and "n2" in spared.notes[0]
    assert list(assess_probes(nodes(speed(100), speed(100), speed(60), speed(100)), {}, least=0.2).bad) == ["n2"]


def test_rough_values_are_not_judged() -> None:
    assert (
        assess_probes(nodes(*[speed(4000.0 + i, rough=True) for i in range(7)], speed(3000.0, rough=True)), {})
        == ProbeAssessment()
    )


def test_its_own_past_accuses_a_node_alone() -> None:
    past = MeasurementHistory()
    for value in (4000.0, 4010.0, 3990.0, 4005.0):
        past = add_to_history(past, [speed(value), speed(1.0, ok=False), speed(2.0, rough=True)])
    assert assess_probes({"n0": [speed(4001.0)]}, {}, {"n0": past}) == ProbeAssessment()
    judged = assess_probes({"n0": [speed(3500.0)]}, {}, {"n0": past})
    assert list(judged.bad) == ["n0"]


def test_sentences_are_for_people() -> None:
    assert finding_sentence(failed()) == "memory cuda:1: FAILED (7 words lost the pattern 0x0), 0.00 s"
    assert finding_sentence(speed(4000.0)) == "memory_speed cuda:0: ok (4000 GB/s), 0.00 s"
    assert finding_sentence(Finding(probe="a", level=1, ok=None, detail="why")) == "a: not judged (why), 0.00 s"


def test_findings_survive_the_wire() -> None:
    for finding in (bits("aaa"), speed(1.0), failed()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(finding), type=Finding) == finding
