"""`holdfast dash`: serves the web page of a run on loopback, only to a browser that opens the printed address."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from html import escape
from pathlib import Path

from aiohttp import web

from holdfast.cli.page.page_sources import ControllerSource, JournalSource, RunSource
from holdfast.cli.run_dirs import run_selection
from holdfast.cli.run_dirs.distant_controller import add_address_flags, is_address, open_address
from holdfast.cli.run_dirs.local_run_list import is_own_run
from holdfast.cli.run_dirs.run_dir_trust import find_foreign_owner
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.controller.access.connection_gate import ConnectionGate
from holdfast.controller.access.log_flood_filter import ServerLogFilter
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.dash.page_server import PageServer
from holdfast.dash.page_session import PageSession
from holdfast.dash.page_source import PageSource, SourceError
from holdfast.journal.journal_errors import JournalError
from holdfast.linux import own_process_settings

_ABOUT = (
    "Show a run in a browser: what it does, what it lost and why. RUN may also be a journal file, or the address of a "
    "controller (https://HOST:PORT), for which you need a token. Ctrl-C ends it."
)
_JOURNAL = ".db"
_GONE_S = 1.0
_BACKLOG = 1024
_SWITCH_S = 0.0005  # a browser that asks for the page does not wait for the thread that reads the journal


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast dash", description=_ABOUT)
    run_selection.add_run_argument(parser)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1 (default: a free one)")
    parser.add_argument("--no-open", action="store_true", help="only print the address, start no browser")
    add_address_flags(parser)
    args = parser.parse_args(argv)
    try:
        source = _find_source(args)
        next(iter(source.read_entries(0)), None)  # whether it can be read
        listener = _listen(args.port)
        if (
            (name := run_selection.named_run(args))
            and _names_journal(name)
            and (owner := find_foreign_owner(Path(name)))
        ):
            print(
                f"holdfast dash: {plain_line(name)} is of {owner}, who may have written anything in it", file=sys.stderr
            )
    except (UsageError, SourceError, JournalError, OSError) as e:
        print(f"holdfast dash: {e}", file=sys.stderr)
        return 2
    complaints = logging.StreamHandler()  # of the server, about requests that are none
    complaints.addFilter(ServerLogFilter())
    logging.getLogger().addHandler(complaints)
    own_process_settings.raise_file_limit()
    sys.setswitchinterval(_SWITCH_S)
    try:
        asyncio.run(_serve_page(_find_source(args), listener, opens=not args.no_open))
    except SourceError as e:
        print(f"holdfast dash: {e}", file=sys.stderr)
        return 1
    return 0


def _find_source(args: argparse.Namespace) -> PageSource:
    name = run_selection.named_run(args)
    if name and is_address(name):
        return ControllerSource(open_address(name, args))
    if name and _names_journal(name):
        return JournalSource(Path(name))
    return RunSource(run_selection.run_to_read(args))


def _names_journal(name: str) -> bool:
    """Return whether this is the path of a journal file. Any other name is a run's: a file of that name in the working
    directory may be somebody else's."""
    return ("/" in name or name.endswith(_JOURNAL)) and Path(name).is_file() and not is_own_run(name)


def _listen(port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise UsageError("--port must be from 0 to 65535")
    try:
        return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    except OSError as e:
        raise UsageError(f"port {port} cannot be used: {e.strerror}; give another --port") from None


async def _serve_page(source: PageSource, listener: socket.socket, *, opens: bool) -> None:
    port = listener.getsockname()[1]
    session = PageSession(port)
    gate = ConnectionGate(lambda: runner.server(), None)  # type: ignore[misc]
    server = PageServer(source, session, gate.note_proved)
    runner = web.AppRunner(server.make_app(), access_log=None, shutdown_timeout=_GONE_S, auto_decompress=False)
    await runner.setup()
    receiving = asyncio.create_task(gate.run(listener))
    address = f"http://127.0.0.1:{port}/?code={session.code}"
    once = "open this address in a browser; it works once, and Ctrl-C ends this"
    print(f"holdfast dash: {address}\nholdfast dash: {once}", flush=True)
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    following = asyncio.ensure_future(server.follow_job())
    leaving = asyncio.ensure_future(asked.wait())
    try:
        with _browser(address) if opens else contextlib.nullcontext():
            done, _ = await asyncio.wait((following, leaving, receiving), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (following, leaving, receiving):
            task.cancel()
        server.close()
        await runner.cleanup()


@contextlib.contextmanager
def _browser(address: str) -> Iterator[None]:
    """Open the address in a browser if there is a display. The browser gets a private file that redirects to the
    address, because other users can read command lines."""
    if not (sys.stdout.isatty() and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))):
        yield
        return
    with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="holdfast-") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={escape(address)}">')
        file.flush()
        uri = Path(file.name).as_uri()
        threading.Thread(target=webbrowser.open, args=(uri,), daemon=True).start()  # some wait for the browser's end
        yield
