"""What a rank's end is taken for."""

import msgspec
import pytest

from holdfast.core.detect.crash import alarm_of
from holdfast.core.incident.incident_case import TOLD
from holdfast.core.incident.ladder import find_verdict
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Remedy
from holdfast.model.observation import Exit
from tests.core.diagnose.test_ladder import case, past

CATALOG = catalog_files.load_failures()
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 88, in <module>',
    "    main()",
    '  File "/job/model.py", line 12, in forward',
    "    return x / 0",
    "ZeroDivisionError: division by zero",
)


def ended(code: int, *words: str, latched: str = "", rank: int = 3) -> Alarm:
    exit = Exit(node="n1", generation=2, rank=rank, code=code, at=5.0, words=words, latched=latched)
    return alarm_of(exit, CATALOG)


def test_the_alarm_says_who_when_and_how() -> None:
    alarm = ended(1, *TRACEBACK)
    assert (alarm.kind, alarm.at, alarm.suspects, alarm.ranks) == (Kind.CRASH, 5.0, ("n1",), (3,))
    assert (alarm.generation, alarm.code, alarm.klass, alarm.group) == (2, 1, "python_exception", "script")
    assert alarm.reason == "exited with code 1 (ZeroDivisionError: division by zero)"
    assert alarm.signature == "python_exception 1 model.py:12"
    assert alarm.evidence == TRACEBACK


def test_a_state_that_a_peer_did_not_give_costs_no_node_and_is_not_the_scripts_fault() -> None:
    words = (
        *TRACEBACK[:4],
        "    raise StateFetchError(answer.why)",
        "holdfast.checkpoint.keeper_client.StateFetchError: cannot fetch the state of rank 3 at step 376: n2: "
        "the keeper at 10.0.0.2:4123 cannot be reached: EOF occurred in violation of protocol",
    )
    alarm = ended(1, *words, latched=words[-1])
    assert (alarm.klass, alarm.action) == ("peer_connection_lost", "retry")
    assert " n2: " in alarm.reason and " 10.0.0.2:4123 " in alarm.reason
    for rounds in range(3):
        verdict = find_verdict(case(alarm, past=past(*[10] * rounds), rounds=rounds))
        assert (verdict.remedy, verdict.reason) == (Remedy.RESTART, "no node is to blame: restarted in place")


LOST_PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:4123"
LED_TO = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def test_an_exception_stands_alone_if_no_other_failure_shows() -> None:
    """Only then is it surely the rank's own, and no echo of another rank's end."""
    assert ended(1, *TRACEBACK).alone
    assert ended(1, *IN_A_CHILD).alone, "a child's exception is the rank's own"
    for link in LED_TO:
        for first in (LOST_PEER, "RuntimeError: what a library says of it"):
            assert not ended(1, *TRACEBACK[:3], first, "", link, "", *TRACEBACK).alone
    assert not ended(1, *TRACEBACK[:3], LOST_PEER, *TRACEBACK).alone, "it was printed, and gone on from"
    assert not ended(1, LOST_PEER.removeprefix("RuntimeError: "), *TRACEBACK).alone
    assert not ended(1, latched=TRACEBACK[-1]).alone, "who knows what was before"
    assert not ended(-9).alone


def raised(text: str, *, where: str = "forward", code: str = "", file: str = "/job/model.py") -> Alarm:
    code = code or f"raise {text.partition(':')[0].rpartition('.')[2]}(words)"
    return ended(1, *TRACEBACK[:3], f'  File "{file}", line 12, in {where}', f"    {code}", text)


def test_what_the_script_raises_itself_is_its_own() -> None:
    for text in (
        "RuntimeError: the tokenizer has no word for this",
        "RuntimeError: rank 3 has a batch of 0 samples",
        "RuntimeError: shard 17 is corrupt",
        "Exception",
        "data.BadBatch: sample 7",
    ):
        assert raised(text).own, text
    assert ended(1, *(f"[rank3]: {line}" for line in (*TRACEBACK[:4], "    raise ValueError", "ValueError"))).own
    worker = [*IN_A_CHILD[:-1], '[rank3]:     raise ValueError("sample 77 is corrupt")', IN_A_CHILD[-1]]
    assert ended(1, *worker).own, "its child's"


def test_what_may_come_of_another_rank_or_of_a_stop_is_not_its_own() -> None:
    for text in (
        "RuntimeError: rank 2 has a batch of 0 samples",
        "RuntimeError: some ranks have failed",
        "RuntimeError: lost contact with a peer",
        "RuntimeError: Broken pipe",
        "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4123",
        "RuntimeError: NCCL communicator was aborted",
        "RuntimeError: gave up after the collective",
        "RuntimeError: step 10 timed out",
        "RuntimeError: all agreed to stop",
        "TimeoutError: step 10",
        "ConnectionError: 10",
        "job.PeerGone: 10",
        "job.Terminated: 10",
    ):
        assert not raised(text).own, text
    plain = "RuntimeError: sample 7"
    assert not raised(plain, code="work.wait()").own, "who knows what that waits for"
    assert not raised(plain, code="raise error").own, "one that was kept"
    assert not raised(plain, code='raise RuntimeError("sample 7") from None').own, "of what it hides"
    assert not raised(plain, where="on_sigterm").own
    assert not raised(plain, file="/opt/venv/lib/python3.11/site-packages/trainer/loop.py").own
    assert not ended(1, LOST_PEER.removeprefix("RuntimeError: "), *TRACEBACK[:4], "    raise KeyError", "KeyError").own


IN_A_CHILD = (
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "/job/train.py", line 88, in <module>',
    "[rank3]: ValueError: Caught ValueError in DataLoader worker process 1.",
    "[rank3]: Original Traceback (most recent call last):",
    '[rank3]:   File "/job/dataset.py", line 7, in __getitem__',
    "[rank3]: ValueError: sample 77 is corrupt",
)
SPAWNED = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 88, in <module>',
    "torch.multiprocessing.spawn.ProcessRaisedException: ",
    "",
    "-- Process 0 terminated with the following error:",
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in work',
    "KeyError: 'tokens'",
)


def test_what_a_child_of_the_rank_raised_is_told_and_not_that_it_did() -> None:
    latched = "ValueError: Caught ValueError in DataLoader worker process 1."
    for alarm in (ended(1, *IN_A_CHILD), ended(1, *IN_A_CHILD, latched=latched)):
        assert alarm.reason == ("exited with code 1 (ValueError: sample 77 is corrupt, in DataLoader worker process 1)")
        assert alarm.raised == "ValueError"
    assert ended(1, *SPAWNED).reason == "exited with code 1 (KeyError: 'tokens')"
    elsewhere = ended(1, *IN_A_CHILD, *TRACEBACK, latched="ZeroDivisionError: division by zero")
    assert elsewhere.reason == "exited with code 1 (ZeroDivisionError: division by zero)", "it had got over the other"


def test_a_wrapper_that_is_latched_and_said_is_no_rival_of_what_it_wraps() -> None:
    told = [line.replace("sample 77 is corrupt", "cannot decode image /data/77.jpg") for line in IN_A_CHILD]
    words = [line.replace("ValueError", "RuntimeError") for line in told]
    for latched in ("", "RuntimeError: Caught RuntimeError in DataLoader worker process 1."):
        alarm = ended(1, *words, latched=latched)
        assert (alarm.klass, alarm.action) == ("data_corrupt", "fix_config"), latched
        assert alarm.hint == "Skip or rebuild the sample or file that is named."


def test_the_variable_that_nobody_set_is_named_and_other_keys_are_none() -> None:
    frames = (*TRACEBACK[:2], '    data = os.environ["DATA_ROOT"]')
    unset = ended(1, *frames, '  File "<frozen os>", line 679, in __getitem__', "KeyError: 'DATA_ROOT'")
    assert " DATA_ROOT " in unset.hint
    other = ended(1, *frames, "KeyError: 'hidden_size'")
    assert (other.action, other.hint.partition(",")[0]) == (
        "rollback_or_fix_code",
        "Fix the code at the frame that is named",
    )


def test_a_script_that_ends_itself_is_quoted() -> None:
    exit = Exit(node="n1", generation=2, rank=3, code=1, at=5.0, said="training failed: my batch is broken")
    quoted = 'last said: "training failed: my batch is broken"'
    for latched, told in (("SystemExit: 1", f"SystemExit: 1; {quoted}"), ("", quoted), ("KeyError: 'a'",) * 2):
        alarm = alarm_of(msgspec.structs.replace(exit, latched=latched), CATALOG)
        assert alarm.reason == f"exited with code 1 ({told})"
    long = alarm_of(msgspec.structs.replace(exit, said="x" * 5000, latched="SystemExit: 1"), CATALOG)
    assert len(long.reason) < 300
    assert ended(-9).reason == alarm_of(msgspec.structs.replace(exit, code=-9, latched=""), CATALOG).reason


def test_torchs_rank_prefix_hides_nothing() -> None:
    # Once a process group is up, torch writes the rank before every line of a traceback.
    prefixed = ended(1, *(f"[rank3]: {line}" for line in TRACEBACK))
    plain = ended(1, *TRACEBACK)
    assert (prefixed.klass, prefixed.reason, prefixed.signature) == (plain.klass, plain.reason, plain.signature)


def test_failures_that_look_the_same_have_the_same_signature() -> None:
    assert ended(1, *TRACEBACK).signature == ended(1, *TRACEBACK, rank=0).signature
    other = (*TRACEBACK[:3], TRACEBACK[3].replace("12", "13"), *TRACEBACK[4:])
    assert ended(1, *TRACEBACK).signature != ended(1, *other).signature
    assert ended(-9).signature != ended(-11).signature


@pytest.mark.parametrize(
    ("code", "klass"),
    [(-7, "shm_exhausted"), (-11, "process_crash_signal"), (-15, "preempted_cancelled")],
)
def test_without_words_the_code_speaks(code: int, klass: str) -> None:
    assert ended(code).klass == klass


def test_a_killed_rank_had_no_time_for_last_words() -> None:
    alarm = ended(-9, "retrying: Connection refused")
    assert (alarm.klass, alarm.reason) == ("", "was killed by SIGKILL (sender unknown)")


def test_want_of_memory_takes_the_kernels_word() -> None:
    exit = Exit(node="n1", generation=2, rank=3, code=-9, at=5.0, starved=True)
    alarm = alarm_of(exit, CATALOG)
    assert (alarm.klass, alarm.action) == ("host_oom_kill", "fix_config")
    assert alarm.reason == "was killed by SIGKILL (the kernel killed for want of memory)"
    assert alarm.signature != ended(-9).signature


def test_scarce_memory_is_a_guess_where_the_kernel_says_nothing() -> None:
    exit = Exit(node="n1", generation=2, rank=3, code=-9, at=5.0, pressed="memory pressure was 43 %")
    alarm = alarm_of(exit, CATALOG)
    assert (alarm.klass, alarm.action) == ("host_oom_kill", "fix_config")
    assert alarm.confidence < TOLD, "no node goes for it, and none is called too small"
    assert alarm.reason == "was killed by SIGKILL (probably the OOM killer: memory pressure was 43 %)"
    assert alarm.pressed == exit.pressed
    sure = alarm_of(msgspec.structs.replace(exit, starved=True), CATALOG)
    assert sure.confidence > alarm.confidence and not sure.pressed


def test_a_script_that_chooses_to_end_is_the_scripts_doing() -> None:
    alarm = ended(3, latched="SystemExit: 3")
    assert (alarm.klass, alarm.group, alarm.reason) == ("", "script", "exited with code 3 (SystemExit: 3)")
    assert ended(3).group == ""


@pytest.mark.parametrize(
    ("error", "klass"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled", "driver_runtime_mismatch"),
        ("AttributeError: module 'torch._C' has no attribute '_nccl_version'", "driver_runtime_mismatch"),
        ("RuntimeError: Tried to instantiate dummy base class CUDAGraph", "driver_runtime_mismatch"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "nccl_init_config"),
    ],
)
def test_a_torch_without_cuda_is_the_jobs_environment(error: str, klass: str) -> None:
    alarm = ended(1, *TRACEBACK[:-1], error)
    assert (alarm.klass, alarm.group) == (klass, "script")
    [hint] = {row.hint for row in CATALOG.rows if row.klass == klass and row.group == "script" and row.pattern}
    assert alarm.hint == hint


def test_but_one_that_aborts_speaks_first() -> None:
    watchdog = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran too long"
    assert ended(-6, watchdog).klass == "nccl_timeout"


def test_what_it_wrote_into_its_slot_counts() -> None:
    alarm = ended(1, latched="KeyError: 'tokens'")
    assert (alarm.klass, alarm.reason) == ("python_exception", "exited with code 1 (KeyError: 'tokens')")
    assert ended(-9, latched="KeyError: 'tokens'").klass == "python_exception"


def test_the_weightiest_words_win() -> None:
    echo = "RuntimeError: Connection reset by peer"
    assert ended(1, *TRACEBACK, echo).klass == "python_exception"
    assert ended(1, echo, *TRACEBACK).klass == "python_exception"


@pytest.mark.parametrize(
    "words",
    [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
        "[12.5] kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_a_script_may_print_anything_so_its_words_evict_nobody(words: str) -> None:
    alarm = ended(1, words)
    assert alarm.klass and alarm.action == "run_diagnostics"


def test_unknown_endings_have_no_class() -> None:
    alarm = ended(3, "so long")
    assert (alarm.klass, alarm.group, alarm.reason, alarm.signature) == ("", "", "exited with code 3", "exit 3")


def test_evidence_is_bounded() -> None:
    alarm = ended(1, *(f"line {i}" for i in range(1000)))
    assert len(alarm.evidence) == 12
    assert alarm.evidence[-1] == "line 999"
    assert len(ended(1, "RuntimeError: " + "x" * 10_000).reason) < 300


def test_a_failure_is_told_whole_or_cut_between_words() -> None:
    whole = "RuntimeError: [../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:24017"
    trace = ("Traceback (most recent call last):", '  File "train.py", line 1, in <module>', whole)
    assert ended(1, *trace, latched="RuntimeError: [../gloo/pair.cc:534] Connection closed ...").reason == (
        f"exited with code 1 ({whole})"
    )
    long = ended(1, latched="ValueError: " + "word " * 60).reason
    assert long.endswith("word word ...)") and len(long) < 230
    assert ended(1, *trace, latched="KeyError: 'a'").reason == "exited with code 1 (KeyError: 'a')", "another one"


def test_a_failure_that_was_cut_hides_nothing_of_what_the_log_says() -> None:
    """A rank's slot holds the start of its failure, which alone may name no class: the log has all of it."""
    place = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out"
    error = f"{place} waiting 4000ms for recv operation to complete"
    words = (*(f"[rank3]: {line}" for line in TRACEBACK[:5]), f"[rank3]: {error}")
    alarm = ended(1, *words, latched=f"{place} waiting 4000ms ...")
    assert (alarm.klass, alarm.signature) == ("nccl_timeout", "nccl_timeout 1 model.py:12")
    assert alarm.reason.endswith(f"{error.rpartition('] ')[2]})"), "whole, though what it latched was cut"
