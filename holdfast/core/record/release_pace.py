"""The pace of each release in steady training, computed from the journal: steps per second, tokens per second and MFU.

A stretch of training lies between two reports of progress in one generation. It counts if it comes after the
generation's first steps, if the job had a controller, and if the job neither stood still nor was slower than before
meanwhile. That it was slow is known later, so the newest stretches wait before they count. Pace depends on the number
of ranks. So each number of ranks is measured by itself, and releases are compared only on the same number.
"""

from collections import deque
from typing import NamedTuple

import msgspec

from holdfast.core.detect.job_progress import splits_model
from holdfast.model.action import Launch
from holdfast.model.decider_events import Begin, Progress, SlowTime, Successor
from holdfast.model.job_and_seats import world_size
from holdfast.model.journal_entry import Decision, Entry

FLOPS_A_TOKEN = 6  # for each parameter: two forward, four backward (Kaplan et al. 2020)
_RECENT_S = 600.0  # slowness is known by then
LEAST_STEPS = 20  # steady steps of a release, before it is compared with another


class ReleasePace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of one release in steady training, on the number of ranks with which it trained longest."""

    release: int
    ranks: int
    steps: int  # steady ones
    seconds: float  # that they took
    tokens_s: float | None = None  # per second; None: the script does not tell
    flops_s: float | None = None  # None: neither told nor to be estimated
    mfu: float | None = None  # None: besides, the GPUs' peak is not known
    estimated: bool = False  # FLOPs are 6 x parameters x tokens

    @property
    def steps_s(self) -> float:
        return self.steps / self.seconds


class PaceTally(msgspec.Struct):
    """The totals of all steady stretches of one release on one number of ranks."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    token_seconds: float = 0.0  # of stretches in which tokens were told
    flops: float = 0.0
    flop_seconds: float = 0.0
    used: float = 0.0  # FLOPs of stretches in which the peak was known
    usable: float = 0.0  # and what the GPUs could have made in these
    estimated: bool = False

    def add_stretch(self, before: Progress, after: Progress, *, whole: bool) -> None:
        """Add the steps between two reports. `whole` says that the reported parameters are those of the whole model."""
        seconds, tokens = after.at - before.at, after.tokens - before.tokens
        self.steps, self.seconds = self.steps + after.step - before.step, self.seconds + seconds
        if tokens > 0:
            self.tokens, self.token_seconds = self.tokens + tokens, self.token_seconds + seconds
        flops, told = after.flops - before.flops, after.flops > before.flops
        if not told:
            flops = FLOPS_A_TOKEN * after.parameters * tokens if whole and tokens > 0 else 0.0
        if flops <= 0:
            return
        self.estimated |= not told
        self.flops, self.flop_seconds = self.flops + flops, self.flop_seconds + seconds
        if after.peak_flops > 0:
            self.used, self.usable = self.used + flops, self.usable + after.peak_flops * seconds

    def make_pace(self, release: int, ranks: int) -> ReleasePace:
        return ReleasePace(
            release=release,
            ranks=ranks,
            steps=self.steps,
            seconds=self.seconds,
            tokens_s=self.tokens / self.token_seconds if self.token_seconds else None,
            flops_s=self.flops / self.flop_seconds if self.flop_seconds else None,
            mfu=self.used / self.usable if self.usable else None,
            estimated=self.estimated,
        )


class SteadyStretch(NamedTuple):
    """A stretch of steady training between two reports, of a release on a number of ranks (`crew`)."""

    crew: tuple[int, int]
    before: Progress
    after: Progress
    whole: bool  # the parameters that it tells are those of the whole model


class ReleasePaces:
    """Measures the pace of each release from journal entries, which it takes one by one."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[int, int], PaceTally] = {}  # by release and number of ranks
        self._release = self._ranks = self._generation = 0
        self._whole = True
        self._last: Progress | None = None  # steady, of this generation
        self._recent: deque[SteadyStretch] = deque()  # which may yet turn out to be of a slow time
        self._slow: dict[float, SlowTime] = {}  # lately

    def add(self, entry: Entry) -> None:
        match entry.event:
            case Begin(job=job, release=release):
                self._release, self._whole = release.number, not splits_model(job.mesh)
            case Progress(generation=generation) as progress if generation == self._generation:
                self._on_progress(progress, entry.decision)
            case Successor():
                self._last = None  # ranks may have stood while there was no controller
            case SlowTime() as slow:
                self._slow[slow.since] = slow
        for action in entry.decision.actions:
            if isinstance(action, Launch):
                self._release = action.release.number or self._release
                self._ranks, self._generation = world_size(action.seats), action.generation
                self._last = None

    def _on_progress(self, progress: Progress, decision: Decision) -> None:
        last, self._last = self._last, progress if progress.is_steady else None
        if last is None or self._last is None or decision.stood_since is not None:
            return
        if progress.step > last.step and progress.at > last.at and _is_same_count(last, progress):
            self._recent.append(SteadyStretch((self._release, self._ranks), last, progress, self._whole))
        while self._recent and self._recent[0].after.at < progress.at - _RECENT_S:
            self._count_stretch(self._tallies, self._recent.popleft())
        self._slow = {since: slow for since, slow in self._slow.items() if slow.until > progress.at - 2 * _RECENT_S}

    def _count_stretch(self, tallies: dict[tuple[int, int], PaceTally], one: SteadyStretch) -> None:
        if not any(slow.since < one.after.at and one.before.at < slow.until for slow in self._slow.values()):
            tallies.setdefault(one.crew, PaceTally()).add_stretch(one.before, one.after, whole=one.whole)

    def measure_anew(self) -> None:
        """Drop the measurements so far, so that a report measures only what comes after."""
        self._tallies.clear()
        self._recent.clear()

    def list_paces(self) -> tuple[ReleasePace, ...]:
        """Return the pace of every release that has trained steadily, in the order of release numbers."""
        longest: dict[int, ReleasePace] = {}
        tallies = {crew: msgspec.structs.replace(tally) for crew, tally in self._tallies.items()}
        for one in self._recent:
            self._count_stretch(tallies, one)
        for (release, ranks), tally in tallies.items():
            if release not in longest or tally.seconds > longest[release].seconds:
                longest[release] = tally.make_pace(release, ranks)
        return tuple(pace for _, pace in sorted(longest.items()))


def _is_same_count(before: Progress, after: Progress) -> bool:
    """Return whether both reports number steps in the same way, so that their difference is a number of steps."""
    return (before.counted, before.numbered) == (after.counted, after.numbered)


def describe_paces(paces: tuple[ReleasePace, ...]) -> tuple[str, ...]:
    """Return a sentence about each of these releases, and one that compares the newest two if they can be compared."""
    compared = _compare_newest(paces)
    return (*map(_describe_pace, paces), *((compared,) if compared else ()))


def _describe_pace(pace: ReleasePace) -> str:
    """Return the pace in words: steps and tokens per second, and MFU as far as it is known."""
    said = [f"{pace.steps_s:.3g} steps/s"]
    said += [f"{pace.tokens_s:,.0f} tokens/s"] if pace.tokens_s is not None else []
    estimated = " (FLOPs estimated: 6 x parameters x tokens)" if pace.estimated else ""
    if pace.mfu is not None:
        said.append(f"MFU {100 * pace.mfu:.1f} %{estimated}")
    elif pace.flops_s is not None:
        said.append(f"{pace.flops_s / 1e12:.3g} TFLOP/s{estimated}, MFU not known: set pace.peak_flops")
    over = "1 steady step" if pace.steps == 1 else f"{pace.steps} steady steps"
    of = "1 rank" if pace.ranks == 1 else f"{pace.ranks} ranks"
    return f"release {pace.release} makes {', '.join(said)}, measured over {over} on {of}"


def _compare_newest(paces: tuple[ReleasePace, ...]) -> str:
    """Say how fast the newest release is compared with the one before it; empty if too little is known."""
    if len(paces) < 2 or min(pace.steps for pace in paces[-2:]) < LEAST_STEPS:
        return ""
    old, new = paces[-2:]
    if old.ranks != new.ranks:
        return f"releases {old.release} and {new.release} are not compared: {old.ranks} and {new.ranks} ranks"
    if old.tokens_s is not None and new.tokens_s is not None:
        ratio, by = new.tokens_s / old.tokens_s, "tokens/s"
    else:
        ratio, by = new.steps_s / old.steps_s, "steps/s"
    return f"release {new.release} is {ratio:.2f} times as fast as release {old.release}, by {by}"
