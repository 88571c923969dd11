"""Masks secrets in what an agent tells: alarms of its detectors, what came of errands, and news of storage, whose
address may hold a password."""

from msgspec.structs import replace

from holdfast.core.agent_state_machine import AlarmNoticed, ErrandDone, News
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing, fit_text
from holdfast.logs.secret_masking import Masker, argv_secrets, env_secrets
from holdfast.model.code_release import Release
from holdfast.model.observation import Beat


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
    return replace(beat, missed=replace(beat.missed, why=mask(beat.missed.why))) if beat.missed else beat


def mask_listing(mask: Masker, listing: CheckpointListing) -> CheckpointListing:
    checkpoints = tuple(replace(one, why=fit_text(mask(one.why))) for one in listing.checkpoints)
    return replace(listing, base=mask(listing.base), checkpoints=checkpoints)


def learn_secrets(mask: Masker, *releases: Release) -> None:
    """Have secrets masked that these releases bring into the environment or the command line of ranks."""
    for release in releases:
        mask.learn([*env_secrets(release.env), *argv_secrets(release.argv)])
