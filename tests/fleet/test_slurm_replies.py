"""What Slurm prints, in several versions. Lines of 22.05 are as a real cluster printed them; those of later versions
are made by hand after their documented formats, since none of these can run here."""

import json

import msgspec
import pytest

from holdfast.fleet import slurm_replies
from holdfast.fleet.slurm_replies import (
    SlurmHost,
    SlurmJob,
    expand_hosts,
    parse_hosts,
    parse_jobs,
    parse_jobs_json,
    parse_steps,
)

# squeue -O JobID:|,State:|,Reason:|,EndTime:|,PreemptTime:|,NodeList:|,Name:| of 22.05.8, with SLURM_TIME_FORMAT=%s
JOBS_22_05 = """\
2|CANCELLED|None|1794954150|N/A|n[2-3]|wrap|
3|RUNNING|None|1794954450|N/A|n[2-4]|holdfast-r-n0|
4|RUNNING|None|NONE|N/A|n1|hostname|
5|PENDING|PartitionDown|N/A|N/A||holdfast-r-n3|
6|PENDING|Resources|1794959999|N/A|(null)|holdfast-r-n4|
7|COMPLETING|None|1794954150|N/A|n4|holdfast-r-n5|
8|RUNNING|None|1794954500|1794954410|n5|holdfast-r-n6|
10|RUNNING|None|NONE|1794954410|n5|holdfast-r-n8|
9|NODE_FAIL|None|1794954500|N/A|n6|holdfast-r-n7|
slurm_load_jobs error: Unable to contact slurm controller
"""


def test_jobs_of_the_stable_format() -> None:
    jobs = parse_jobs(JOBS_22_05)
    assert sorted(jobs) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert jobs[2].is_over and not jobs[2].failed and jobs[2].hosts == ("n2", "n3")
    assert jobs[3].is_running and jobs[3].ends_at == 1794954450.0 and jobs[3].name == "holdfast-r-n0"
    assert jobs[4].is_running and jobs[4].ends_at == 0.0
    assert jobs[5].is_queued and jobs[5].reason == "PartitionDown" and jobs[5].hosts == ()
    assert jobs[6].is_queued and jobs[6].hosts == ()
    assert jobs[7].completing and not jobs[7].is_over and not jobs[7].is_running
    assert jobs[8].preempted and not jobs[3].preempted
    assert jobs[9].is_over and jobs[9].failed
    assert jobs[10].preempted and jobs[10].ends_at == 1794954440.0, "some grace is taken for granted"


@pytest.mark.parametrize(
    ("due", "state"),
    [("", "CANCELLED"), (" DUE TO TIME LIMIT", "TIMEOUT"), (" DUE TO PREEMPTION", "PREEMPTED"), (" DUE TO X", "")],
)
def test_the_end_that_a_job_comes_to_is_in_its_output(due: str, state: str) -> None:
    # The first is as 22.05.8 wrote it; the others are made by hand.
    line = f"slurmstepd-hfe732f1-1: error: *** JOB 3 ON hfe732f1-1 CANCELLED AT 2026-11-18T02:36:06{due} ***\n"
    assert slurm_replies.parse_end(f"noise\n{line}") == state
    assert slurm_replies.parse_end("noise\n") == ""


def test_who_cancelled_a_job_is_what_the_accounting_says() -> None:
    assert slurm_replies.parse_canceller("CANCELLED by 1000\n") == "1000"
    assert slurm_replies.parse_canceller("CANCELLED\n") == "" == slurm_replies.parse_canceller("")


def number(value: int, *, infinite: bool = False) -> dict[str, object]:
    return {"set": True, "infinite": infinite, "number": value}


# data_parser v0.0.40 (23.11), v0.0.41 (24.05), v0.0.42 (24.11) and v0.0.43 (25.05) differ in fields that are not read.
JSON_23_11 = {
    "meta": {"slurm": {"version": {"major": "23", "minor": "11", "micro": "4"}, "release": "23.11.4"}},
    "errors": [],
    "jobs": [
        {
            "job_id": 3,
            "job_state": ["RUNNING"],
            "state_reason": "None",
            "end_time": number(1794954450),
            "preempt_time": number(0),
            "nodes": "n[2-4]",
            "name": "holdfast-r-n0",
            "resv_name": "maint",
        },
        {"job_id": 4, "job_state": ["RUNNING", "CONFIGURING"], "end_time": number(0, infinite=True), "nodes": "n1"},
        {"job_id": 5, "job_state": ["PENDING"], "state_reason": "Priority", "nodes": "", "end_time": number(0)},
        {"job_id": 7, "job_state": ["CANCELLED", "COMPLETING"], "nodes": "n4"},
        {"job_id": 8, "job_state": ["RUNNING"], "preempt_time": number(1794954410), "end_time": number(1794954500)},
        {"job_id": 9, "job_state": ["NODE_FAIL"], "nodes": "n6"},
        {"job_id": 10, "job_state": "TIMEOUT", "nodes": "n7"},
        {"job_id": 11, "job_state": []},
        "what is this",
    ],
}


def test_jobs_of_json() -> None:
    jobs = parse_jobs_json(json.dumps(JSON_23_11).encode())
    assert list(jobs) == [3, 4, 5, 7, 8, 9, 10]
    assert jobs[3].is_running and jobs[3].ends_at == 1794954450.0 and jobs[3].hosts == ("n2", "n3", "n4")
    assert not jobs[3].preempted and jobs[3].name == "holdfast-r-n0" and jobs[3].reason == ""
    assert (jobs[3].reservation, jobs[4].reservation) == ("maint", "")
    assert jobs[4].is_starting and jobs[4].ends_at == 0.0
    assert jobs[5].is_queued and jobs[5].reason == "Priority"
    assert jobs[7].completing and not jobs[7].is_over
    assert jobs[8].preempted and jobs[8].ends_at == 1794954500.0
    assert jobs[9].is_over and jobs[9].failed
    assert jobs[10].is_over and not jobs[10].failed


# As scontrol --oneliner show reservation of 22.05.8 prints them with SLURM_TIME_FORMAT=%s, by hand.
RESERVATIONS = """\
ReservationName=a StartTime=1794950000 EndTime=1794954000 Duration=01:06:40 Nodes=n[1-3] NodeCnt=3 CoreCnt=6 \
Features=(null) PartitionName=main Flags=SPEC_NODES TRES=cpu=6 Users=root Groups=(null) Accounts=(null) State=ACTIVE
ReservationName=b StartTime=1794950000 EndTime=1794953000 Duration=00:50:00 Nodes=n[4-5] NodeCnt=2 CoreCnt=4 \
Features=(null) PartitionName=(null) Flags=DAILY,SPEC_NODES TRES=cpu=4 Users=root State=ACTIVE
ReservationName=loose StartTime=1794950000 EndTime=1794953000 Nodes=n[1-5] Flags=FLEX,SPEC_NODES State=ACTIVE
ReservationName=licenses StartTime=1794950000 EndTime=1794953000 Nodes=(null) Flags=ANY_NODES State=ACTIVE
No reservations in the system
"""


@pytest.mark.parametrize(
    ("reservation", "limit", "end"),
    [
        ("a", 1794960000.0, (1794954000.0, "reservation a ends")),
        ("a", 0.0, (1794954000.0, "reservation a ends")),
        ("a", 1794952000.0, (1794952000.0, "")),
        ("a", 1794954000.0, (1794954000.0, "")),
        ("b,a", 1794960000.0, (1794954000.0, "reservation a ends")),
        ("b", 1794960000.0, (1794960000.0, "")),
        ("loose", 1794960000.0, (1794960000.0, "")),
        ("licenses", 0.0, (0.0, "")),
        ("over", 1794960000.0, (1794960000.0, "")),
        ("", 1794960000.0, (1794960000.0, "")),
    ],
)
def test_a_job_ends_with_its_reservation(reservation: str, limit: float, end: tuple[float, str]) -> None:
    """Of several that it asked for, Slurm has chosen the one that has its hosts."""
    job = SlurmJob(id=3, state="RUNNING", hosts=("n2", "n3"), ends_at=limit, reservation=reservation)
    found = slurm_replies.end_with_reservation(job, slurm_replies.parse_reservations(RESERVATIONS))
    assert (found.ends_at, found.ending) == end


def test_a_job_that_waits_has_no_end_yet() -> None:
    job = SlurmJob(id=3, state="PENDING", reservation="a")
    assert slurm_replies.end_with_reservation(job, slurm_replies.parse_reservations(RESERVATIONS)) == job


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"jobs": 3}', b"squeue: error: no JSON here"])
def test_what_is_no_json_of_jobs_is_an_error(content: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        parse_jobs_json(content)


def test_where_jobs_come_from() -> None:
    told = "46|holdfast-r-n0|/data/ann/a|b\n47|wrap|/tmp\nsqueue: error: what\n"
    assert slurm_replies.parse_places(told) == {46: ("holdfast-r-n0", "/data/ann/a|b"), 47: ("wrap", "/tmp")}


def test_lists_of_hosts() -> None:
    assert expand_hosts("n[1-3,07],login") == ("n1", "n2", "n3", "n07", "login")
    assert expand_hosts("r[1-2]n[08-10]") == ("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10")
    assert expand_hosts("gpu-a-3.site.org") == ("gpu-a-3.site.org",)
    assert [expand_hosts(none) for none in ("", "(null)", "None assigned")] == [(), (), ()]


def test_steps_and_hosts() -> None:
    [first, batch] = parse_steps("3.0|holdfast-n0|n2\n3.batch|batch|n2\nsqueue: error: what\n")
    assert (first.id, first.job, first.name, batch.id) == ("3.0", 3, "holdfast-n0", "3.batch")
    hosts = parse_hosts("n1|down*|Not responding\nn2|mixed|none\nn2|mixed|none\nn3|mixed*|none\nn4|draining|look\n")
    assert [host for host, seen in hosts.items() if seen.answers] == ["n2", "n4"]
    assert hosts["n1"] == SlurmHost(answers=False, state="down", reason="Not responding")


def test_refusals_and_what_may_pass() -> None:
    refused = "sbatch: error: invalid partition specified: x\n"
    refused += "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    sentence = slurm_replies.failure_sentence(1, refused)
    assert sentence == "Batch job submission failed: Invalid partition name specified"
    assert not slurm_replies.may_pass(sentence)
    assert not slurm_replies.may_pass("Batch job submission failed: Invalid account or account/partition combination")
    assert slurm_replies.may_pass("Batch job submission failed: Unable to contact slurm controller (connect failure)")
    assert slurm_replies.may_pass("Batch job submission failed: Socket timed out on send/recv operation")
    assert slurm_replies.refusal_sentence(1, refused) == f"invalid partition specified: x; {sentence}"
    assert slurm_replies.parse_version("slurm-wlm 22.05.8") == (22, 5)
    assert slurm_replies.parse_version("slurm 25.05.1") > slurm_replies.JSON_FROM > (23, 2)


@pytest.mark.parametrize(
    ("code", "printed", "told"),
    [
        (255, "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information\n",
         "unrecognized option '--bogus'"),
        (255, "sbatch: option requires an argument -- 'p'\nTry \"sbatch --help\" for more information\n",
         "option requires an argument -- 'p'"),
        (255, "Invalid time specification (pos=0): never\nsbatch: error: Invalid --begin specification\n",
         "Invalid --begin specification"),
        (1, "sbatch: fatal: Could not establish a configuration source\n",
         "Could not establish a configuration source"),
        (1, "sbatch: error: Name an account\nsbatch: error: Batch job submission failed: Unspecified error\n",
         "Name an account; Batch job submission failed: Unspecified error"),
        (1, "", "it exited with code 1 and said nothing"),
        (-9, "\n", "it was killed by SIGKILL and said nothing"),
    ],
)  # fmt: skip
def test_a_failure_is_told_by_the_sentence_that_names_its_cause(code: int, printed: str, told: str) -> None:
    assert slurm_replies.refusal_sentence(code, printed) == told
