"""Whether the kernel has killed for want of memory among what is ours."""

from pathlib import Path

from holdfast.agent.kills import Kills, counted


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def events(root: Path, group: str, kills: int) -> None:
    write(root / "sys/fs/cgroup" / group / "memory.events", f"low 0\nhigh 0\nmax 7\noom 9\noom_kill {kills}\n")


def test_a_kill_in_our_own_group_counts_for_a_while(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    events(tmp_path, "job/step", 2)
    kills = Kills(tmp_path)
    kills.look(0.0)
    assert not kills.lately(), "those before us are not of our ranks"
    events(tmp_path, "job/step", 3)
    assert kills.lately()
    kills.look(2.0)
    assert kills.lately(), "its process may still be ending"
    for now in (4.0, 12.5, 14.5):
        kills.look(now)
    assert not kills.lately()


def test_kills_of_neighbours_do_not(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    events(tmp_path, "job/step", 0)
    events(tmp_path, "job", 0)
    kills = Kills(tmp_path)
    kills.look(0.0)
    events(tmp_path, "job", 5)
    events(tmp_path, "other", 5)
    assert not kills.lately()


def test_the_older_kind_of_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/7\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert counted(tmp_path) == 4, "within a container its own group is the topmost to be seen"


def test_where_nobody_counts_nothing_is_said(tmp_path: Path) -> None:
    kills = Kills(tmp_path)
    kills.look(0.0)
    assert counted(tmp_path) is None and not kills.lately()
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    events(tmp_path, ".", 3)
    assert not kills.lately(), "there is nothing to compare it with"
