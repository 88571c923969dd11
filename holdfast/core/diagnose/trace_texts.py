"""Cleans the texts of stacks: names of functions, files, threads and process groups, which processes choose, and what
their node says of them."""

from collections.abc import Callable

from msgspec.structs import replace

from holdfast.core.diagnose.stack_folding import shorten_path
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace

_NAME_CHARS = 200  # of a frame's function and file
_TEXT_CHARS = 2000  # of any other text that a node tells

Cleaner = Callable[[str], str]


def clean_told_trace(trace: Trace) -> Trace:
    """Return stacks of a node that may be hostile, with every text in one short line that no terminal obeys."""
    return clean_trace(trace, lambda text: text if _is_clean(text) else plain_line(text)[:_TEXT_CHARS])


def _is_clean(text: str) -> bool:
    return len(text) <= _TEXT_CHARS and text.isprintable()  # most are, and that is seen at once


def clean_trace(trace: Trace, clean: Cleaner) -> Trace:
    """Return the stacks with each text cleaned by `clean`, and then the names of frames cut."""
    return replace(
        trace,
        error=clean(trace.error),
        ras="\n".join(clean(line) for line in trace.ras.split("\n")),
        processes=tuple(_clean_process(one, clean) for one in trace.processes),
        flights=tuple(_clean_flight(one, clean) for one in trace.flights),
    )


def _clean_process(process: Process, clean: Cleaner) -> Process:
    threads = tuple(_clean_thread(thread, clean) for thread in process.threads)
    texts = {name: clean(getattr(process, name)) for name in ("name", "state", "error", "ending")}
    return replace(process, threads=threads, **texts)


def _clean_thread(thread: Thread, clean: Cleaner) -> Thread:
    frames = (
        Frame(clean(f.function)[:_NAME_CHARS], shorten_path(clean(f.file))[-_NAME_CHARS:], f.line)
        for f in thread.frames
    )
    return replace(thread, name=clean(thread.name), sleeps_in=clean(thread.sleeps_in), frames=tuple(frames))


def _clean_flight(flight: Flight, clean: Cleaner) -> Flight:
    groups = tuple(_clean_collective(one, clean) for one in flight.groups)
    channels = flight.channels and tuple(replace(one, group=clean(one.group)) for one in flight.channels)
    return replace(flight, groups=groups, channels=channels)


def _clean_collective(one: Collective, clean: Cleaner) -> Collective:
    texts = {name: clean(getattr(one, name)) for name in ("group", "op", "ended_op", "started_op")}
    return replace(one, **texts)
