"""Links between nodes, for real: slow, lossy and corrupting ones are each found by the pair test, sound ones pass."""

import pytest

from tests.agent.probes.lab import CORRUPTING, LOSSY, SLOW, lab, missing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.alone,  # how fast a link is depends on who else uses the processors
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=f"a network of our own: {missing()}"),
]
NODES, BAD = 4, "n3"
SAID = {SLOW: "bandwidth of", LOSSY: "segments had to be sent again", CORRUPTING: "changed on the way"}


@pytest.mark.parametrize("quiet", [True, False])
async def test_sound_links_accuse_nobody(quiet: bool) -> None:
    with lab(NODES) as network:
        answer, waves = await network.pair_test()
    assert (answer.bad, answer.unsure) == ({}, ()), answer
    if quiet:
        assert (answer.links, waves) == ((), 1), answer


@pytest.mark.parametrize("fault", [SLOW, LOSSY, CORRUPTING])
async def test_a_bad_link_is_found(fault: str) -> None:
    with lab(NODES) as network:
        network.spoil(BAD, fault)
        answer, waves = await network.pair_test()
    assert list(answer.bad) == [BAD] and waves == 2, answer
    assert SAID[fault] in answer.bad[BAD]
