"""`holdfast run --fleet kubernetes`: the controller runs here, in a pod or outside, and every node is a pod."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.cli.launch.cluster_launch import ClusterRun, carry_in_turns, check_cluster_flags, draft_run
from holdfast.cli.launch.controller_listener import listen_for_pods
from holdfast.cli.launch.host_join import read_token
from holdfast.cli.launch.pod_node import MODULE
from holdfast.cli.launch.standby_count import choose_standbys
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.config import Settings
from holdfast.controller.access.enrolment_tokens import MOST_S, NodeTokens
from holdfast.controller_interfaces import Notes
from holdfast.core.record.hook_notices import HookLimits
from holdfast.fleet import pod_manifest
from holdfast.fleet.pod_manifest import PodShape
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.lease_term import no_lease
from holdfast.model.job_and_seats import Job
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

if TYPE_CHECKING:
    from holdfast.cli.launch.controller_lease import ControllerLease
    from holdfast.fleet.kubernetes_fleet import KubernetesFleet
    from holdfast.fleet.kubernetes_lease import KubernetesLease

_SHAPE = "pod_shape.json"
_PYTHON = "python3"  # the image's own


def run_on_kubernetes(args: RunArgs, settings: Settings, entry: EntryPoint, job: Job) -> int:
    check_cluster_flags(args, settings)
    args, why = choose_standbys(args)
    shape = _make_shape(args, settings, entry, job)
    [(host, port)] = args.endpoints
    draft = msgspec.structs.replace(draft_run(args, settings, entry, job), host=host)
    lease, secret = _open_lease(args, job.run_id) if args.journal else (None, "")
    run = ClusterRun(args, draft, lease, secret)
    run_and_node_specs.write_json(run.run_dir / _SHAPE, shape)

    def carry() -> int | None:
        with listen_for_pods(host, port, "give another in --rdzv-endpoint") as listener:
            return run.carry(listener, f", as pods {shape.run}-n0 and on in the namespace {shape.namespace}", why)

    try:
        return carry_in_turns(lease, carry, run.run_dir) if lease else carry() or 0
    except JournalError as e:
        raise UsageError(str(e)) from None


def _open_lease(args: RunArgs, run_id: str) -> "tuple[ControllerLease, str]":
    """Return the lease of a run in Postgres, and the secret with which another host can read the run's keys there."""
    from holdfast.cli.launch.controller_lease import ControllerLease

    secret, node_token = read_token(args, *args.endpoints[0])
    if node_token:
        raise UsageError("a node token lets a node join; --journal with --fleet kubernetes needs the job's own secret")
    return ControllerLease(args.journal or "", run_id), secret


def make_fleet(
    run: RunSpec, run_dir: Path, tokens: NodeTokens, notes: Notes, epoch: Callable[[], int]
) -> "KubernetesFleet":
    from holdfast.fleet.kubernetes_client import KubernetesClient, read_config
    from holdfast.fleet.kubernetes_fleet import FleetWishes, KubernetesFleet

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of every request
    shape = run_and_node_specs.read_json(run_dir / _SHAPE, PodShape)
    wishes = FleetWishes(
        command=_node_command,
        files=lambda node: {
            "token": str(tokens.mint_token(node, MOST_S)).encode(),
            "run.json": msgspec.json.encode(make_pod_spec(run)),
        },
        least=run.job.min_nodes,
        gather_s=run.settings.fleet.gather_s,
        avoid_s=run.settings.block.age_s,
    )
    return KubernetesFleet(notes, shape, wishes, KubernetesClient(read_config(), shape.namespace, epoch), epoch)


def make_pod_spec(run: RunSpec) -> RunSpec:
    """Return the run's spec for its pods, without settings that only the controller needs, such as those of hooks."""
    settings = msgspec.structs.replace(run.settings, hook=HookLimits())
    return msgspec.structs.replace(run, console_files=(), settings=settings)


def make_lease(run: RunSpec, run_dir: Path, say: Callable[[str], None]) -> "KubernetesLease":
    from holdfast.fleet.kubernetes_client import KubernetesClient, read_config
    from holdfast.fleet.kubernetes_lease import KubernetesLease

    shape = run_and_node_specs.read_json(run_dir / _SHAPE, PodShape)
    holder = f"{socket.gethostname()}.{run.job.mark}"  # the same after a crash: its successor need not wait
    client = KubernetesClient(read_config(), shape.namespace, no_lease)  # which changes the lease alone
    return KubernetesLease(client, shape.run, holder, run_dir / "lease", say)


def _node_command(node: str) -> tuple[str, ...]:
    return (_PYTHON, "-P", "-m", MODULE, pod_manifest.SECRET_FOLDER, node)


def _make_shape(args: RunArgs, settings: Settings, entry: EntryPoint, job: Job) -> PodShape:
    """Return the PodShape that every pod is made from. Raise UsageError if template, image or credentials cannot be
    used."""
    try:
        from holdfast.fleet.kubernetes_client import check_pod, default_namespace, read_config
    except ModuleNotFoundError as e:
        raise UsageError(f"--fleet kubernetes: there is no {e.name} here; pip install 'holdfast[kubernetes]'") from None
    template = _read_template(args.pods.template)
    if not (image := args.pods.image or pod_manifest.template_image(template)):
        raise UsageError("--fleet kubernetes: name the image of the pods, with --kube-image or in --kube-pod-template")
    try:
        namespace = args.pods.namespace or default_namespace(read_config())
    except OSError as e:
        raise UsageError(f"--fleet kubernetes: {e}") from None
    shape = PodShape(
        run=pod_manifest.object_name(job.run_id),
        namespace=namespace,
        image=image,
        template=template,
        gpus=args.ranks_per_node(),
        folder=entry.cwd,
        group=args.max_nodes + args.standbys,
        grace_s=settings.recovery.leave_s + settings.recovery.shutdown_grace_s,
        endure_s=settings.node.lost_s,
    )
    try:
        owner = pod_manifest.owner_reference(shape.run, "")
        check_pod(pod_manifest.make_pod(shape, "n0", _node_command("n0"), owner))
    except ValueError as e:
        raise UsageError(f"--kube-pod-template {args.pods.template}: {e}") from None
    return shape


def _read_template(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        template = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"--kube-pod-template {path} cannot be read: {e.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"--kube-pod-template {path} is not YAML: {' '.join(str(e).split())}") from None
    if fault := pod_manifest.find_template_fault(template):
        raise UsageError(f"--kube-pod-template {path}: {fault}")
    assert isinstance(template, dict)
    return template
