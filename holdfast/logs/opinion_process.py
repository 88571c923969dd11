"""The process that finds an opinion on one failure: it reads logs and asks the model in place of the controller."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.config import ConfigError, Settings
from holdfast.decoding import Content, make_decoder
from holdfast.linux import own_process_settings
from holdfast.logs.log_diagnosis import RankLog, open_log, read_ends
from holdfast.logs.opinion_choice import FailureOpinion, find_opinion
from holdfast.logs.past_cases import PastCase, PastCases
from holdfast.logs.user_rows import past_cases_path
from holdfast.model.last_words_diagnosis import Diagnosis

_FILES = 64  # of a generation that are read, those of the failed rank before others
_NICE = 10


class OpinionRequest(msgspec.Struct, frozen=True, kw_only=True, tag="opinion"):
    """Asks what a failure was; the failure is then also stored as a past failure."""

    settings: Settings
    rules: Diagnosis
    folder: str  # of the generation's logs; they may lie on other hosts
    ranks: tuple[int, ...]  # who failed first
    last_lines: tuple[str, ...]  # for the case that they do
    at: float
    outcome: str  # what is being done about it


class OutcomeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """Asks the process to record, in the store of past failures, what became of a failure."""

    id: str
    outcome: str


class OpinionReply(msgspec.Struct, frozen=True, kw_only=True):
    opinion: FailureOpinion | None = None
    id: str = ""  # under which the failure is kept
    said: tuple[str, ...] = ()  # sentences for a person


Request = OpinionRequest | OutcomeRequest
to_request: Callable[[Content], Request] = make_decoder(msgspec.json.Decoder(Request))
to_reply = make_decoder(msgspec.json.Decoder(OpinionReply))


def answer_request(request: Request) -> OpinionReply:
    store = PastCases(past_cases_path())
    said: list[str] = []
    opinion, id = None, ""
    try:
        if isinstance(request, OutcomeRequest):
            store.note_outcome(request.id, request.outcome)
        else:
            opinion = find_opinion(request.rules, _open_logs(request), request.settings, ask=True, say=said.append)
            id = _keep_case(store, request, opinion)
    except ConfigError as e:
        said.append(f"the failure is not kept for the next time: {e}")
    except OSError as e:
        said.append(f"the logs of the failure cannot be read: {e.strerror}")
    return OpinionReply(opinion=opinion, id=id, said=tuple(said))


def _open_logs(request: OpinionRequest) -> list[RankLog]:
    """Return the ends of the generation's logs, with those of failed ranks last. If there are no logs, return the last
    lines that the request brings."""
    first = {f"rank-{rank}" for rank in request.ranks}
    found = filter(Path.is_file, Path(request.folder).rglob("*.log"))
    paths = sorted(found, key=lambda path: (path.parent.name not in first, path))
    chosen = reversed(paths[:_FILES])
    logs = [RankLog(open=lambda path=path: _open_end(path)) for path in chosen]  # type: ignore[misc]
    return logs or [RankLog(open=lambda: io.BytesIO("\n".join(request.last_lines).encode("utf-8", "replace")))]


def _open_end(path: Path) -> io.BytesIO:
    return io.BytesIO(b"".join(read_ends([open_log(path)])))


def _keep_case(store: PastCases, request: OpinionRequest, opinion: FailureOpinion) -> str:
    """Store the failure among the past failures and return its id. Return "" if the rules are sure of their diagnosis,
    or if the failure has no telling lines."""
    if not opinion.lines or (opinion.said_by == "rules" and request.rules.confidence >= request.settings.model.below):
        return ""
    by_model = opinion.said_by == "model"  # a person has spoken of another failure, not of this one
    case = PastCase(
        lines=opinion.lines,
        klass=opinion.diagnosis.klass if by_model else request.rules.klass,
        said_by="model" if by_model else "rules",
        at=request.at,
        note=opinion.diagnosis.explanation if by_model else "",
        outcome=request.outcome,
    )
    return store.keep_case(case)


def main() -> None:
    """Answer the request on standard input. The argument is the pid of the controller; this process ends when the
    controller ends."""
    own_process_settings.die_with_parent(int(sys.argv[1]))
    os.nice(_NICE)
    reply = answer_request(to_request(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(msgspec.json.encode(reply))


if __name__ == "__main__":
    main()
