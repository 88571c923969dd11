"""Masks secrets in what an agent tells: alarms of its detectors, what came of errands, news of storage, whose address
may hold a password, and stacks and phases, whose names the script chooses."""

from functools import cache

from msgspec.structs import replace

from holdfast.core.agent_state_machine import AlarmNoticed, ErrandDone, News
from holdfast.core.diagnose.trace_texts import clean_trace
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing, fit_text
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.logs.secret_masking import Masker, argv_secrets, env_secrets, trim_line
from holdfast.model.code_release import Release
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Trace


def mask_news(mask: Masker, news: News) -> News:
    """Return the news with its quoted texts masked. The judge masks those of failed ranks."""
    match news:
        case AlarmNoticed(alarm):
            return AlarmNoticed(mask.mask_alarm(alarm))
        case ErrandDone():
            return replace(
                news,
                detail=mask(news.detail),
                findings=tuple(replace(one, detail=mask(one.detail)) for one in news.findings),
                played=tuple(replace(one, detail=mask(one.detail)) for one in news.played),
            )
    return news


def mask_beat(mask: Masker, beat: Beat) -> Beat:
    if beat.missed:
        beat = replace(beat, missed=replace(beat.missed, why=mask(beat.missed.why)))
    return replace(beat, phase=mask(plain_line(beat.phase))) if beat.phase else beat


def mask_trace(mask: Masker, trace: Trace) -> Trace:
    """Return the trace with the names that processes choose cleaned, masked and then cut: of functions, files, threads,
    process groups, and the processes themselves."""
    clean = cache(lambda text: mask(trim_line(plain_line(text))))  # most frames are the same, and masking takes 0.1 ms
    return clean_trace(trace, clean)


def mask_listing(mask: Masker, listing: CheckpointListing) -> CheckpointListing:
    checkpoints = tuple(replace(one, why=fit_text(mask(one.why))) for one in listing.checkpoints)
    return replace(listing, base=mask(listing.base), checkpoints=checkpoints)


def learn_secrets(mask: Masker, *releases: Release) -> None:
    """Have secrets masked that these releases bring into the environment or the command line of ranks."""
    for release in releases:
        mask.learn([*env_secrets(release.env), *argv_secrets(release.argv)])
