"""The first cause, not the last line."""

import pytest

from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from tests.core.words.knowing import CATALOG, ROWS, judged, row, said

BOOM = """
Traceback (most recent call last):
  File "/w/train.py", line 3, in f
    y = x / 0
ZeroDivisionError: division by zero
"""
ECHO = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.7]:24017"
SUMMARY = """
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2024-05-01_10:22:33
  host      : n1
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 101)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2024-05-01_10:22:31
  host      : n2
  rank      : 2 (local_rank: 0)
  exitcode  : {code} (pid: 102)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def marked(rank: int, text: str) -> str:
    return "\n".join(f"[rank{rank}]: {line}" for line in text.strip("\n").split("\n"))


def test_the_echo_comes_first_in_the_file() -> None:
    found = judged(f"{marked(0, ECHO)}\n{marked(2, BOOM)}\n{marked(1, ECHO)}")
    assert (found.klass, found.root_rank, found.echoes, found.origin) == ("python_exception", 2, 2, "train.py:3")
    assert found.evidence == ("[rank2]: ZeroDivisionError: division by zero",)


def test_ranks_are_merged_by_time() -> None:
    late = "2024-05-01 10:00:09 step 9\nTypeError: late"
    early = "2024-05-01 10:00:01 step 8\nKeyError: early"
    assert judged(late, early, ranked=True).root_rank == 1
    assert judged(early, late, ranked=True).root_rank == 0


def test_only_echoes() -> None:
    found = judged(ECHO, ECHO, ranked=True)
    assert (found.klass, found.action, found.root_rank) == ("peer_connection_lost", "run_diagnostics", None)
    assert found.confidence <= 0.5


@pytest.mark.parametrize(
    ("line", "peer"),
    [
        (ECHO, "[10.0.0.7]:24017"),
        (
            "RuntimeError: [pair.cc:537] Read error [fd00::12]:2966: Connection reset by peer. Check the logs",
            "[fd00::12]:2966",
        ),
        (
            "n1:55:90 [0] NCCL WARN socketProgress: Connection closed by remote peer gpu-2.local<40110>",
            "gpu-2.local<40110>",
        ),
        (
            "n1:55:90 [0] NCCL WARN Net : Call to recv from 10.8.0.4<42110> failed : Connection reset by peer",
            "10.8.0.4<42110>",
        ),
        (
            "[c10d] recvValue failed on SocketImpl(fd=1, addr=[n5]:41, remote=[n0]:29500): Connection reset by peer",
            "[n0]:29500",
        ),
        ("RuntimeError: errors while waiting for send/recv from rank 0: Connection reset by peer", "rank 0"),
        ("RuntimeError: Connection reset by peer", ""),
    ],
)
def test_an_echo_does_not_tell_whose_fault_it_is_but_whom_to_ask(line: str, peer: str) -> None:
    alone = judged(line)
    assert (alone.fault_known, alone.peer) == (False, peer)
    beside_the_cause = judged(f"{line}\n{BOOM}")
    assert (beside_the_cause.fault_known, beside_the_cause.peer) == (True, "")


def test_proof_beats_what_it_led_to() -> None:
    kernel = "[12345.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid=102, GPU has fallen off the bus."
    found = judged(BOOM + ECHO + SUMMARY.format(code=1), kernel)
    assert (found.klass, found.action, found.root_rank) == ("gpu_lost_bus", "evict_and_restart", 2)


def test_a_killed_process_is_found_by_its_pid() -> None:
    kernel = "[12345.678901] Out of memory: Killed process 101 (python) total-vm:1kB"
    assert judged(SUMMARY.format(code=-15), kernel).root_rank == 1
    first = SUMMARY.replace("rank      : 1", "rank      : 0")
    assert judged(first.format(code=-15), kernel).root_rank == 0


@pytest.mark.parametrize(
    ("code", "klass"),
    [
        (-9, "host_oom_kill"),
        (137, "host_oom_kill"),
        (-7, "shm_exhausted"),
        (135, "shm_exhausted"),
        (-11, "process_crash_signal"),
        (139, "process_crash_signal"),
        (134, "process_crash_signal"),
        (143, "preempted_cancelled"),
        (-15, "preempted_cancelled"),
        (1, "unknown_child_failure"),
        (0, "unknown_child_failure"),
        (255, "unknown_child_failure"),
    ],
)
def test_codes_speak_where_words_do_not(code: int, klass: str) -> None:
    assert judged("", code=code).klass == klass
    assert judged("step 1\nstep 2\n", code=code).klass == klass


def test_what_launchers_tell() -> None:
    killed = judged(SUMMARY.format(code=-9) + ECHO)
    assert (killed.klass, killed.root_rank, killed.node) == ("host_oom_kill", 2, "n2")
    assert judged(SUMMARY.format(code=1)).klass == "unknown_child_failure"
    assert judged(SUMMARY.format(code=1)).root_rank == 2
    assert judged("srun: error: n7: task 5: Segmentation fault (core dumped)").root_rank == 5
    assert judged("srun: error: n7: task 5: Segmentation fault (core dumped)").klass == "process_crash_signal"
    aborted = judged("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL" + SUMMARY.format(code=-6))
    assert aborted.klass == "nccl_timeout", "the watchdog aborts its own process"
    gone = judged(marked(1, ECHO) + SUMMARY.format(code=-6))
    assert (gone.klass, gone.root_rank) == ("process_crash_signal", 2), "what it ended with, as it said nothing itself"
    quiet = judged(marked(1, ECHO) + SUMMARY.format(code=3))
    assert (quiet.klass, quiet.root_rank) == ("unknown_child_failure", 2)
    assert judged(marked(2, ECHO) + SUMMARY.format(code=1)).klass == "peer_connection_lost"


def test_how_the_launcher_ended_the_others_says_nothing() -> None:
    forced = SUMMARY.replace("exitcode  : -15", "exitcode  : -9")
    assert judged(forced.format(code=1)).klass == "unknown_child_failure"
    assert judged(forced.format(code=-11)).klass == "process_crash_signal"
    cut = forced[: forced.index("exitcode  : {code}")]
    assert (judged(cut).klass, judged(cut).root_rank) == ("unknown_child_failure", 2), "the log ends before its code"


def test_what_nccl_calls_its_last_error() -> None:
    nccl = row("nccl_init_config", "ncclInternalError", 4)
    known = FailureCatalog((*ROWS, nccl), tuple(CATALOG.classes.values()))
    text = "ncclInternalError: Internal check failed.\nLast error:\n"
    for words, klass in (
        ("Connection closed by peer n1<1>", "peer_connection_lost"),
        ("no interface", "nccl_init_config"),
    ):
        assert classify_failure(FailureEvidence(lines=said(text + words)), known).klass == klass


def test_the_kernels_old_stories() -> None:
    job = f"2024-05-01 10:22:33 step 7\n{BOOM}"
    kernel = "{} 10:22:30 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=102, GPU has fallen off the bus."
    assert judged(job, kernel.format("May  1")).klass == "gpu_lost_bus"
    assert judged(job, kernel.format("Apr 20")).klass == "python_exception"


def test_ranks_that_only_words_name() -> None:
    assert judged("ValueError: bad loss on rank 5").root_rank == 5
    assert judged("level=error rank=4 msg=x CUDA out of memory").root_rank == 4
    gone = "[2024-05-01 10:22:33] ['python', '--local_rank=3', 'a.py'] exits with return code = -9"
    assert judged(f"CUDA out of memory\n{gone}").root_rank == 3
    oom = "node-1:8112:8301 [3] NCCL WARN Cuda failure 2: CUDA out of memory"
    assert judged(oom).root_rank == 3, "on one node ranks are numbered as GPUs are"
    assert judged(f"{oom}\n{oom.replace('node-1', 'node-2')}").root_rank is None


def test_a_chain_counts_from_its_first_link() -> None:
    chain = """
Traceback (most recent call last):
  File "/w/a.py", line 3, in save
OSError: [Errno 28] No space left on device

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/w/a.py", line 9, in g
ValueError: could not save
"""
    assert judged(chain).klass == "disk_full"
    flow = """
Traceback (most recent call last):
  File "/w/a.py", line 3, in get
KeyError: 'model'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/w/a.py", line 9, in g
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""
    assert judged(flow).klass == "gpu_oom"
    hub = chain.replace("OSError: [Errno 28] No space left on device", "socket.gaierror: [Errno -3] Temporary failure")
    hub = hub.replace("ValueError: could not save", "OSError: We couldn't connect to 'https://huggingface.co'")
    assert judged(hub).klass == "hub_network_error"


def test_what_a_data_loaders_child_raised() -> None:
    found = judged("""
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 3, in <module>
[rank1]: ValueError: Caught ValueError in DataLoader worker process 0.
[rank1]: Original Traceback (most recent call last):
[rank1]:   File "/w/dataset.py", line 7, in __getitem__
[rank1]: PIL.UnidentifiedImageError: cannot identify image file 'a.jpg'
""")
    assert (found.klass, found.root_rank, found.origin) == ("data_corrupt", 1, "dataset.py:7")


def test_what_training_survived_is_not_what_ended_it() -> None:
    steps = "\n".join(f"iteration {n} loss 2.3 lr 1e-4" for n in range(9))
    found = judged(f"WARNING: CUDA out of memory, retrying with a smaller batch\n{steps}\n{BOOM}")
    assert found.klass == "python_exception"


def test_good_news_is_no_cause() -> None:
    event = "NVRM: Xid (PCI:0000:3b:00): 79, 0 errors: fallen off the bus, not recovered"
    assert judged(f"{event}\n{BOOM}").klass == "gpu_lost_bus", "proof is proof"
    assert judged(f"GPU 3: no error, 0 errors: fallen off the bus?\n{BOOM}").klass == "python_exception"
    assert judged(f"CUDA out of memory: recovered\n{BOOM}").klass == "python_exception"


def test_preemption_and_what_came_of_it() -> None:
    cancelled = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-05-01T10:22:33 DUE TO PREEMPTION ***"
    assert judged(f"{cancelled}\n{ECHO}\n" + BOOM).klass == "preempted_cancelled"
    assert judged("Sending process 12 closing signal SIGTERM\n" + BOOM).klass == "python_exception"


def test_an_exception_that_no_row_knows() -> None:
    frames = 'Traceback (most recent call last):\n  File "{}", line 3, in f\n    x()\n'
    mine, theirs = frames.format("/w/a.py"), frames.format("/usr/lib/python3.11/site-packages/torch/a.py")
    assert judged(mine + "acme.Trouble: x").klass == "python_exception"
    assert judged(mine + "RuntimeError: odd").klass == "python_exception"
    assert judged(theirs + "RuntimeError: odd").klass == "framework_runtime_error"
    assert judged("RuntimeError: odd").confidence < 0.5 < judged(mine + "RuntimeError: odd").confidence
    assert judged(frames.format("/w/a.py") + "KeyboardInterrupt").klass == "preempted_cancelled"


def test_no_machine_makes_a_bug() -> None:
    weak = FailureCatalog((*ROWS, row("gpu_lost_bus", "GPU is slow", 7, witness=True)), tuple(CATALOG.classes.values()))
    lines = said(f"GPU is slow\n{BOOM}")
    assert classify_failure(FailureEvidence(lines=lines), weak).klass == "python_exception"
    assert classify_failure(FailureEvidence(lines=said("GPU is slow")), weak).action == "evict_and_restart"
    assert judged(f"NVRM: Xid (PCI:0000:3b:00): 79, x\n{BOOM}").klass == "gpu_lost_bus", "proof is proof"


def test_exceptions_that_are_ignored() -> None:
    ignored = f"Exception ignored in: <function Net.__del__ at 0x7f>\n{BOOM.strip()}\n"
    assert judged(f"{ignored}torch.OutOfMemoryError: CUDA out of memory.").klass == "gpu_oom"
    assert judged(f"{ignored}{ECHO}").klass == "peer_connection_lost"


def test_nobody_is_sent_away_on_weak_evidence() -> None:
    retried = "WARNING: GPU has fallen off the bus? retrying"
    assert judged("NVRM: Xid (PCI:0000:3b:00): 79, x").action == "evict_and_restart"
    assert judged(retried).action in ("evict_and_restart", "run_diagnostics")


@pytest.mark.parametrize("text", ["", "\n\n\n", "\x00\xff\x00" * 999, "x" * 100_000, "{" * 9999, "[" * 9999, "\r\r\r"])
def test_hostile_input(text: str) -> None:
    assert judged(text).klass == "unknown_child_failure"
