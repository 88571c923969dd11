"""Whether the kernel has killed for want of memory among what is ours."""

from pathlib import Path

from holdfast.agent.system.oom_kills import OomKills, count_oom_kills


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def events(root: Path, group: str, kills: int) -> None:
    write(root / "sys/fs/cgroup" / group / "memory.events", f"low 0\nhigh 0\nmax 7\noom 9\noom_kill {kills}\n")


def test_a_kill_in_our_own_group_counts_for_a_while(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    events(tmp_path, "job/step", 2)
    kills = OomKills(tmp_path)
    kills.count_now(0.0)
    assert not kills.has_recent(), "those before us are not of our ranks"
    events(tmp_path, "job/step", 3)
    assert kills.has_recent()
    kills.count_now(2.0)
    assert kills.has_recent(), "its process may still be ending"
    for now in (4.0, 12.5, 14.5):
        kills.count_now(now)
    assert not kills.has_recent()


def test_kills_of_neighbours_do_not(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    events(tmp_path, "job/step", 0)
    events(tmp_path, "job", 0)
    kills = OomKills(tmp_path)
    kills.count_now(0.0)
    events(tmp_path, "job", 5)
    events(tmp_path, "other", 5)
    assert not kills.has_recent()


def test_the_older_kind_of_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/7\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert count_oom_kills(tmp_path) == 4, "within a container its own group is the topmost to be seen"


def test_where_nobody_counts_nothing_is_said(tmp_path: Path) -> None:
    kills = OomKills(tmp_path)
    kills.count_now(0.0)
    assert count_oom_kills(tmp_path) is None and not kills.has_recent()
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    events(tmp_path, ".", 3)
    assert not kills.has_recent(), "there is nothing to compare it with"


def pressure(root: Path, full: float) -> None:
    some = "some avg10=80.00 avg60=9.00 avg300=1.00 total=9"
    write(root / "proc/pressure/memory", f"{some}\nfull avg10={full:.2f} avg60=0.10 avg300=0.00 total=7\n")


def memory(root: Path, available_kib: int) -> None:
    write(root / "proc/meminfo", f"MemTotal: 1000000 kB\nMemAvailable: {available_kib} kB\n")


def test_where_nobody_counts_scarce_memory_is_a_sign(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    memory(tmp_path, 600_000)
    pressure(tmp_path, 0.5)
    kills = OomKills(tmp_path)
    kills.count_now(0.0)
    assert kills.scarcely(1.0) == ""
    pressure(tmp_path, 43.2)
    assert kills.scarcely(1.0) == "memory pressure was 43 %"
    pressure(tmp_path, 0.0)
    memory(tmp_path, 12_000)
    kills.count_now(2.0)
    memory(tmp_path, 600_000)
    assert kills.scarcely(5.0) == "99 % of the memory was in use", "what it took is free again"
    assert kills.scarcely(60.0) == "", "long ago"
    (tmp_path / "proc/pressure/memory").unlink()
    assert kills.scarcely(5.0) == "99 % of the memory was in use", "a kernel without PSI"
    (tmp_path / "proc/meminfo").unlink()
    assert kills.scarcely(60.0) == ""


def test_a_group_near_its_limit_is_a_sign(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/docker/7\n")
    memory(tmp_path, 600_000)
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", "1000000")
    write(group / "memory.usage_in_bytes", "990000")
    write(group / "memory.stat", "total_inactive_file 10000\n")
    kills = OomKills(tmp_path)
    assert kills.scarcely(0.0) == "98 % of the memory was in use"
    write(group / "memory.stat", "total_inactive_file 400000\n")
    assert kills.scarcely(0.0) == "", "cache that nobody uses is no want"


def test_who_counts_knows_better(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    events(tmp_path, "job/step", 0)
    memory(tmp_path, 1000)
    pressure(tmp_path, 90.0)
    kills = OomKills(tmp_path)
    kills.count_now(0.0)
    assert kills.scarcely(0.0) == "" and not kills.has_recent(), "none was counted: it was somebody else"
