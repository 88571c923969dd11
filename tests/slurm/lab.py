"""A real Slurm of several nodes on one machine: each node has a network, a host name, process ids, mounts and shared
memory of its own. What a lab makes dies with the process that made it: nothing of it has a name outside of itself."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cli.driver import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
TREE = "PYTEST_HOLDFAST_SLURM"  # names a folder of unpack_version.sh: machines have the Slurm, and all of /usr, in it
_CLIENTS = ("sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol")
NET = "10.77.0"
LOGIN = "login"  # the host of slurmctld, where people type
LOGIN_TOO = "login-too"  # another one, without slurmctld
_PR_SET_PDEATHSIG = 1
_FREEZER = Path("/sys/fs/cgroup/freezer")

CONF = """
ClusterName=lab
SlurmctldHost={login}({net}.254)
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd.%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,preempt_reorder_count=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
SlurmdTimeout=6
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=10
UnkillableStepTimeout=10
CompleteWait=0
MinJobAge=300
JobRequeue=1
MailProg=/bin/true
NodeName={name}-[1-{nodes}] NodeAddr={net}.[1-{nodes}] Sockets=1 CoresPerSocket=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=180
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=off
"""


def lacking() -> str:
    """Why no lab can run here; "": it can."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        where = _tree() or "here (Debian: slurmctld slurmd slurm-client munge iproute2)"
        return f"no {', '.join(missing)} in {where}" if _tree() else f"no {', '.join(missing)} {where}"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if tried.returncode == 0 else "namespaces cannot be made here"


def warns_gently() -> bool:
    """Whether Slurm's warnings can be sent to the first process of a step alone, as on most clusters."""
    return os.access(_FREEZER, os.W_OK)


def _remove_group(folder: Path) -> bool:
    """Remove a control group and those below it; False if processes are in it still."""
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            return False
    return True


def _tree() -> Path | None:
    """What machines of a lab have as /usr; None: what this machine has."""
    named = os.environ.get(TREE)
    return Path(named) / "usr" if named else None


def _program(name: str) -> str | None:
    """Where machines of a lab have this program."""
    if (tree := _tree()) is None:
        return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    return next((f"/usr/{folder}/{name}" for folder in ("bin", "sbin") if (tree / folder / name).exists()), None)


def _mount_tree() -> str:
    """For the shell that is the first process of a machine; what is in /usr/local stays."""
    if (tree := _tree()) is None:
        return ""
    return f"mount --bind /usr/local /mnt; mount --bind {tree} /usr; mount --bind /mnt /usr/local; "


class SlurmLab:
    def __init__(
        self, nodes: int, conf: Mapping[str, str] | None = None, switches: tuple[str, ...] = (), gpus: int = 0
    ) -> None:
        """`conf` has lines of slurm.conf that are to be otherwise. Each of `switches` has as many of the nodes as the
        others, and "core" is above all of them. Every node has `gpus` devices that Slurm takes for NVIDIA's."""
        self.count, self._conf, self._switches, self._gpus = nodes, conf or {}, switches, gpus
        self.name = f"hf{os.urandom(3).hex()}"  # its hosts have it in their names, and so in those of control groups
        self.dir = Path(tempfile.mkdtemp(prefix="hf-slurm-"))
        self.env = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": str(self.dir / "slurm.conf")}
        self._machines: dict[str, subprocess.Popen[bytes]] = {}  # the first process of each
        self._inits: dict[str, int] = {}  # pids, seen from here
        self._cables: dict[str, str] = {}
        self._laid = 0
        self._reserved: list[str] = []

    @property
    def bin(self) -> Path:
        """A folder with Slurm's commands that work from anywhere on this machine, as if they were typed at LOGIN."""
        return self.dir / "bin"

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))

    def start(self) -> None:
        for name in ("state", "spool", "log", "local"):
            (self.dir / name).mkdir()
        self.dir.chmod(0o755)
        tracking = "cgroup" if warns_gently() else "linuxproc"
        text = CONF.format(dir=self.dir, net=NET, nodes=self.count, login=LOGIN, name=self.name, tracking=tracking)
        for option, value in self._conf.items():
            text = re.sub(f"^{option}=.*", f"{option}={value}", text, flags=re.MULTILINE)
        if self._gpus:
            text = text.replace(" State=UNKNOWN\n", f" Gres=gpu:{self._gpus} State=UNKNOWN\n") + "GresTypes=gpu\n"
            self._make_devices()
        (self.dir / "slurm.conf").write_text(text + ("TopologyPlugin=topology/tree\n" if self._switches else ""))
        share = self.count // max(1, len(self._switches))
        rows = [
            f"SwitchName={name} Nodes={self.name}-[{1 + n * share}-{(n + 1) * share}]\n"
            for n, name in enumerate(self._switches)
        ]
        (self.dir / "topology.conf").write_text(f"{''.join(rows)}SwitchName=core Switches={','.join(self._switches)}\n")
        (self.dir / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # hosts with both kinds confuse it
        hosts = [f"{NET}.{number} {self.name}-{number}\n" for number in range(1, self.count + 1)]
        (self.dir / "hosts").write_text(
            f"127.0.0.1 localhost\n{NET}.254 {LOGIN}\n{NET}.253 {LOGIN_TOO}\n{''.join(hosts)}"
        )
        key = self.dir / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"socket": "munge.sock", "key-file": key.name, "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{name}={self.dir / file}" for name, file in files.items()]
        munged = f"{_mount_tree()}exec {_program('munged')} --foreground --force {' '.join(options)}"
        self._start("munge", ["unshare", "--mount", "bash", "-c", munged])
        self._start("switch", ["unshare", "--net", "sleep", "infinity"])
        until(lambda: self._has_own_network("switch"), "a network for the switch")
        self._in_switch("ip", "link", "add", "br0", "type", "bridge")
        self._in_switch("ip", "link", "set", "br0", "up")
        until((self.dir / "munge.sock").exists, "munged")
        self._boot(LOGIN, f"{NET}.254", "exec slurmctld -i -D")
        self._boot(LOGIN_TOO, f"{NET}.253", "exec sleep infinity")
        self.bin.mkdir()
        for name in _CLIENTS:
            words = " ".join(self.words(str(_program(name)), cwd='"$PWD"'))
            (self.bin / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (self.bin / name).chmod(0o755)
        for node in self.nodes:
            self.boot(node)
        until(lambda: self._count_idle() == self.count, "all nodes to be idle")

    def _make_devices(self) -> None:
        for number in range(self._gpus):
            os.mknod(self.dir / f"nvidia{number}", stat.S_IFCHR | 0o666, os.stat(os.devnull).st_rdev)
        devices = f"Name=gpu File={self.dir}/nvidia[0-{self._gpus - 1}] Flags=nvidia_gpu_env\n"
        (self.dir / "gres.conf").write_text(devices)

    def boot(self, node: str) -> None:
        (self.dir / "spool" / node).mkdir(exist_ok=True)
        # Its first process takes in the orphans of the machine.
        start = f"mount -t tmpfs -o size=1g tmpfs /dev/shm; slurmd -N {node} -D & sleep infinity & wait $!"
        self._boot(node, f"{NET}.{node.rpartition('-')[2]}", start)

    def _boot(self, name: str, address: str, start: str) -> None:
        apart = ["unshare", "--net", "--uts", "--mount", "--fork", "--kill-child"]
        if name not in (LOGIN, LOGIN_TOO):  # what tests start there are processes like any other
            apart += ["--pid", "--ipc", "--mount-proc"]
        ready = self.dir / f"ready.{name}"
        ready.unlink(missing_ok=True)
        (self.dir / f"id.{name}").write_text(f"{os.urandom(16).hex()}\n")
        script = (
            f"{_mount_tree()}hostname {name}; mount --bind {self.dir}/hosts /etc/hosts; "
            f"mount --bind {self.dir}/id.{name} /etc/machine-id; "
            f"while [ ! -e {ready} ]; do sleep 0.02; done; {start}"
        )
        self._start(name, [*apart, "bash", "-c", script], SLURM_CONF=self.env["SLURM_CONF"])
        self._inits[name] = until(lambda: self._first_child(name), f"the first process of {name}")
        self._laid += 1
        cable, init = f"v{self._laid}", str(self._inits[name])
        self._cables[name] = cable
        self._in_switch("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", init)
        self._in_switch("ip", "link", "set", cable, "master", "br0", "up")
        for words in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "lo", "up"]):
            self._call(["nsenter", "-t", init, "--net", "ip", *words])
        self._call(["nsenter", "-t", init, "--net", "ip", "link", "set", "eth0", "up"])
        ready.touch()

    def power_off(self, node: str) -> None:
        """Every process of the machine dies at once, and so does its network."""
        process = self._machines.pop(node)
        process.kill()
        process.wait()

    def lose_power(self, node: str) -> float:
        """Take a machine's power away: nobody hears a word of its end. Return when that was."""
        at = time.time()
        self.cut(node)
        self.power_off(node)
        return at

    def cut(self, node: str) -> None:
        self._in_switch("ip", "link", "set", self._cables[node], "down")

    def heal(self, node: str) -> None:
        self._in_switch("ip", "link", "set", self._cables[node], "up")

    def reserve(self, name: str, minutes: int, *nodes: str) -> None:
        """Reserve these machines from now on."""
        self._reserved.append(name)
        where, who = f"Nodes={','.join(nodes)}", "Users=root"
        words = (f"ReservationName={name}", "StartTime=now", f"Duration={minutes}", who, where)
        self.call("scontrol", "create", "reservation", *words)

    def recover(self, least: int = 0) -> None:
        """Bring back every machine, as the next test finds it; wait for `least` of them, or for all."""
        while self._reserved:
            self.call("scontrol", "delete", f"ReservationName={self._reserved.pop()}", check=False)
        for node in self.nodes:
            if node not in self._machines:
                self.boot(node)
            self.heal(node)
            self.call("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        for partition in ("main", "urgent"):
            self.call("scontrol", "update", f"PartitionName={partition}", "State=UP")
        least = least or self.count
        until(lambda: self._count_idle() >= least, f"{least} nodes to be idle", signs=self._count_idle)

    def _count_idle(self) -> int:
        found = self.call("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D|%t", check=False).split()
        return sum(int(row.split("|")[0]) for row in found if row.endswith("|idle"))

    def name_hosts(self, name: str, *nodes: str) -> None:
        """What DNS does: have a name stand for these machines, and for no others any more."""
        hosts = self.dir / "hosts"  # written in its place: all machines have it mounted
        lines = [line for line in hosts.read_text().splitlines() if line.split()[1] != name]
        own = [f"{NET}.{node.rpartition('-')[2]} {name}" for node in nodes]
        hosts.write_text("\n".join([*lines, *own, ""]))

    def first_process(self, machine: str) -> int:
        """The pid of a machine's first process, seen from here."""
        return self._inits[machine]

    def call(self, *words: str, on: str = LOGIN, cwd: str = "/", check: bool = True, **env: str) -> str:
        """Run a command on a machine of the lab, and return what it prints."""
        return self._call(self.words(*words, on=on, cwd=cwd), check=check, **env)

    def words(self, *words: str, on: str = LOGIN, cwd: str = "/") -> list[str]:
        """The command line that runs a command on a machine of the lab."""
        inside = ["--net", "--uts", "--mount", *(() if on in (LOGIN, LOGIN_TOO) else ("--ipc", "--pid"))]
        return ["nsenter", "-t", str(self._inits[on]), *inside, f"--wd={cwd}", *words]

    def pids(self, node: str, word: str) -> list[int]:
        """The processes of a machine that have a word in their command line, by their numbers there."""
        found = self.call("pgrep", "-f", word, on=node, check=False).split()
        return [int(pid) for pid in found]

    def stop(self) -> None:
        for process in self._machines.values():
            process.kill()
        for process in self._machines.values():
            process.wait()
        shutil.rmtree(self.dir)
        for folder in _FREEZER.glob(f"slurm_{self.name}-*"):
            until(lambda folder=folder: _remove_group(folder), f"{folder} to be empty")  # type: ignore[misc]

    def _start(self, name: str, words: list[str], **env: str) -> None:
        libc = ctypes.CDLL(None)  # loaded here, as little may be done between fork and exec
        log = (self.dir / "log" / f"{name}.out").open("ab")
        self._machines[name] = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": self.env["PATH"], "LANG": "C.UTF-8", **env},
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  there is no other way
        )
        log.close()

    def _has_own_network(self, name: str) -> bool:
        pid = self._machines[name].pid
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
        return False

    def _first_child(self, name: str) -> int:
        pid = self._machines[name].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def _in_switch(self, *words: str) -> None:
        self._call(["nsenter", "-t", str(self._machines["switch"].pid), "--net", *words])

    def _call(self, words: list[str], check: bool = True, **env: str) -> str:
        done = subprocess.run(words, check=False, env={**self.env, **env}, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
        return done.stdout


@contextlib.contextmanager
def running(lab: SlurmLab) -> Iterator[SlurmLab]:
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


def run_lab(nodes: int, conf: Mapping[str, str] | None = None) -> contextlib.AbstractContextManager[SlurmLab]:
    return running(SlurmLab(nodes, conf))
