"""Joins this host to a job that spans hosts: each host runs the same command, and one host runs the controller."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.agent.sources.gpu import read_gpus
from holdfast.cli.launch import release_packing
from holdfast.cli.launch.controller_listener import listen_to_lead
from holdfast.cli.launch.enrolment_client import (
    EnrolmentClient,
    EnrolmentError,
    EnrolmentRefusedError,
    LinkClosedError,
    NoAnswerError,
    NotControllerError,
    introduce_host,
)
from holdfast.cli.launch.job_request import make_job
from holdfast.cli.launch.standby_count import choose_standbys
from holdfast.cli.launch.supervisor import STOP_SIGNALS, Supervisor, leave_terminal, stopping_wait, watch_node
from holdfast.cli.run_dirs import run_dir_creation, run_dir_secrets, run_directory, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.cli.terminal.rank_console import Console, describe_shape, find_console_files, make_console, say
from holdfast.config import Settings
from holdfast.core.membership.host_blocking import BLOCKED_EXIT
from holdfast.fleet.local_process_fleet import start_node
from holdfast.linux import host_identity
from holdfast.linux.own_process_settings import END_WARNING
from holdfast.model.decider_events import Begin
from holdfast.model.job_and_seats import HostIdentity
from holdfast.wire.credentials import (
    certificate_authority,
    enrolment,
    enrolment_token,
    job_secret_proof,
    mutual_tls,
    organisation_certificates,
)
from holdfast.wire.credentials.enrolment_token import NodeToken
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.credentials.organisation_certificates import UserCertificateError, UserCertificates
from holdfast.wire.run_and_node_specs import COMPILED_ARCHIVES, EntryPoint, RunSpec

if TYPE_CHECKING:
    from holdfast.cli.launch.controller_lease import ControllerLease

_ANOTHER_PORT = "give another port in --rdzv-endpoint"
_REFUSED = 5  # times that the controller closed the link at the sight of a certificate
_GPU_WAIT_S = 10.0  # for a driver to name its GPUs
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class HostJoin:
    """One host's part in a job that spans hosts."""

    def __init__(self, args: RunArgs, settings: Settings, entry: EntryPoint) -> None:
        assert args.endpoint is not None
        self.args = args
        self.host, self.port = args.endpoint
        self.given = _user_certificates(args, settings)
        self.token, self.own_token = self._read_secret()
        self.settings, self._closed = settings, 0
        self.run_file = ""  # as in NodeSpec
        self._holder = 0  # the pid of the node's; 0: the node was not started yet
        self._on_host = _read_identity()
        self.meant = args.run_id or (self.given.run if self.given else "")  # which job; "": whichever is there
        self.run_id = self.meant or run_dir_creation.new_run_id()
        wanted = self.given.node if self.given else self.own_token.name if self.own_token else ""
        suffix = f"-{secrets.token_hex(2)}"
        self.name = wanted or f"{socket.gethostname()}{suffix}"
        place = f"{self.name}{suffix if wanted else ''}"  # a host that was refused may try again under the same name
        self.nproc = args.ranks_per_node()
        self.run_dir = run_dir_creation.make_run_dir(
            args.run_dir and f"{args.run_dir}/{place}", f"{self.run_id}-{place}"
        )
        log_dir = run_dir_creation.make_log_dir(args.log_dir, self.run_dir, f"{self.run_id}-{place}")
        job = make_job(args, self.run_id, settings)
        job = msgspec.structs.replace(job, can_acquire=False, blocks=settings.block.age_s > 0)
        self.run = RunSpec(
            job=job,
            entry=entry,
            settings=settings,
            fleet="join",
            nproc=self.nproc,
            log_dir=str(log_dir),
            host=self.host,
            port=self.port,
            journal=args.journal or "",
            proven=True,
        )

    def _read_secret(self) -> tuple[str, NodeToken | None]:
        """Return the job's secret and None, or "" and a node token; "" and None if the user's certificates suffice."""
        if self.given and not (self.given.leads and self.args.journal):
            return "", None
        try:
            token, own = read_token(self.args, self.host, self.port)
        except UsageError as e:
            what = "--journal needs the job's secret beside door.certificate: " if self.given else ""
            raise UsageError(f"{what}{e}") from None
        if self.given and own:
            raise UsageError("--journal needs the job's secret beside door.certificate, not a node token")
        return token, own

    def warn_node(self) -> None:
        """Tell the node, if it runs, that its cluster will end it: the controller then asks the fleet when."""
        if self._holder:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._holder, END_WARNING)

    @property
    def has_node(self) -> bool:
        return self._holder != 0

    @property
    def may_lead(self) -> bool:
        """Return whether this host may run the controller. If not, it joins as a node, even if its address is that of
        an endpoint, because several nodes may share one address."""
        return self.given.leads if self.given else self.own_token is None

    @property
    def node_dir(self) -> Path:
        return self.run_dir / "nodes" / self.name

    def _start_node(self, port: int, leads: bool) -> None:
        """Start this host's node, which tries each endpoint in turn until it reaches the controller."""
        endpoints = self.args.endpoints if len(self.args.endpoints) > 1 else ((self.host, port),)
        url = ",".join(run_directory.web_address(host, number, "https") for host, number in endpoints)
        # Without a node rank the endpoint's host comes first; the rest follow by name.
        order = self.args.node_rank if self.args.node_rank is not None else (0 if leads else 1)
        node = run_directory.make_node_spec(self.run, self.run_dir)
        own = msgspec.structs.replace(
            node,
            node=self.name,
            order=order,
            url=url,
            run_file=self.run_file,
            moves=bool(self.args.journal),
            keys=str(self._keys_folder),
            run_id=self.meant or node.run_id,
            on_host=self._on_host,
            compiled_archives=str(self.run_dir / "releases" / COMPILED_ARCHIVES) if leads else "",
        )
        try:
            self._holder = start_node(self.node_dir, own, dict(os.environ))
        except OSError as e:
            raise UsageError(f"cannot start this node in {self.node_dir}: {e.strerror}") from None

    @property
    def _keys_folder(self) -> Path:
        return self.run_dir / "keys"

    def lead_job(self, listener: socket.socket, console: Console, lease: "ControllerLease | None" = None) -> int | None:
        """Run the controller until the job ends; return the exit code. Return None if another host takes over. With
        `lease`, go on with the run if another host has begun it."""
        port, begun = listener.getsockname()[1], None
        if lease:
            self.host, begun = self._own_host(listener), self._restore_run(lease)
        else:
            run_dir_creation.require_local_disk(self.run_dir)
        self._prepare_keys()  # with the job's secret, which the first release must not contain
        said = ("",) if begun else self._begin_run()
        run = msgspec.structs.replace(self.run, host=self.host, port=port)
        if begun:
            job, release = begun.job, begun.release
            run = msgspec.structs.replace(run, job=job, release=release, resumed_at=time.time())
        run_dir_creation.publish_run(self.run_dir, run)
        run_selection.remember_run(self.run_dir)
        why = "; the run goes on from its journal" if begun else ""
        say(f"join fleet: this host carries the controller at {self.host}:{port}{why}; {self._place_text()}")
        for sentence in filter(None, said):
            say(sentence)
        if self.args.detach and not self.has_node:
            leave_terminal(self.run_dir)
        front = Supervisor(self.run_dir, listener, console, lease=lease)
        if not self.has_node:
            self._start_node(port, leads=True)
        return front.run()

    def _own_host(self, listener: socket.socket) -> str:
        """Return the address at which ranks reach this host: an endpoint's name that only this host has, else an IP."""
        address, port = listener.getsockname()[:2]
        own = [host for host, given in self.args.endpoints if given == port and _addresses_of(host) == {address}]
        return own[0] if own else address

    def _begin_run(self) -> tuple[str, ...]:
        """Pack the first release of a new run; return sentences for the console."""
        why = self._size_standbys()
        files = find_console_files()
        run, args = self.run, self.args
        apart = release_packing.keep_out(self.run_dir, run.settings, args.token_file, (run.log_dir, *files))
        begun = release_packing.pack_first_release(run.entry, self.run_dir, apart, copied=args.release)
        release = msgspec.structs.replace(begun.release, argv=())  # every host was started with words of its own
        self.run = msgspec.structs.replace(self.run, release=release, console_files=files)
        return why, begun.said

    def _restore_run(self, lease: "ControllerLease") -> Begin | None:
        """Fetch an earlier controller's keys and releases from Postgres; return its Begin event, if there was one."""
        from holdfast.cli.launch.run_handover import fetch_run

        return fetch_run(lease, self.run_dir, self.token)

    def _prepare_keys(self) -> None:
        if self.given:
            self._copy_keys(self.given, run_dir_secrets.door_keys_folder(self.run_dir), self._keys_folder)
        if self.token:
            run_dir_secrets.write_door_secret(self.run_dir, self.token)
        if not self.given and not self.has_node:
            certificate_authority.enrol_local_node(
                run_dir_secrets.open_authority(self.run_dir), self.name, self._keys_folder
            )

    def follow_job(
        self, console: Console, is_free: Callable[[], bool], stops: tuple[int, ...] = STOP_SIGNALS
    ) -> int | None:
        """Run this host's node while another host runs the controller; return the exit code. Return None as soon as
        `is_free` says that this host may run the controller. A signal in `stops` makes the node leave the job."""
        code: int | None = 1
        try:
            if not self.has_node and not self._join_as_node(is_free, stops):
                code = None
            else:
                code = watch_node(self.node_dir, self._holder, console, is_free, stops)
        except EnrolmentRefusedError as e:
            say(str(e))
            return BLOCKED_EXIT
        finally:
            if code is not None:
                run_dir_secrets.forget_secrets(self.run_dir)
        return code

    def _join_as_node(self, is_free: Callable[[], bool], stops: tuple[int, ...]) -> bool:
        """Enrol this host and start its node. Return False if `is_free` says that the run has no controller now."""
        run_dir_creation.publish_run(self.run_dir, self.run)
        say(f"join fleet: node {self.name} joins the job at {self._where}; {self._place_text()}")
        run_directory.lock_run_dir(self.run_dir)
        with stopping_wait("this host has not joined the job", stops):
            if not self._await_enrolment(is_free):
                return False
        if self.args.detach:
            leave_terminal(self.run_dir)
        self._start_node(self.port, leads=False)
        return True

    @property
    def _where(self) -> str:
        return " or ".join(f"{host}:{port}" for host, port in self.args.endpoints)

    def _size_standbys(self) -> str:
        """With --standbys auto, set the number of standbys and return the reason; "" if a number was given."""
        self.args, why = choose_standbys(self.args)
        job = msgspec.structs.replace(self.run.job, standbys=self.args.standbys)
        self.run = msgspec.structs.replace(self.run, job=job)
        keep = counted_noun(self.args.standbys, "more host")
        return why and f"{why}; start this command on {keep} than the {self.args.max_nodes} that train"

    def _place_text(self) -> str:
        return f"{describe_shape(self.args, self.nproc)}; run directory {self.run_dir}"

    def _copy_keys(self, given: UserCertificates, *folders: Path) -> None:
        try:
            for folder in folders:
                given.copy_to(folder)
        except OSError as e:
            raise UsageError(
                f"cannot copy door.authority, door.certificate and door.key to {self.run_dir}: {e.strerror}"
            ) from None

    def _await_enrolment(self, is_free: Callable[[], bool]) -> bool:
        """Wait until the controller accepts this host. Return False if `is_free` says that the run has no controller.
        Raise UsageError if the controller refuses or is silent, EnrolmentRefusedError if this host is blocked."""
        if self.given:
            self._copy_keys(self.given, self._keys_folder)
        until = time.monotonic() + self.settings.recovery.wait_s
        said = False
        while not self._try_to_enrol(last_try=time.monotonic() > until):
            if is_free():
                return False
            if not said:
                said = True
                say(f"waiting for the controller at {self._where}")
            time.sleep(0.2)
        return True

    def _try_to_enrol(self, last_try: bool) -> bool:
        """Try once to enrol, at each endpoint. Return False if nobody answers yet."""
        *others, last = self.args.endpoints
        for address in others:
            with contextlib.suppress(NoAnswerError):
                self._call_controller(address)
                return True
        try:
            self._call_controller(last)
        except LinkClosedError as e:
            self._closed += 1  # one may be a controller that died just then
            if last_try or self._closed == _REFUSED:
                raise UsageError(f"{e}; compare door.authority on both hosts") from None
            return False
        except NoAnswerError as e:
            if last_try:
                why = f"{e}; no answer for {self.settings.recovery.wait_s:g} s{self._hint()}"
                raise UsageError(why) from None
            return False
        except NotControllerError as e:
            raise UsageError(f"{e}; {_ANOTHER_PORT}") from None
        except EnrolmentError as e:
            if isinstance(e, EnrolmentRefusedError) and e.status == enrolment.BLOCKED_STATUS:
                raise
            raise UsageError(str(e)) from None
        return True

    def _hint(self) -> str:
        if self.given is None or self.given.leads:
            return ""
        return (
            f"; this host cannot carry the controller: door.certificate {self.given.keys.certificate} lacks the DNS "
            f"name {mutual_tls.CONTROLLER} among its alternative names"
        )

    def _call_controller(self, address: tuple[str, int]) -> None:
        if self.given:
            self.meant = introduce_host(address, KeyFiles.in_folder(self._keys_folder), self.meant).run_id
            return
        call = EnrolmentClient(address, self.token)
        try:
            call.enrol_node(self.name, self._keys_folder, self.args.run_id or "", self._on_host)
        finally:
            call.close()


def join_job(args: RunArgs, settings: Settings, entry: EntryPoint) -> int:
    joining = HostJoin(args, settings, entry)
    console = make_console(args, joining.run, joining.run_dir)
    leads = joining.may_lead and (args.node_rank in (None, 0) or joining.host in _LOOPBACK)
    if leads and (listener := listen_to_lead(joining.host, joining.port)) is not None:
        with listener:
            return joining.lead_job(listener, console) or 0
    return joining.follow_job(console, lambda: False) or 0


def _addresses_of(host: str) -> set[str]:
    return {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def _user_certificates(args: RunArgs, settings: Settings) -> UserCertificates | None:
    """Return the certificates that the user's own authority issued to this host; None if no settings name them."""
    door = settings.door
    if not door.key:
        return None
    try:
        found = organisation_certificates.check_certificates(
            KeyFiles(Path(door.key), Path(door.certificate), Path(door.authority))
        )
    except UserCertificateError as e:
        raise UsageError(str(e)) from None
    if found.run and args.run_id and found.run != args.run_id:
        raise UsageError(f"door.certificate {door.certificate} is for the run {found.run}, not for {args.run_id}")
    return found


def _read_identity() -> HostIdentity:
    try:
        id = host_identity.read_host_id()
    except ValueError as e:
        raise UsageError(str(e)) from None
    gpus = read_gpus(_GPU_WAIT_S)
    return HostIdentity(id=id, gpus=tuple(g.uuid for g in gpus), gpu_names=tuple((g.name, g.bus) for g in gpus))


def read_token(args: RunArgs, host: str, port: int) -> tuple[str, NodeToken | None]:
    """Read the job's secret or a node token from a file or the environment; on loopback, use this user's own secret."""
    if path := args.token_file or os.environ.get("HOLDFAST_TOKEN_FILE"):
        try:
            token, named = Path(path).read_text(encoding="utf-8").strip(), f"the token in {path}"
        except OSError as e:
            raise UsageError(f"cannot read the token file {path}: {e.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"the token file {path} is not text; write one line of ASCII into it") from None
    elif "HOLDFAST_TOKEN" in os.environ:
        token, named = os.environ["HOLDFAST_TOKEN"], "HOLDFAST_TOKEN"
    elif host in _LOOPBACK:
        return _own_token(port), None
    else:
        raise UsageError(
            f"{host} is not this host's loopback, so a join token is needed: set HOLDFAST_TOKEN, or --token-file FILE, "
            "to the same secret on every host, or to one of this host's own from holdfast token node"
        )
    if fault := job_secret_proof.secret_fault(token):
        raise UsageError(f"{named} {fault}")
    try:
        return token, enrolment_token.parse_token(token)
    except ValueError as e:
        raise UsageError(f"{named} {e}") from None


def _own_token(port: int) -> str:
    """Return a secret that this user's processes on this host share, from a folder that only this user can write."""
    folder = run_directory.holdfast_home() / "join"
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        path = folder / f"{port}.token"
        mutual_tls.write_new_secret(path, os.urandom(16).hex().encode())
        if any(
            found.stat().st_uid != os.getuid() or found.stat().st_mode & 0o022
            for found in (folder.parent, folder, path)
        ):
            raise UsageError(f"other users may write to {folder}; set HOLDFAST_TOKEN instead")
        token = path.read_bytes().decode("ascii", "replace").strip()
        if fault := job_secret_proof.secret_fault(token):
            raise UsageError(f"the token in {path} {fault}")
        return token
    except OSError as e:
        raise UsageError(f"cannot keep a join token in {folder}: {e.strerror}; set HOLDFAST_TOKEN instead") from None
