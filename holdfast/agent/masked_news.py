"""Masks secrets in what an agent tells: alarms of its detectors, and reasons why an errand failed."""

import msgspec

from holdfast.core.agent_state_machine import AlarmNoticed, ErrandDone, News
from holdfast.logs.secret_masking import Masker, env_secrets
from holdfast.model.code_release import Release


def mask_news(mask: Masker, news: News) -> News:
    """Return the news with its quoted texts masked. The judge masks those of failed ranks."""
    match news:
        case AlarmNoticed(alarm):
            return AlarmNoticed(mask.mask_alarm(alarm))
        case ErrandDone(detail=detail) if detail:
            return msgspec.structs.replace(news, detail=mask(detail))
    return news


def learn_secrets(mask: Masker, *releases: Release) -> None:
    """Have secrets masked that these releases bring into the environment of ranks."""
    for release in releases:
        mask.learn(env_secrets(release.env))
