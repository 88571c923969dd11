"""What the locked door keeps out, as a table, and what it costs: copies between keepers by TLS and by unix sockets, and
2,000 agents that come back to a restarted controller.

Copies are compared with the same code over plain TCP, in turns, so that ratios hold on a busy machine. Seconds until
the agents are back are seconds of this machine: controller and agents share its cores, of which real agents have
their own.
"""

import json
import os
import ssl
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import _door_agents, _door_attacks, _door_copies, _door_handshakes, _door_ktls
from benchmarks._door_agents import AGENTS, Back
from benchmarks._door_copies import ROUNDS, STATE_BYTES, Cost, Costs, Found, spread
from benchmarks._door_hosts import own_network
from benchmarks._report import RECORDS, Findings, report
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits

GOAL_TLS, GOAL_UNIX = 0.6, 0.95
GOAL_BACK_S = 10.0
GOAL_STEPS = 0.001
_GB = STATE_BYTES / 1e9


def _speeds(found: Found, table: Table, findings: Findings) -> None:
    """One way over another, and its goal if it has one."""
    for name, costs, way, beside, goal in (
        ("tls_push_over_plain", found.between, "tls push", "plain push", GOAL_TLS),
        ("tls_pull_over_plain", found.between, "tls pull", "plain pull", GOAL_TLS),
        ("tls_push_over_by_1", found.between, "tls push", "tls push by 1", None),
        ("tls_pull_by_4_threads_over_by_1", found.between, "tls pull by 4 threads", "tls pull by 1", None),
        ("tls_pull_by_4_relays_over_by_1", found.between, "tls pull by 4 relays", "tls pull by 1", None),
        ("tls_pull_by_4_relays_over_plain_by_4", found.between, "tls pull by 4 relays", "plain pull by 4", None),
        ("plain_pull_by_4_over_by_1", found.between, "plain pull by 4", "plain pull", None),
        ("aes128_push_over_aes256", found.between, "tls128 push", "tls push by 1", None),
        ("unix_push_over_loopback", found.within, "unix push", "loopback push", GOAL_UNIX),
        ("unix_pull_over_loopback", found.within, "unix pull", "loopback pull", GOAL_UNIX),
    ):
        middle, pairs = spread(costs, beside, way, lambda cost: cost.wall_s)
        findings.figures[name] = round(middle, 3)
        if goal is not None:
            findings.goals[name] = middle >= goal
        bound = "" if goal is None else f"at least {goal:g}"
        table.add_row(f"speed: {way} / {beside}", f"{middle:.2f}", f"{min(pairs):.2f} to {max(pairs):.2f}", bound)


def _processor(costs: Costs, table: Table, findings: Findings) -> None:
    """Seconds of a core for a gigabyte, on either side; they hold on a busy machine as seconds of the clock do not."""
    for way, each in costs.items():
        sending, taking = (_per_gb(each, side) for side in ("near", "far"))
        if "pull" in way:
            sending, taking = taking, sending
        name = way.replace(" ", "_")
        findings.figures[f"{name}_sender_cpu_s_per_gb"] = round(sending, 3)
        findings.figures[f"{name}_receiver_cpu_s_per_gb"] = round(taking, 3)
        findings.figures[f"{name}_gb_s"] = round(_GB / statistics.median(cost.wall_s for cost in each), 3)
        speed = f"{findings.figures[f'{name}_gb_s']} GB/s"
        table.add_row(f"{way}: CPU s per GB, sender + receiver", f"{sending:.2f} + {taking:.2f}", speed, "")


def _per_gb(each: list[Cost], side: str) -> float:
    return statistics.median(cost.near_cpu_s if side == "near" else cost.far_cpu_s for cost in each) / _GB


def _ciphers(found: Found, table: Table, findings: Findings) -> None:
    findings.figures["suite"], findings.figures["suite_short"] = found.suites
    alone, ratio = _door_copies.aes_alone()
    findings.figures["aes128_over_aes256_raw"] = round(ratio, 3)
    table.add_row("speed: AES-128-GCM / AES-256-GCM, bare", f"{ratio:.2f}", "", "")
    _ceiling(found, alone, table, findings)
    if not hasattr(ssl.SSLContext, "set_ciphersuites"):
        findings.skipped["choosing_aes128"] = (
            "the ssl module chooses no suites of TLS 1.3 before Python 3.15; measured by a file for OPENSSL_CONF"
        )


def _kernel_tls(base: Path, table: Table, findings: Findings) -> None:
    if why := _door_ktls.missing_ktls():
        findings.skipped["ktls"] = why
        return
    gain = _door_ktls.measure_gain(base, STATE_BYTES, ROUNDS)
    if not gain.links:
        findings.skipped["ktls"] = "the kernel has TLS, but the OpenSSL of this Python does not use it"
        return
    findings.figures |= {"ktls_over_tls": round(gain.speed, 3), "ktls_over_tls_sender_cpu": round(gain.sender_cpu, 3)}
    said = f"sender's CPU: {gain.sender_cpu:.2f} times as much"
    table.add_row("speed: TLS by the kernel / by the process", f"{gain.speed:.2f}", said, "")


def _ceiling(found: Found, alone: float, table: Table, findings: Findings) -> None:
    """What TLS could reach if it cost nothing but AES-128, where both sides share cores that are all busy."""
    each = found.between["plain push"]
    plain = _per_gb(each, "near") + _per_gb(each, "far")
    most = plain / (plain + 2 * alone)
    findings.figures["aes128_alone_cpu_s_per_gb"] = round(alone, 3)
    findings.figures["tls_over_plain_ceiling"] = round(most, 3)
    table.add_row("AES-128-GCM alone: CPU s per GB, each side", f"{alone:.2f}", f"plain, both: {plain:.2f}", "")
    said = f"{plain:.2f} / ({plain:.2f} + 2 x {alone:.2f})"
    table.add_row("speed: tls / plain at most, all cores busy", f"{most:.2f}", said, f"at least {GOAL_TLS:g}")


def _steps(found: Found, table: Table, findings: Findings) -> None:
    """A share of a step; claimed only if noise lets it be seen."""
    duty = BackupLimits().duty
    for way in ("plain", "tls"):
        each = found.between[f"{way} push"]
        cores = duty * statistics.median((cost.near_cpu_s + cost.far_cpu_s) / cost.wall_s for cost in each)
        findings.figures[f"{way}_cores_at_duty"] = round(cores, 3)
        table.add_row(f"{way}: cores taken at duty {duty:g}, both sides", f"{cores:.2f}", "estimate", "")
    noise = 0.0
    for name, way, beside in (("tls_over_plain", "tls", "plain"), ("tls_over_none", "tls", "none")):
        pairs = [a / b - 1 for a, b in zip(found.steps[way], found.steps[beside], strict=True)]
        mean, noise = statistics.mean(pairs), 2 * statistics.stdev(pairs) / len(pairs) ** 0.5
        findings.figures[f"steps_{name}"], findings.figures[f"steps_{name}_noise"] = round(mean, 4), round(noise, 4)
        said = f"steps beside copies: {way} / {beside}, longer by"
        table.add_row(said, f"{100 * mean:.2f} %", f"+- {100 * noise:.2f} %", f"at most {100 * GOAL_STEPS:g} %")
        if noise < GOAL_STEPS:
            findings.goals[f"steps_{name}"] = mean <= GOAL_STEPS
        else:
            findings.skipped[f"steps_{name}"] = f"noise of {100 * noise:.2f} % hides {100 * GOAL_STEPS:g} %"


def _restarts(backs: dict[str, Back], table: Table, findings: Findings) -> None:
    for name, back in backs.items():
        for field, value in back._asdict().items():
            findings.figures[f"{name}_{field}"] = round(value, 2)
        findings.goals[f"{name}_back_within_10_s"] = back.back_s <= GOAL_BACK_S
        findings.goals[f"{name}_nobody_lost"] = back.gone == 0 and back.incidents == 0
        said = f"half after {back.half_s:.1f} s, listening after {back.listening_s:.1f} s, {back.dials} dials"
        title = f"{AGENTS} agents back after a restart, {name.replace('_', ' ')}"
        table.add_row(title, f"{back.back_s:.1f} s", said, f"at most {GOAL_BACK_S:g} s")
        table.add_row(
            f"controller's CPU and memory for that, {name.replace('_', ' ')}",
            f"{back.controller_cpu_s:.1f} s",
            f"{back.controller_mb:.0f} MB",
            "",
        )


def _back(base: Path, findings: Findings) -> dict[str, Back]:
    backs = {}
    for name, tls, listed in (("unix", False, True), ("tls", True, True), ("tls_unlisted", True, False)):
        try:
            backs[name] = _door_agents.restart(base, tls, listed=listed)
        except _door_agents.LateError as e:
            findings.goals[f"{name}_back_within_10_s"] = False
            findings.skipped[f"{name}_back"] = str(e)
    return backs


def _handshakes(base: Path, table: Table, findings: Findings) -> None:
    """A handshake by itself, and what the list of certificates that count adds to it."""
    found = _door_handshakes.measure(base, AGENTS)
    findings.figures |= {f"handshake_{name}": round(value, 4) for name, value in found._asdict().items()}
    title = "controller's CPU for a TLS handshake"
    table.add_row(title, f"{found.server_ms:.2f} ms", f"the node's: {found.agent_ms:.2f} ms", "")
    added = found.listed_ms - found.unlisted_ms
    said = f"a welcome has {found.welcome_bytes:,} bytes; a new list {found.made_ms:.1f} ms"
    table.add_row(f"the list of {AGENTS} certificates adds", f"{added:.3f} ms", said, "")


def _show_hostile(table: Table, findings: Findings) -> None:
    """The newest record of what hostile and damaged bytes came to: it takes too long to be done once more."""
    newest = max(RECORDS.glob("hostile-*.json"), default=None)
    if newest is None:
        findings.skipped["hostile"] = "there is no record of make bench-hostile"
        return
    found = json.loads(newest.read_text())
    for name, value in found["figures"].items():
        if not name.startswith("load"):
            table.add_row(f"{newest.stem}: {name.replace('_', ' ')}", f"{value:,}", "", "")


def _show_attacks(findings: Findings) -> None:
    """What the door is for; docs/SECURITY.md has the table, and its test that every cited test is there."""
    table = Table("attack", "before", "now", "test", title="attacks, as docs/SECURITY.md has them")
    attacks = _door_attacks.read_attacks()
    for one in attacks:
        table.add_row(*(cell.replace("`", "") for cell in one[:3]), f"{one.file}::{one.test}")
    Console(width=None if os.isatty(1) else 200).print(table)
    findings.figures["attacks_with_tests"] = len(attacks)


def _attacks_alone(findings: Findings) -> int:
    """What takes seconds: attacks, what hostile bytes came to, and whether the kernel does TLS."""
    table = Table("what", "figure", "more", "goal", title="hostile bytes, and TLS by the kernel")
    _show_hostile(table, findings)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        _kernel_tls(Path(folder), table, findings)
    report("door-attacks", table, findings)
    return 0


def main() -> int:
    findings, part = Findings(), sys.argv[1:]
    if part not in ([], ["agents"], ["attacks"]):
        print("holdfast: ARGS is empty; or agents or attacks, for these alone", file=sys.stderr)
        return 2
    _show_attacks(findings)
    if part == ["attacks"]:
        return _attacks_alone(findings)
    why = own_network()
    if why:
        findings.skipped["namespaces"] = why
    findings.figures["load_before"] = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        base = Path(folder)
        made_s = _door_agents.certificates(base)
        findings.figures["certificates_s"] = round(made_s, 2)
        agents = Table("what", "figure", "more", "goal", title=f"{AGENTS} agents")
        _handshakes(base, agents, findings)
        _restarts(_back(base, findings), agents, findings)
        if part:
            findings.figures["load_after"] = round(os.getloadavg()[0], 2)
            report("door-agents", agents, findings)
            return 0 if all(findings.goals.values()) else 1
        for name in ("copies", "ktls"):
            (base / name).mkdir()
        found = _door_copies.measure(base / "copies", apart=not why)
        title = f"copies of {STATE_BYTES / 1e6:.0f} MB, {'loopback' if why else 'two network namespaces'}"
        table = Table("what", "median of pairs", "all pairs", "goal", title=title)
        _kernel_tls(base / "ktls", table, findings)
    findings.figures["load_after"] = round(os.getloadavg()[0], 2)
    Console(width=None if os.isatty(1) else 140).print(agents)
    _speeds(found, table, findings)
    _processor(found.between | found.within, table, findings)
    _ciphers(found, table, findings)
    _steps(found, table, findings)
    _show_hostile(table, findings)
    runs: dict[str, list[float | None]] = {
        f"{way}, s": [round(cost.wall_s, 3) for cost in each] for way, each in (found.between | found.within).items()
    }
    runs |= {f"step beside {way}, s": [round(one, 5) for one in each] for way, each in found.steps.items()}
    report("door", table, findings, runs)
    return 0 if all(findings.goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
