"""Opinions on failures that nobody has seen: right at their first coming, and at their second, after a correction.

The failures are logs of tests/corpus/outside. At the first coming a language model is asked where the rules are unsure.
It is a stand-in: a server on loopback that names the class of the nearest log of tests/corpus/ours. At the second
coming no model is asked. The log then has other numbers, times and paths and lacks some lines, and the store has the
right answers for all of them, as a person would have given them. The other logs of the folder, and some of
tests/corpus/ours, show how often a failure is taken for one that it is not.
"""

import hashlib
import io
import json
import os
import random
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._report import Findings
from benchmarks._words_corpus import CORPUS, EVICT, Label, read_cases
from holdfast.config import Settings, load
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.logs.failure_likeness import LineWords, find_telling_lines, measure_likeness, read_words
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, diagnose_logs
from holdfast.logs.opinion_choice import FailureOpinion, find_opinion, read_telling_lines_of
from holdfast.logs.past_cases import PastCase, PastCases
from holdfast.logs.user_rows import past_cases_path

UNSEEN = 50
EVERY = 3  # of the logs of ours: as what the stand-in knows, and as failures that nobody has corrected
VOTERS = 5  # nearest logs of which the stand-in names the commonest class, where it may wander
DROPPED = 0.1  # of the lines of a longer log are missing at its second coming
GOAL = 0.8  # of all right at their second coming
SHOWN = re.compile(r"^\d+\| (.*)$", re.MULTILINE)


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    label: Label
    text: bytes

    @property
    def logs(self) -> list[RankLog]:
        return [RankLog(open=lambda: io.BytesIO(self.text))]


class Nearest:
    """The stand-in's knowledge: telling lines and classes of labelled logs."""

    def __init__(self, cases: list[Coming]) -> None:
        self._known = [(read_words(read_telling_lines_of(case.logs)), case.label.klass) for case in cases]

    def answer(self, question: dict[str, object]) -> dict[str, object]:
        messages = msgspec.convert(question["messages"], list[dict[str, str]])
        shown = SHOWN.findall(messages[1]["content"])
        lines = find_telling_lines(shown, str)
        near = self._rank_classes(read_words(lines))
        klass = near[0] if not question["temperature"] else Counter(near[:VOTERS]).most_common(1)[0][0]
        return {
            "class": klass,
            "evidence": [lines[0]] if lines else [],
            "confidence": 0.6,
            "explanation": "It is near.",
        }

    def _rank_classes(self, words: list[LineWords]) -> list[str]:
        ranked = sorted(self._known, key=lambda known: -measure_likeness(words, known[0]))
        return [klass for _, klass in ranked]


@contextmanager
def stand_in(nearest: Nearest) -> Iterator[str]:
    """Serve chat completions on loopback; gives the address."""

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(nearest.answer(question))
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def home() -> Iterator[None]:
    """A HOLDFAST_HOME of its own: an empty store."""
    before = os.environ.get("HOLDFAST_HOME")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        os.environ["HOLDFAST_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["HOLDFAST_HOME"]
            if before is not None:
                os.environ["HOLDFAST_HOME"] = before


def comings(folder: Path, every: int = 1) -> list[Coming]:
    found = [
        Coming(label=label, text=b"\n".join(path.read_bytes() for path in paths))
        for _, label, paths in read_cases(folder, every)
    ]
    return sorted(found, key=lambda one: hashlib.sha256(one.text).digest())


def come_again(case: Coming, seed: int) -> Coming:
    """The same failure another time: other numbers, times and paths, and of a longer log some lines are missing."""
    rng = random.Random(seed)
    text = case.text.decode("utf-8", "replace")
    text = re.sub(r"\d{3,}", lambda m: "".join(rng.choice("123456789") for _ in m[0]), text)
    text = re.sub(r"\d\d:\d\d:\d\d", lambda m: ":".join(f"{rng.randrange(24):02d}" for _ in range(3)), text)
    text = re.sub(r"(?<!\w)(/[\w.@+-]+)+/", lambda m: f"/srv/run{rng.randrange(99)}/", text)
    lines = text.splitlines()
    if len(lines) >= 10:
        lines = [line for line in lines if rng.random() >= DROPPED]
    steps = [f"step {n} loss {rng.random():.4f}" for n in range(30)]
    return msgspec.structs.replace(case, text="\n".join([*steps, *lines]).encode())


def form_opinion(case: Coming, known: FailureCatalog, settings: Settings, *, ask: bool) -> FailureOpinion:
    rules = diagnose_logs(case.logs, ProcessEnds(code=case.label.exit_code), known)
    return find_opinion(rules, case.logs, settings, ask=ask, say=lambda sentence: None)


def keep_correction(case: Coming) -> None:
    lines = read_telling_lines_of(case.logs)
    PastCases(past_cases_path()).keep_case(PastCase(lines=lines, klass=case.label.klass, said_by="person", at=0.0))


def measure_opinions(table: Table, findings: Findings, known: FailureCatalog) -> None:
    """Add what opinions are worth to a table and to the findings."""
    outside = comings(CORPUS / "outside")
    ours = comings(CORPUS / "ours", EVERY)
    unseen, others = outside[:UNSEEN], outside[UNSEEN:]
    with home(), stand_in(Nearest(ours)) as url:
        settings = load(None, [("model.url", url), ("model.name", "nearest-log")])
        alone = [form_opinion(case, known, settings, ask=False) for case in unseen]
        first = [form_opinion(case, known, settings, ask=True) for case in unseen]
        for case in unseen:
            keep_correction(case)
        again = [come_again(case, seed) for seed, case in enumerate(unseen)]
        second = [form_opinion(case, known, settings, ask=False) for case in again]
        strangers = [*others, *ours]
        mistaken = [form_opinion(case, known, settings, ask=False) for case in strangers]
    taken = [(case, found) for case, found in zip(strangers, mistaken, strict=True) if found.said_by == "person"]
    wrong = sum(case.label.klass != found.diagnosis.klass for case, found in taken)
    evicting = sum(one.said_by != "rules" and one.diagnosis.action == EVICT for one in (*first, *second, *mistaken))
    figures = {
        "opinion_rules_alone": _share_right(unseen, alone),
        "opinion_first_coming": _share_right(unseen, first),
        "opinion_second_coming": _share_right(unseen, second),
    }
    findings.figures |= figures | {
        "opinion_asked": sum(one.said_by == "model" for one in first),
        "opinion_recalled": sum(one.said_by == "person" for one in second),
        "opinion_strangers": len(strangers),
        "opinion_mistaken": wrong,
        "opinion_evictions": evicting,
    }
    findings.goals |= {
        "right at the second coming": figures["opinion_second_coming"] >= GOAL,
        "no opinion evicts": evicting == 0,
    }
    findings.skipped["a real language model"] = "none runs on this host, and a benchmark asks nobody outside"
    for name, value in figures.items():
        table.add_row(f"{UNSEEN} unseen: {name.removeprefix('opinion_').replace('_', ' ')}", f"{value:.1%}", "")
    table.add_row(f"of {len(strangers)} others, taken for one of these and wrong", str(wrong), "")


def _share_right(cases: list[Coming], found: list[FailureOpinion]) -> float:
    right = [one.diagnosis.klass == case.label.klass for case, one in zip(cases, found, strict=True)]
    return round(sum(right) / len(right), 4) if right else 0.0
