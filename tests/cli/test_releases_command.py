"""What `holdfast releases` shows."""

from rich.console import Console

from holdfast.cli.commands.releases_command import render_releases
from holdfast.core.record.release_history import ReleaseChapter, ReleaseOverview
from holdfast.model.code_release import Fate, Release


def test_words_of_others_are_harmless() -> None:
    """A message, or why a release was rolled back, may quote anything."""
    evil = "\x1b]0;title\x07faster\x1b[2A\u202e"
    release = Release(number=2, message=evil, source=evil, who=evil)
    told = ReleaseOverview(
        running=1, releases=(ReleaseChapter(release=release, fate=Fate.ROLLED_BACK, why=evil, at=1.0),)
    )
    console = Console(markup=False, highlight=False, color_system=None, width=200)
    with console.capture() as shown:
        console.print(render_releases(told, 2.0))
    assert shown.get().count("faster") == 4
    assert not {"\x1b", "\x07", "\u202e"} & set(shown.get())
