"""People are told by a real command and by a real server, and nothing that these do harms whoever tells them."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from holdfast.cli.launch.journal_and_notes import NotesFolder
from holdfast.controller.user_hooks import UserHooks
from holdfast.core.record.hook_notices import HookLimits, JobStanding
from holdfast.logs.secret_masking import make_secret_masker
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Tick
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from tests.core.test_hook_notices import FINISH, GAVE_UP, RECORD

CLOSED = Decision(phase=Phase.TRAINING, closed=RECORD)
ENDED = Decision(phase=Phase.ENDING, closed=GAVE_UP, actions=(FINISH,))


class Teller:
    """Hooks that run, and what they said to the console."""

    def __init__(self, folder: Path, limits: HookLimits) -> None:
        self.said: list[str] = []
        notes, mask = NotesFolder(folder), make_secret_masker()
        self.hooks = UserHooks(limits, "r", folder, str(folder), notes=notes, say=self.said.append, mask=mask)
        self.seq = 0

    def hear(self, decision: Decision = CLOSED, standing: JobStanding | None = None) -> None:
        self.seq += 1
        entry = Entry(seq=self.seq, at=1.0, event=Tick(), decision=decision)
        self.hooks.on_entry(entry, standing or JobStanding())


@contextlib.asynccontextmanager
async def telling(folder: Path, **limits: Any) -> AsyncIterator[Teller]:
    teller = Teller(folder, HookLimits(**limits))
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(teller.hooks.run())
        yield teller
        teller.hooks.finish_up()


async def until(look: Callable[[], object], what: str) -> None:
    for _ in range(2000):
        if look():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"waited in vain: {what}")


def failed(teller: Teller, times: int) -> Callable[[], bool]:
    return lambda: teller.hooks.failures == times


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


class Inbox:
    """A server that keeps what is posted to it."""

    def __init__(self, *answers: int) -> None:
        self.got: list[Any] = []
        self.types: list[str] = []
        self.answers = list(answers)

    async def take(self, request: web.Request) -> web.Response:
        self.types.append(request.content_type)
        self.got.append(json.loads(await request.read()))
        return web.Response(status=self.answers.pop(0) if self.answers else 200)


@contextlib.asynccontextmanager
async def serving(inbox: Inbox) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/secret-path", inbox.take)
    async with TestServer(app) as server:
        yield str(server.make_url("/secret-path"))


async def test_a_command_gets_the_notice_and_variables(tmp_path: Path) -> None:
    command = 'cat > got.json; echo "$HOLDFAST_TOPIC|$HOLDFAST_TEXT|$HOLDFAST_INCIDENT|$HOLDFAST_RUN_DIR" > variables'
    async with telling(tmp_path, command=command) as teller:
        teller.hear()
    got = json.loads((tmp_path / "got.json").read_text())
    assert (got["topic"], got["text"], got["run_id"], got["more"]) == ("incident", RECORD.sentence, "r", 0)
    assert msgspec.convert(got["incident"], type(RECORD)) == RECORD
    assert (tmp_path / "variables").read_text() == f"incident|{RECORD.sentence}|3|{tmp_path}\n"
    assert teller.said == []


HARM = "\x1b]52;c;ZWNobyBoaQ==\x07\x1b[2J\u202e"  # the clipboard, the screen, the direction of reading
SECRET, TOKEN = "correct-horse-battery", "hf_" + "aB3dE5fG7hJ9kL1m"
ARGUMENT = "ArgTok55aaQQ1"
ARGV = ("job.py", "--hub-token", ARGUMENT, "--lr", "0.1")
QUOTED = f"rank 0 failed: {HARM}no login with {TOKEN} and {SECRET}"
CLEAN = "rank 0 failed: no login with <token> and <secret>"


@pytest.mark.parametrize("form", ["json", "slack"])
async def test_nobody_outside_gets_a_secret_or_what_a_terminal_obeys(tmp_path: Path, form: str) -> None:
    """Of an older journal, whose alarms were not masked; a release brought the secret into the environment."""
    verdict = msgspec.structs.replace(RECORD.verdict, reason=QUOTED)
    record = msgspec.structs.replace(RECORD, cause=QUOTED, sentence=QUOTED, verdict=verdict)
    release = Release(
        number=2, digest="ab" * 32, env={"HUB_PASSWORD": SECRET, "LR": "0.25"}, who="ann@example.org", argv=ARGV
    )
    standing = JobStanding(fates={2: Fate.REFUSED}, told={2: QUOTED}, known={2: release})
    inbox = Inbox()
    command = "cat >> got.json; echo >> got.json; env -0 >> variables"
    async with serving(inbox) as url, telling(tmp_path, command=command, url=url, format=form, least_s=0.0) as teller:
        teller.hear(msgspec.structs.replace(CLOSED, closed=record), standing)
        await until(lambda: inbox.got, "the first notice")
        teller.hear(msgspec.structs.replace(CLOSED, closed=record), standing)
    left = (tmp_path / "got.json").read_text(), (tmp_path / "variables").read_text(), json.dumps(inbox.got)
    for told in left:
        assert CLEAN in told or CLEAN.replace("<", "&lt;").replace(">", "&gt;") in told
        assert not [
            harm for harm in (SECRET, ARGUMENT, TOKEN, "ZWNo", "\x1b", "\\u001b", "\u202e", "\\u202e") if harm in told
        ]
    notices = [json.loads(line) for line in left[0].splitlines()]
    refused = next(notice for notice in notices if notice["release"])
    assert refused["release"]["env"] == {"HUB_PASSWORD": "...", "LR": "..."}
    assert refused["release"]["argv"] == ["job.py", "--hub-token", "<secret>", "--lr", "0.1"]
    assert refused["owner"] == refused["release"]["who"] == "ann@example.org", "it is told whose release it was"
    assert teller.said == []


async def test_what_a_hook_says_is_masked_in_our_log(tmp_path: Path) -> None:
    async with telling(tmp_path, command=f"echo no {TOKEN}; exit 3", least_s=0.0) as teller:
        teller.hear()
        await until(failed(teller, 1), "a failure")
    assert len(teller.said) == 1 and ": no <token>; " in teller.said[0]


async def test_the_end_is_told_at_once_with_its_code(tmp_path: Path) -> None:
    async with telling(tmp_path, command="echo $HOLDFAST_TOPIC $HOLDFAST_CODE >> told", least_s=1e6) as teller:
        teller.hear()
        await until((tmp_path / "told").exists, "the first notice")
        teller.hear()
        teller.hear(ENDED)
    assert (tmp_path / "told").read_text() == "incident\ngave up 93\n"


async def test_notices_in_between_are_told_with_the_next(tmp_path: Path) -> None:
    async with telling(tmp_path, command="cat >> told; echo >> told", least_s=1e6) as teller:
        teller.hear()
        await until(lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text(), "the first notice")
        for _ in range(5):
            teller.hear()
        await asyncio.sleep(0)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [notice["more"] for notice in told] == [0, 4]  # the second came with the end of it all


async def test_a_failing_command_is_told_once_with_its_last_words(tmp_path: Path) -> None:
    words = "no such pager"
    async with telling(tmp_path, command=f"echo {words} >&2; exit 3", least_s=0.0) as teller:
        for count in (1, 2, 3):
            teller.hear()
            await until(failed(teller, count), "a failure")
    assert len(teller.said) == 1
    assert teller.said[0].startswith("hook.command ") and f"code 3: {words}; " in teller.said[0]
    assert (tmp_path / "hook.log").read_text() == f"{words}\n" * 3


async def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, no_orphans: str) -> None:
    async with telling(tmp_path, command="sleep 600 & echo $! $$ > pids; sleep 600", timeout_s=1.0) as teller:
        teller.hear()
        await until(lambda: teller.said, "the sentence")
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of both")
    assert "within 1 s" in teller.said[0]


async def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path: Path, no_orphans: str) -> None:
    async with telling(tmp_path, command="sleep 600 & echo $! > pid", timeout_s=30.0) as teller:
        teller.hear()
        await until(lambda: (tmp_path / "hooked.json").exists(), "the end of the command")
        pid = int((tmp_path / "pid").read_text())
        await until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of what it left")
    assert teller.said == []


async def test_a_command_that_reads_nothing_or_does_not_exist(tmp_path: Path) -> None:
    async with telling(tmp_path, command="true") as teller:
        teller.hear()
    assert teller.said == []
    async with telling(tmp_path / "nowhere", command="true") as teller:
        teller.hear()
    assert teller.said[0].startswith("hook.command ")
    async with telling(tmp_path, command="no-such-command-at-all") as teller:
        teller.hear(ENDED)
    assert teller.said == []  # told before, as far as the file says: entry 1 was


async def test_a_server_gets_json(tmp_path: Path) -> None:
    inbox = Inbox()
    async with serving(inbox) as url, telling(tmp_path, url=url) as teller:
        teller.hear()
    assert inbox.types == ["application/json"]
    assert (inbox.got[0]["topic"], inbox.got[0]["incident"]["number"]) == ("incident", 3)


async def test_a_server_gets_what_slack_takes(tmp_path: Path) -> None:
    inbox = Inbox()
    async with serving(inbox) as url, telling(tmp_path, url=url, format="slack") as teller:
        teller.hear(ENDED)
    assert inbox.got == [{"text": "holdfast r: ended with code 93: rank 0 on n0 failed; nothing helps"}]


async def test_a_server_that_stumbles_is_asked_again_and_one_that_refuses_is_not(tmp_path: Path) -> None:
    inbox = Inbox(503, 200)
    async with serving(inbox) as url, telling(tmp_path, url=url) as teller:
        teller.hear()
    assert (len(inbox.got), teller.said) == (2, [])
    inbox = Inbox(403)
    async with serving(inbox) as url, telling(tmp_path, url=url) as teller:
        teller.seq = 1
        teller.hear()
    assert len(inbox.got) == 1
    assert "hook.url (127.0.0.1) answered 403" in teller.said[0]
    assert "secret-path" not in teller.said[0]


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    async with serving(Inbox()) as url:
        pass
    async with telling(tmp_path, url=url) as teller:
        teller.hear()
    assert teller.said[0].startswith("hook.url (127.0.0.1) ")
    assert "secret-path" not in teller.said[0]


async def test_a_server_that_never_answers_holds_up_nobody(tmp_path: Path) -> None:
    stuck = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stuck.wait()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with telling(tmp_path, url=f"http://127.0.0.1:{port}/", command="touch told", timeout_s=1.0) as teller:
        teller.hear()
        await until((tmp_path / "told").exists, "the command, which waits for no server")
    stuck.set()
    server.close()
    await server.wait_closed()
    assert teller.said[0].startswith("hook.url (127.0.0.1) ") and "within 1 s" in teller.said[0]


async def test_a_controller_that_comes_back_tells_only_what_was_not_told(tmp_path: Path) -> None:
    async with telling(tmp_path, command="echo first >> told") as teller:
        teller.hear()
    later = Teller(tmp_path, HookLimits(command="echo second $HOLDFAST_TOPIC >> told"))
    later.hear()  # replayed: this one was told
    later.hear(ENDED)  # and this one, of the last moment, was not
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(later.hooks.run())
        later.hooks.finish_up()
    assert (tmp_path / "told").read_text() == "first\nsecond gave up\n"


async def test_without_a_hook_nothing_is_kept(tmp_path: Path) -> None:
    async with telling(tmp_path) as teller:
        teller.hear()
    assert files(tmp_path) == []


async def test_a_private_key_in_the_last_words_of_a_command_is_masked(tmp_path: Path) -> None:
    body = "".join(f"{n:02}aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5bC7dE9fG1hJ3kL5mN7pQ9rS1tU\\n" for n in range(30))
    key = f"-----BEGIN PRIVATE KEY-----\\n{body}sH0rt==\\n-----END PRIVATE KEY-----\\n"
    async with telling(tmp_path, command=f"printf -- '{key}failed'; exit 3") as teller:
        teller.hear()
    (said,) = teller.said
    assert "<private key>\nfailed" in said
    assert "9kL1" not in said and "sH0rt" not in said and "END PRIVATE" not in said
