"""A node runs what a signer has signed and what the job began with, whatever its controller says."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.agent.diagnostics.probe_and_replay_errands import NodeDiagnosis
from holdfast.agent.releases.release_trust import ReleaseTrust
from holdfast.config import ReleaseLimits, Settings
from holdfast.model.code_release import Release
from holdfast.model.node_errands import ReplayHere, StageHere
from holdfast.model.replay_task import ReplayTask
from holdfast.wire.releases import release_signature
from tests.agent.test_agent_shell import LAUNCH
from tests.agent.test_release_stager import Desk, desk  # noqa: F401  a fixture
from tests.fleet.places import TEMPLATE
from tests.wire.test_release_signature import CHANGES, key, signers  # noqa: F401  a fixture
from tests.wire.test_tree_archive import plant

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="there is no ssh-keygen here")
FIRST = Release(number=1, digest="ab" * 32, root="/srv/train", script="train.py", argv=("train.py", "--lr"))


@pytest.fixture
def signed(signers: str, tmp_path: Path) -> Release:  # noqa: F811
    return release_signature.sign_release(msgspec.structs.replace(FIRST, number=2, env={"LR": "1"}), tmp_path / "ann")


def test_without_signers_nothing_is_asked_for(tmp_path: Path) -> None:
    trust = ReleaseTrust("", "", tmp_path)
    assert trust.fault(msgspec.structs.replace(FIRST, number=2)) == ""
    assert not (tmp_path / "first-release").exists()


def test_only_what_was_signed_is_run(signers: str, signed: Release, tmp_path: Path) -> None:  # noqa: F811
    trust = ReleaseTrust(signers, "", tmp_path)
    assert trust.fault(signed) == trust.fault(signed) == ""
    assert trust.fault(msgspec.structs.replace(signed, number=7, who="bob", message="x")) == ""
    for change in CHANGES:
        assert trust.fault(msgspec.structs.replace(signed, **change)).startswith("release 2 is not run here: "), change
    assert trust.fault(msgspec.structs.replace(signed, signature=""))
    assert trust.fault(Release(number=2, env={"LD_PRELOAD": "x"})), "no tree, and an environment all the same"


def test_signers_that_have_changed_are_asked_again(signers: str, signed: Release, tmp_path: Path) -> None:  # noqa: F811
    trust = ReleaseTrust(signers, "", tmp_path)
    assert trust.fault(signed) == ""
    public = key(tmp_path, "bob").with_suffix(".pub").read_text()
    Path(signers).write_text(f"bob@example.org {public}")
    assert signers in trust.fault(signed)
    Path(signers).unlink()
    assert trust.fault(signed)


@pytest.mark.parametrize("told", [True, False], ids=["was told at the start", "hears it from the controller"])
def test_what_the_job_began_with_is_one_release(signers: str, tmp_path: Path, told: bool) -> None:  # noqa: F811
    first = release_signature.signed_digest(FIRST) if told else ""
    assert ReleaseTrust(signers, first, tmp_path).fault(FIRST) == ""
    trust = ReleaseTrust(signers, first, tmp_path)  # of the next agent
    assert trust.fault(FIRST) == ""
    changes: tuple[dict[str, Any], ...] = (*CHANGES[:1], {"env": {"LD_PRELOAD": "x"}}, {"argv": ("train.py", "--evil")})
    for change in changes:
        assert trust.fault(msgspec.structs.replace(FIRST, **change)).startswith("release 1 is not run here: "), change
    assert trust.fault(msgspec.structs.replace(FIRST, number=2))
    assert trust.fault(Release(number=1)) == "", "the host's own tree and command"


async def test_a_node_neither_stages_nor_launches_what_is_not_signed(desk: Desk, signers: str, tmp_path: Path) -> None:  # noqa: F811
    """By no way: not with a welcome, an update or a launch, of which a controller that took over checks none."""
    release = desk.pack(plant(tmp_path / "proj"))
    strict = desk.node(settings=Settings(release=ReleaseLimits(signers=signers)))
    evil = msgspec.structs.replace(release, env={"LD_PRELOAD": "x"})
    for one in (release, evil):
        assert await strict.stage_all((one,))
        error, refused = await strict.stage_and_check(StageHere(id=1, release=one))
        assert error and refused
        assert await strict.begin_launch(one)
    assert not (tmp_path / "staged").exists()
    good = release_signature.sign_release(release, tmp_path / "ann")
    assert await strict.stage_and_check(StageHere(id=2, release=good)) == ("", False)
    assert await strict.begin_launch(msgspec.structs.replace(good, env={"LD_PRELOAD": "x"}))
    assert await strict.begin_launch(good) == ""


async def test_a_node_replays_no_step_of_what_is_not_signed(signers: str, tmp_path: Path) -> None:  # noqa: F811
    def no_ranks(*args: object) -> dict[str, str]:
        raise AssertionError("its environment is asked for")

    trust = ReleaseTrust(signers, "", tmp_path)

    async def distrust(release: Release) -> str:
        return trust.fault(release)

    diagnosis = NodeDiagnosis(TEMPLATE, tmp_path, no_ranks, lambda release: TEMPLATE.entry, distrust)
    launch = msgspec.structs.replace(LAUNCH, release=Release(number=2, env={"LD_PRELOAD": "x"}))
    task = ReplayTask(name="r1", steps=1)
    done = await diagnosis.run_errand(ReplayHere(id=1, launch=launch, replay=task, within_s=1.0))
    assert not done.ok and done.detail == f"the diagnosis cannot run: {trust.fault(launch.release)}"
    await diagnosis.stop()
