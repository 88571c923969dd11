"""The difference between two releases, line by line, from the archives of their trees."""

import difflib
from collections.abc import Iterator

import msgspec

from holdfast.dash.page_source import PageSource, SourceError
from holdfast.logs.secret_masking import make_secret_masker
from holdfast.model.code_release import Release
from holdfast.wire.releases.tree_archive import ArchiveError, archive_contents, archive_files

_FILES, _LINES, _LINE_CHARS = 50, 600, 400
_FILE_BYTES = 1 << 16
_ONLY_SECRETS = "of the command line only secrets differ, which are not shown"


class ReleaseDiff(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[str, ...]
    left_out: int = 0  # lines and files beyond what is told


def compare_releases(source: PageSource, before: Release, after: Release) -> ReleaseDiff:
    """Return what a release changed. Raise SourceError, with one sentence, if that cannot be known here."""
    found = list(_compare_commands(before, after))
    files = 0
    if before.digest != after.digest:
        try:
            told, files = _compare_trees(source, before, after)
        except (ArchiveError, OSError) as e:
            raise SourceError(str(e)) from None
        found += told
    lines = tuple(line[:_LINE_CHARS] for line in found[:_LINES])
    return ReleaseDiff(
        lines=lines or ("no file and no word of the command line differs",), left_out=files + len(found) - len(lines)
    )


def _compare_commands(before: Release, after: Release) -> Iterator[str]:
    pair, mask = (before, after), make_secret_masker()
    one, other = (" ".join((release.script, *release.argv)).strip() for release in pair)
    shown, other_shown = (" ".join((release.script, *mask.mask_argv(release.argv))).strip() for release in pair)
    if shown != other_shown:
        yield from ("the command line", f"-{shown}", f"+{other_shown}")
    elif one != other:
        yield _ONLY_SECRETS
    changed = sorted({name for name, _ in before.env.items() ^ after.env.items()})
    if changed:
        yield f"variables of the environment that differ: {', '.join(changed)}"  # their values may be secret


def _compare_trees(source: PageSource, before: Release, after: Release) -> tuple[list[str], int]:
    """Return the lines in which two trees differ, and the number of differing files that these lines leave out."""
    for release in (before, after):
        if not release.digest:
            raise SourceError(f"release {release.number} ran where its files stand, and no copy of them was kept")
    old, new = source.find_archive(before.digest), source.find_archive(after.digest)
    words, other_words = archive_contents(old), archive_contents(new)
    differ = sorted(path for path in words.keys() | other_words.keys() if words.get(path) != other_words.get(path))
    told = differ[:_FILES]
    contents = archive_files(old, told, _FILE_BYTES), archive_files(new, told, _FILE_BYTES)
    lines: list[str] = []
    for path in told:
        state = "added" if path not in words else "removed" if path not in other_words else "changed"
        one = _text_lines(contents[0].get(path)) if path in words else []
        other = _text_lines(contents[1].get(path)) if path in other_words else []
        lines += [f"{path} ({state})", *_compare_texts(one, other)]
    return lines, len(differ) - len(told)


def _text_lines(content: bytes | None) -> list[str] | None:
    """Return the lines of a text; None if it was too large to be read, or is no text."""
    try:
        return None if content is None or b"\0" in content else content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return None


def _compare_texts(old: list[str] | None, new: list[str] | None) -> list[str]:
    if old is None or new is None:
        return ["  its lines are not compared: it is no text, or larger than 64 KiB"]
    return list(difflib.unified_diff(old, new, lineterm="", n=2))[2:]  # without the names of the files, told before
