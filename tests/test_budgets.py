"""Holds the sizes: of files, functions and the whole; and the words that are no names here."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import msgspec

from holdfast.cli.command_dispatch import COMMANDS
from tests.sources import look

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "holdfast"

# Raising one of these is a change of its own, with its reason in the commit.
# Of Python in holdfast/: the walking skeleton took 9,200, state that survives as much again, seeing trouble 5,000,
# finding whom to evict (last words, probes, replay) another 7,000; releases, planned restarts, orders of people, hooks
# and what is done about bad batches 6,500; faults for real processes and their matrix 4,500; the control plane's own
# world, in which everything around it fails, 2,200; the simulator at scale 2,500; who is let in, and how both sides
# of a link prove themselves, 1,200, and by tokens of one node and certificates of the user's own 600 more; a journal
# that knows what it has lost, and a controller that goes on, 800; code that is run where it stands, and work that
# finds its way home from copies, 1,000; what status, report and every command line say, and docstrings, 400;
# a first line that waits for little, 300; names of two words instead of one, and the lines that these break, 900;
# decryption by processes of its own, 150; the job's state as a record with its invariants, and a view of it for
# readers, 300; counters that never fall, what steps are counted from, imports that the environment changes, 150;
# parts of the controller that say what they need when they are made, 400; the ports of an agent, so that the
# simulation runs the real one, 500; a machine of its own for what a node holds and sends, 600; a catalog of last words
# that is prepared beforehand, 130; opinions on failures that the rules do not know: past ones, and a running job that
# asks, 900; what only a series of log lines shows, tracebacks that break off, and witnesses, 300;
# time without a controller, steps made again and the end of training, each told as it was, 400; releases that come in
# with a restart, and our own console read again, 350; logs as people paste them, services that refuse, and the order of
# more failures, 280; pace and MFU of releases, 300; traffic of links and who reaches whom, 450; hangs for which nobody
# is named, and the groups that a script reports, 230; losses that scripts only log, and losses of
# steps that are made again, 700; heat, silent drivers and switches, held against what happens to the job, 600; hosts
# that are blocked because their machines are bad, and the list of them, 600; states of the script's own that are copied
# beside training, and imports that reach other hosts, 200; a step that all devices of a node make together, rails, and
# standbys by the losses of past runs, 1,300; states on local disks, 740; true rows, labels and verdicts, 330; storage
# that freezes nothing, paths that two runs want, and jobs that were over, 230; incidents by
# what ended them, in reports and in the simulator, 70; what GPUs have begun, and messages between ranks, 600; hangs
# that are acted on when waiting has cost a restart, 210; lists of blocked hosts that hang, tokens that these keep, and
# output that nobody reads, 200; what storage has at the end, and doubts that it keeps, 300; links that are down, and
# words that agree with logs, 300; collectives that a few have passed, and deadlocks that are the code's, 100; GPUs that
# are slow by themselves, 130; compiled code for standbys, 170; stalls, paths and stops that are told truly, 400;
# checkpoints from what runs leave on disks, and steps that torch makes up, 100; links that stay down, nodes that are
# absent when a person is asked, and where a job stood, 70; what fleets tell of their nodes: queues, losses, ends that
# are known beforehand, and where machines are, 480; nodes, keepers, orders and folders that lie, 310; nodes on Slurm:
# its commands and what they print, jobs and steps, batch scripts, and going on after a time limit, 1,320; a journal in
# Postgres, its lease, and hosts that carry the controller in turns, 1,200; nodes as pods of Kubernetes: their manifests
# and what is said of them, lists and watches, a lease, and the command line, 1,380; why nodes are given back, jobs that
# are cancelled, and controllers that move on Slurm, 150; runs and blocked hosts of databases and clusters, and
# controllers of Kubernetes that take turns, 440; help and completion from prepared command lines 230, metrics by a
# table 90, the footer of a terminal 220, parts of runs and two runs beside each other 260; the web page: the story of
# each incident and the history of each node from the journal, its server and its sources, 1,750; ranks that
# tell of no steps, slow ranks in the report, and consoles without a failure, 250; the ports of a keeper, so that
# the simulation runs the real one over real bytes, 250; steps redone by whoever lost them, ranks that hold no step in
# common, losses that were only told, 250; proved journals in databases, 100; a page whose key is no
# cookie, secrets that no release takes along, 200; the trainers of others: their steps, their state, their own
# checkpoints, and what is seen of a state before it is restored, 730; messages that a GPU does not begin, 40; the
# lineage of every state, 120; steps that states tell of, set-up that stacks show, sentences in their order,
# updates that are skipped, 375; learned words beside the rules of last words, 200; ranks that survive: what makes
# their groups again and binds models to them 430, how they are told 290, parked ranks of an agent and of the simulation
# 260; links that ask for nothing, at the port, 120; doubts that are sealed and kept twice, 95; owners that name their
# folder, 20; run directories that are their caller's alone, names that are no paths, and secrets of homes and pods,
# 170; seven days of all runs as one summary 340, incidents as traces 185, what ranks printed before an incident, and
# what a release changed, 165; copies that were given up, 40; tickets for relays, 130; spare ranks that are forked
# before a failure is judged, 115; ranks that are killed together, and what is no detection, 150; a fence against
# seals, and groups over NCCL that outlive a rank, 150; ends of all nodes that lead no further, standbys that are taken
# away, and closed links that a cluster is asked about, 60; releases that hosts find in the run directory, 30;
# zygotes that wait for what ranks write of their imports, 30; one line each for TorchTitan, DeepSpeed and
# Megatron-Core, 420; states that are asked for again, 40; captured graphs and the word of RAS, 230; ranks that go on
# with the same batch on fewer nodes: whole states at another world size, and the batch that is divided, 460; standing
# spare ranks and their rehearsal, 140; what trackers of scripts get, and runs of theirs that go on, 480; the time
# between collectives as a map, 60; checkpoints that trainers write, looked at without them, 310; checkpoints that
# replicas read together, and the records of routes, 200; tensor cores that GPUs tell of, 100; checkpoints of
# strangers, read in a process with little memory, and journals that are wholly lost, 250; policies of elastic
# pipelines, and the simulator's jobs that go on in kept processes, 1,950; elastic pipelines: steps along routes, sums
# that no placement changes, meetings after failures, snapshots and files of layers, and ranks that are kept with their
# state, 1,750; losses of states that are proved wrong, and memory that is registered after a first step, 60;
# docstrings with one idea in a sentence, 430; plans for thousands of workers that are alike, 50; checkpoints as
# rows of a database, and controllers that are asked at an address, 490; two
# copies of every state, 120; losses with their own steps, writers of trackers that are flushed, and names that are
# suggested, 80; states that are not doubted for a step that was sound before, and starts from step 0 that a person
# must want, 120; jobs that stand, and what for: open incidents in reports, who ordered what, and waits by their names,
# 340; trainers' checkpoints as whole tensors or for other numbers of ranks, 2,200; modules that were split by what
# they hold, with imports and docstrings of their own, and lines that longer names break, 150; several causes of one
# incident, what a job without nodes waits for, who is back, ends of runs at trackers and of jobs for whoever
# attaches, 350; speeds of workers, what was expected of recoveries, and layers that are handed over before an end
# that is known, 600; stacks that alarms keep, ranks that they name, and what is known of one rank, 400; certificates
# that count, as a list, nodes that check signatures, secrets masked in alarms and logs, and journals that are rebuilt
# aside, 650; fleets that ask for the lease before they act, journals that hosts share, and a fleet's word of a lost
# node, 600; the pace of work that scripts tell, replicas of the mesh that they report, and simulated hangs that wait
# as long as real ones, 180; messages of pipelines in one order, groups that are aborted, and pipelines over NCCL,
# 280; Lightning's own checkpoints behind a plugin, parts of trainers' checkpoints that are missed, and progress bars
# below one another, 200; stores that end with their last rank, names of several hosts, ends of reservations, and jobs
# that Slurm takes late, 210; forks of ranks and of the judge that are made in advance, 110; imports that are remembered
# for a script's next run, and causes told apart, 190; values of declared types between ranks, programs that import
# nothing from the working directory, and marks that are missed, 130; checks without a processor, slowness that is over,
# what a person who is asked needs, and why nodes have left, 140; sums that a Checkpointer fixes, and
# stands and losses told as they are, 90; nodes that a job which stands takes unchecked, and full
# disks that are told once, 85; why nodes do not start, and clusters whose credentials, answers and rights
# fail, 100; waits that a Ctrl-C ends, and logs of programs that are masked, 100;
# reports that are mailed, where no script runs, 90; what a takeover may not give up, errors from before a stop,
# lengths of values that a keeper writes, hangs inside C, and what a handshake costs, 300; secrets in forms that got
# past, and pickles that change classes, 150; logs of holders, zygotes, stores and fork servers that are masked, words
# of clusters as well, and what a text loses where it is cut, 350; runs of batch jobs that are followed into the next
# job, and what Slurm refuses, 180; full disks, agents that die, and incidents of several failures, 500; threads of
# NCCL that are woken, 90; secrets on command lines and in parts of values, stacks that are masked on their node, and
# files of ranks that are no files, 300; what a recovery took that a pause broke off, rooms that are told of again, and
# runs that are stopped before they begin, 300; states that are cut anew for another number of ranks, copies in gaps
# of a step's network, backward passes in halves, steps before their vote, and work that moves, 3,200.
TOTAL_LINES = 106_700
SETTINGS = 121  # a detector has about five: its stance, its pace, its limits; hooks have five; backup.pacing is one
NOUNS = 90  # structs in holdfast/model/; the last one is a time in which a job was slow, and what it cost

FILE_LINES = 400  # without imports, which are a list
FUNCTION_LINES = 50
PARAMETERS = 5  # by position; self does not count
DEPTH = 3
ONE_WORD_SHARE = 0.15  # of functions: those that everybody knows, such as run, close, read; the rest say what to what

NOT_NAMES = frozenset("manager handler helper util common base info data context worker master scheduler".split())
TERMS = re.compile("data_(parallel|loader)|(read|write|resolve)_data")  # PyTorch's own words for these things

# "file::function": the process's top loop, and the client's outermost call; nobody else catches everything.
# The client never harms training: its outermost calls swallow everything. A rank's own exceptions, of whatever kind,
# are shown and end it. A module that cannot be loaded ahead, for whatever reason, is left out. Drivers of storage raise
# what their own libraries raise. A fork never goes on in the frames of its parent. In a simulated world whatever ends a
# controller or an agent is a finding.
CATCH_ALL = frozenset(
    {
        "checkpoint/remote_storage.py::_as_storage_error",
        "client/training/rank_flight_recorder.py::run",
        "client/boot/script_runner.py::_show_failure",
        "client/boot/script_runner.py::run_script",
        "client/training/logged_losses.py::_report",
        "client/training/logger_hooks.py::seen",  # inside of the script's own call of its logger
        "client/training/progress.py::attach",
        "client/training/progress.py::phase",
        "client/training/progress.py::step",
        "client/training/progress.py::watch",
        "client/training/skipped_batches.py::skip",
        "client/training/tracker_events.py::attempt",  # as above, of W&B, MLflow and TensorBoard
        "client/training/tracker_events.py::run",
        "client/training/tracker_runs.py::_start_run",  # and then without us, as the script wrote it
        "client/training/tracker_runs.py::log_mlflow_parameters",  # raised again, unless a resumed run is the reason
        "client/training/update_norm.py::_after_step",  # torch calls these inside of the script's own calls
        "client/training/update_norm.py::_reduce_bucket",
        "client/training/update_norm.py::seen",
        "client/boot/zygote.py::_try_import",
        "client/survival/survivor.py::run",  # whatever the script's function raises, when its generation is over
        "linux/limited_child.py::_answer",
        "linux/preimported_fork.py::fork",
        "sim/dst/agent_process.py::_run_agent",
        "sim/dst/controller_process.py::_serve_link",
        "sim/dst/controller_process.py::_run_life",
        "sim/dst/virtual_loop.py::run",  # as a thread of a pool does, for who waits for it
    }
)


def shapeless(path: Path) -> Iterator[str]:
    """Everything in a file that is too long, too wide or too deep."""
    text = path.read_text()
    source = look(text)
    if (lines := text.count("\n") - source.import_lines) > FILE_LINES:
        yield f"{path}: {lines} lines"
    if source.depth > DEPTH:
        yield f"{path}: module level is {source.depth} deep"
    for function in source.functions:
        where = f"{path}:{function.line}: {function.name}"
        if function.lines > FUNCTION_LINES and not function.is_table:
            yield f"{where} has {function.lines} lines"
        if function.positional > PARAMETERS:
            yield f"{where} takes {function.positional} parameters"
        if function.depth > DEPTH:
            yield f"{where} is {function.depth} deep"


def words(name: str) -> set[str]:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return set(TERMS.sub("", snake).split("_"))


def misnamed(path: Path) -> Iterator[str]:
    """Modules, classes and functions named by a word that says nothing or that we have another one for."""
    for line, name in ((1, path.parent.name), (1, path.stem), *look(path.read_text()).scopes):
        if bad := words(name) & NOT_NAMES:
            yield f"{path}:{line}: {name} ({', '.join(sorted(bad))})"


def catch_alls(root: Path) -> Iterator[str]:
    """Where everything is caught, as "file::function"."""
    for path in sorted(root.rglob("*.py")):
        for function in look(path.read_text()).catch_alls:
            yield f"{path.relative_to(root).as_posix()}::{function}"


def test_shapes() -> None:
    trees = ("holdfast", "tests", "examples", "benchmarks")
    assert not [fault for tree in trees for path in (ROOT / tree).rglob("*.py") for fault in shapeless(path)]


def test_names() -> None:
    assert not [fault for path in PACKAGE.rglob("*.py") for fault in misnamed(path)]


def test_no_two_classes_share_a_name() -> None:
    where = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            where[name].append(path.relative_to(PACKAGE).as_posix())
    assert len(where) > 500
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_no_two_modules_share_a_name() -> None:
    stems = Counter(path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__"))
    assert len(stems) > 500
    assert [name for name, count in stems.items() if count > 1] == []


def test_commands_are_modules_named_as_typed() -> None:
    stems = {path.stem for path in (PACKAGE / "cli/commands").glob("[a-z]*.py")}
    assert {f"{name}_command" for name in COMMANDS} >= {stem for stem in stems if stem.endswith("_command")}
    assert [stem for stem in stems - {"order_commands"} if stem.split("_")[0] not in COMMANDS] == []


def test_few_functions_have_a_name_of_one_word() -> None:
    found = [function.name for path in PACKAGE.rglob("*.py") for function in look(path.read_text()).functions]
    names = [name for name in found if not name.startswith("__")]
    short = [name for name in names if "_" not in name.strip("_")]
    assert len(names) > 3000 and len(short) <= ONE_WORD_SHARE * len(names), len(short) / len(names)


def test_nobody_else_catches_everything() -> None:
    assert set(catch_alls(PACKAGE)) == CATCH_ALL  # an entry that is no longer needed goes too


def test_total_lines() -> None:
    assert sum(path.read_text().count("\n") for path in PACKAGE.rglob("*.py")) <= TOTAL_LINES


def test_settings(setting_names: list[str]) -> None:
    assert 0 < len(setting_names) <= SETTINGS


def test_nouns() -> None:
    modules = [import_module(f"holdfast.model.{found.name}") for found in iter_modules([str(PACKAGE / "model")])]
    nouns = {
        noun
        for module in modules
        for noun in vars(module).values()
        if isinstance(noun, type) and issubclass(noun, msgspec.Struct) and noun.__module__ == module.__name__
    }
    assert 0 < len(nouns) <= NOUNS


DEEP = "def f(a):\n for b in a:\n  if b:\n   with b:\n    {}\n"


def test_shapes_are_seen(tmp_path: Path) -> None:
    def seen(text: str) -> str:
        (tmp_path / "a.py").write_text(text)
        return " ".join(shapeless(tmp_path / "a.py"))

    assert "401 lines" in seen("\n" * 401)
    assert seen("\n" * 400) == ""
    assert seen("import a\nfrom b import (\n    c,\n    d,\n)\n" + "\n" * 400) == ""
    assert "51 lines" in seen("def f():\n" + "    a()\n" * 50)
    assert seen("def f():\n" + "    a()\n" * 49) == ""
    assert seen("def f(a):\n match a:\n" + "  case 1:\n   return a\n" * 40) == ""
    assert "6 parameters" in seen("class A:\n async def f(self, a, b, c, d, e, f): ...\n")
    assert seen("class A:\n def f(self, a, b, c, d, e, *, f): ...\n") == ""
    assert "4 deep" in seen(DEEP.format("while b: pass"))
    assert seen(DEEP.format("def g():\n     while b: pass")) == ""
    assert seen("def f(a):\n" + " if a: pass\n" + " elif a: pass\n" * 5 + " else: pass\n") == ""
    assert seen(DEEP.format("match b:\n     case 1: pass")) == ""
    assert "4 deep" in seen(DEEP.format("match b:\n     case 1:\n      if b: pass"))
    assert "4 deep" in seen("try: pass\nexcept OSError:\n for a in b:\n  if a:\n   while a: pass\n")


def test_names_are_seen(tmp_path: Path) -> None:
    assert words("HTTPHandler") & NOT_NAMES == {"handler"}
    assert words("_load_data") & NOT_NAMES == {"data"}
    assert not words("DataParallelGroup") & NOT_NAMES
    assert not words("database_metadata_based") & NOT_NAMES
    path = tmp_path / "common" / "io_util.py"
    path.parent.mkdir()
    path.write_text("class RankInfo:\n    def base(self): ...\nMASTER_ADDR = 'master'\n")
    assert len(list(misnamed(path))) == 4


def test_catch_alls_are_seen(tmp_path: Path) -> None:
    tried = "def {0}():\n try: pass\n except{1}: pass\n"
    cases = {"a": "", "b": " Exception", "c": " (OSError, BaseException) as e", "d": " OSError", "e": "* Exception"}
    text = "".join(tried.format(name, caught) for name, caught in cases.items())
    (tmp_path / "m.py").write_text(text + "def f():\n with suppress(Exception): pass\n")
    assert list(catch_alls(tmp_path)) == [f"m.py::{name}" for name in "abcef"]
