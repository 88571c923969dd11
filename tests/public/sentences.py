"""Every sentence that may be said of a public script, and what must be so if it is; any other one fails its test."""

import os
import pwd
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.cli.driver import Job
from tests.public.table import STEPS, Script
from tests.public.witness import Witness

SLACK_S = 1.5  # by which times may differ that two processes of a busy machine have taken


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the test itself has done and seen."""

    job: Job
    seen: Witness
    script: Script
    ended_at: float
    struck: str = ""  # "killed", "frozen", "updated" or "stopped"
    edited: bool = False  # the script was, while it ran

    @property
    def ranks(self) -> int:
        return int(self.script.flags[self.script.flags.index("--nproc-per-node") + 1])

    @property
    def victim(self) -> str:
        return "0" if self.script.spawns else "1"

    @property
    def project(self) -> Path:
        return (self.job.folder / self.script.path).parent

    def gap_at(self, step: int) -> float:
        """The longest time between this step, or those that are printed with it, and the next one of its life."""
        gaps = [0.0]
        for generation in range(1, self.seen.generations + 1):
            for life in self.seen.lives(generation):
                lines = life.lines
                gaps += [b.at - a.at for a, b in pairwise(lines) if self._is_near(a.step, step)]
                if self._is_near(lines[-1].step, step):  # the last of its life
                    gaps.append(self._follows(generation) - lines[-1].at)
        return max(gaps)

    def _follows(self, generation: int) -> float:
        """When the next life made its first step or, after the last one, when the job was over."""
        return min((life.lines[0].at for life in self.seen.lives(generation + 1)), default=self.ended_at)

    def _is_near(self, printed: int, step: int) -> bool:
        return abs(printed - step) <= self.script.grain


Found = re.Match[str]


class Sentence(NamedTuple):
    form: str
    check: Callable[[Known, Found], None]
    times: range = range(1 << 10)  # how often it may be said


def check_sentences(known: Known) -> None:
    """Nothing is said that is not known here, and of what is said all is so."""
    said: dict[str, int] = dict.fromkeys((sentence.form for sentence in SENTENCES), 0)
    strange = []
    for line in re.findall(r"^(?:\[rank \d+\] )?holdfast[ :].*", known.job.text(), re.M):
        for sentence in SENTENCES:
            if found := re.fullmatch(f"holdfast: {sentence.form}", line):
                said[sentence.form] += 1
                sentence.check(known, found)
                break
        else:
            strange.append(line)
    assert not strange, "nobody knows whether this is so:\n" + "\n".join([*strange, "", known.job.story()])
    for sentence in SENTENCES:
        assert said[sentence.form] in sentence.times, (sentence.form, said[sentence.form], known.job.sentences())


def _shape(known: Known, found: Found) -> None:
    assert (int(found["nodes"]), int(found["ranks"])) == (1, known.ranks)
    assert Path(found["run"]) == known.job.run_dir


def _release(known: Known, found: Found) -> None:
    there = [path for path in known.project.rglob("*") if path.is_file() and path.suffix == ".py"]
    assert Path(found["tree"]) == known.project and 1 <= int(found["files"])
    assert {path.name for path in there} == {Path(known.script.path).name}


def _first_step(known: Known, found: Found) -> None:
    first = min(life.lines[0].at for life in known.seen.lives(1))
    before_s = (known.script.grain - 1) * 0.5  # what is printed is later than the first
    assert -before_s - SLACK_S < float(found["s"]) - (first - known.seen.began_at) < SLACK_S, (found[0], first)


def _loss(known: Known, found: Found) -> None:
    assert found["source"] == known.script.loss_source


def _begun(known: Known, found: Found) -> None:
    """What an incident begins with is what was done, or that the victim's neighbour has lost its peer."""
    assert known.struck in ("killed", "frozen")
    if echo := re.fullmatch(r"rank (\d+) on n0 lost its peer: looking for the first cause", found["cause"]):
        assert known.struck == "killed" and echo[1] != known.victim, found[0]
    else:
        [record] = known.job.report().incidents
        cause = known.script.causes[known.struck].format(good=record.good_step)
        assert re.match(cause, found["cause"]), found[0]


def _closed(known: Known, found: Found) -> None:
    [record] = known.job.report().incidents
    assert found["sentence"] == record.sentence
    _phases(found)
    if before := re.search(r", after ([\d.]+) s without a step", record.sentence):
        assert known.gap_at(record.good_step) > float(before[1]) - SLACK_S, found[0]


def _changed(known: Known, found: Found) -> None:
    [change] = known.job.report().changes
    assert known.struck == "updated" and found["sentence"] == change.sentence


def _phases(found: Found) -> None:
    """The parts of what was lost make up the whole."""
    told = re.search(r"(?P<all>[\d.]+) s \((?P<parts>[^()]*)\)(?:, after [\d.]+ s without a step)?$", found["sentence"])
    assert told, found[0]
    parts = [float(part.rpartition(" ")[2]) for part in told["parts"].split(", ")]
    assert abs(sum(parts) - float(told["all"])) < 0.05, found[0]


def _pausing(known: Known, found: Found) -> None:
    assert known.struck == "updated" and found["release"] == "2"


def _edited(known: Known, found: Found) -> None:
    assert known.edited and found["file"] == Path(known.script.path).name and known.struck == "frozen"


def _gathered(known: Known, found: Found) -> None:
    home = Path(found["home"])
    assert home == known.project and known.edited
    for name in re.split(r", | and \d+ more$", found["names"]):
        assert not name or (home / name).exists(), f"{name} is not in {home}"


def _unended(known: Known, found: Found) -> None:
    assert known.struck and all(int(rank) < known.ranks for rank in re.findall(r"\d+", found["ranks"]))


def _left(known: Known, found: Found) -> None:
    """Torch's own teardown may stand; by then every step is made."""
    assert all(int(rank) < known.ranks for rank in re.findall(r"\d+", found["ranks"])), found[0]
    assert known.seen.reached(known.seen.generations) == STEPS, found[0]


def _stood(known: Known, found: Found) -> None:
    gap_s = known.gap_at(int(found["step"]))
    assert gap_s > float(found["s"]) - SLACK_S, (found[0], gap_s)


def _stopped(known: Known, found: Found) -> None:
    assert known.struck == "stopped" and found["who"] == pwd.getpwuid(os.getuid()).pw_name


def _ended(known: Known, found: Found) -> None:
    report = known.job.report()
    code = int(found["code"] or 0)
    assert code == (143 if known.struck == "stopped" else 0) == known.job.process.returncode
    assert int(found["count"]) == len(report.incidents) == (1 if known.struck in ("killed", "frozen") else 0)
    assert report.ettr is not None and (found["most"] or "") == report.at_most
    assert f"{100 * report.ettr:.1f}" == found["ettr"]


_ONCE, _AT_MOST_ONCE = range(1, 2), range(2)
_PLACE = r"(?: at step (?P<step>\d+))"
SENTENCES = (
    Sentence(
        r"local fleet: (?P<nodes>\d+) node x (?P<ranks>\d+) ranks? on this host; run directory (?P<run>\S+)",
        _shape,
        _ONCE,
    ),
    Sentence(
        r"release 1 is (?P<files>\d+) files? of (?P<tree>\S+), run in place until one of them changes; "
        r"holdfast update brings later changes",
        _release,
        _ONCE,
    ),
    Sentence(r"training: first step after (?P<s>[\d.]+) s", _first_step, _ONCE),
    Sentence(r"loss: read from (?P<source>\S+)", _loss, _AT_MOST_ONCE),
    Sentence(r"incident 1: (?P<cause>.+); stopping all ranks", _begun, _AT_MOST_ONCE),
    Sentence(r"(?P<sentence>rank .+; restarted in place.*, lost .+|rank .+: lost .+)", _closed, _AT_MOST_ONCE),
    Sentence(r"(?P<sentence>release 2: restarted.+)", _changed, _AT_MOST_ONCE),
    Sentence(r"pausing: release (?P<release>\d+); ending all ranks", _pausing, _AT_MOST_ONCE),
    Sentence(
        r"n0: (?P<file>\S+) was edited after release 1 was made; ranks run release 1 unchanged, from a copy; "
        r"holdfast update brings the edit",
        _edited,
        _AT_MOST_ONCE,
    ),
    Sentence(r"n0: files that ranks made beside the script are now in (?P<home>\S+): (?P<names>[^;]+)", _gathered),
    Sentence(
        r"n0: (?P<ranks>ranks? [\d, and]+) ha(?:s|ve) not ended on SIGTERM; (?:it is|they are) killed in \d+ s",
        _unended,
    ),
    Sentence(r"(?P<ranks>ranks? [\d, and]+) do(?:es)? not end: .+", _left, range(3)),  # told, then given up on
    Sentence(rf"no step for (?P<s>\d+) s{_PLACE}: .+", _stood),
    Sentence(rf".+ went on after (?P<s>\d+) s{_PLACE}", _stood),
    Sentence(r"ending: stopped by (?P<who>\S+)", _stopped, _AT_MOST_ONCE),
    Sentence(
        r"(?:done|ended with code (?P<code>\d+)): (?P<count>\d+) incidents?, ETTR (?P<most>at most )?(?P<ettr>[\d.]+) %"
        r"; more: holdfast report \S+",
        _ended,
        _ONCE,
    ),
)
