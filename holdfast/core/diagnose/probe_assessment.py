"""Judges the probe findings of all nodes: which nodes are bad, among which nodes a bad one must be, and why."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from holdfast.core.diagnose import fleet_baseline
from holdfast.core.diagnose.fleet_baseline import MeasurementHistory
from holdfast.model.probe_findings import Finding

_VOTES = 3  # fewer nodes have no majority worth the name
_REASONS = 3  # of one node, in a sentence

Key = tuple[str, str, str, str]  # probe, device, torch, form: findings that must have the same bits
Found = Mapping[str, Sequence[Finding]]  # by node


class ProbeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When probes may run, and how long they may take."""

    allow: bool = True  # nodes are tried while the job stands, where a failure that nobody is to blame for comes again
    budget_s: float = 120.0  # on a machine of its own; 0: what they need
    local_budget_s: float = 2.0  # of each node of the local fleet, which shares its machine with us and with others
    nice: int = 10
    command: str = ""  # a site's own test, from level 2 on: exit code 0 says that the machine is well
    command_s: float = 300.0  # for the command, beyond the budget
    rails: str = ""  # interfaces or addresses that pair tests go over one by one; empty: physical ones with an address


STARVED = 0.5  # the share of its time that a probe which says nothing of its machine waited for a processor


class GoldenRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Catalog row with the result bits that a sound device of one model gives."""

    probe: str
    device: str
    torch: str
    form: str
    digest: str
    source: str

    @property
    def key(self) -> Key:
        return (self.probe, self.device, self.torch, self.form)


class ProbeAssessment(msgspec.Struct, frozen=True, kw_only=True):
    bad: dict[str, str] = {}  # node and reason
    suspects: dict[str, str] = {}  # at least one of them is bad, and nobody knows which
    notes: tuple[str, ...] = ()  # what stood out and accuses no node

    @property
    def summary_text(self) -> str:
        told = [f"{node}: {why}" for node, why in self.bad.items()]
        told += [f"one of {', '.join(self.suspects)}: {next(iter(self.suspects.values()))}"] if self.suspects else []
        return "; ".join(told or self.notes) or "nobody stands out"


def assess_probes(
    found: Found, golden: Mapping[Key, str], past: Mapping[str, MeasurementHistory] | None = None, least: float = 0.0
) -> ProbeAssessment:
    """Return the bad nodes and the suspects, each with a reason.

    A reason is a failed probe, a low value, or result bits that differ from the `golden` bits of a sound device or from
    most nodes' bits. A value is low if it falls short by `least` (a share) or more; a smaller shortfall becomes a note.
    """
    why: dict[str, list[str]] = {}
    notes = _collect_failures(found, why)
    suspects: dict[str, str] = {}
    for key in sorted({_finding_key(f) for findings in found.values() for f in findings if f.digest}):
        notes += _compare_bits(key, found, golden.get(key), (why, suspects))
    notes += _compare_values(found, past or {}, why, least)
    bad = {node: "; ".join(dict.fromkeys(reasons[:_REASONS])) for node, reasons in sorted(why.items())}
    left = {node: reason for node, reason in sorted(suspects.items()) if node not in bad}
    return ProbeAssessment(bad=bad, suspects=left, notes=tuple(notes))


def is_starved(waited_s: float, took_s: float) -> bool:
    """Return whether a probe that took too long proves nothing, because it mostly waited for a processor."""
    return took_s > 0 and waited_s > STARVED * took_s


def starved_nodes(found: Found) -> dict[str, str]:
    """Return the nodes that could not be tested, because their processors were overloaded, and what is known of it."""
    return {node: f.detail for node, findings in found.items() for f in reversed(findings) if f.starved}


def add_to_history(past: MeasurementHistory, findings: Iterable[Finding]) -> MeasurementHistory:
    """Return the history of a sound node with these findings added, unless they failed or are of a small probe."""
    for finding in findings:
        if finding.value is not None and finding.ok and not finding.rough:
            past = past.with_value(_measurement_kind(finding), finding.value)
    return past


def golden_rows(findings: Iterable[Finding]) -> str:
    """Return findings as TOML rows of correct results, without findings that failed or that name no device."""
    told = []
    for f in findings:
        if f.ok and f.digest and f.place:
            fields = {"probe": f.probe, "device": f.device, "torch": f.torch, "form": f.form, "digest": f.digest}
            lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in fields.items()]
            told.append("\n".join(["[[row]]", *lines, 'source = "holdfast probe --golden"']))
    return "\n\n".join(dict.fromkeys(told))


def finding_sentence(finding: Finding) -> str:
    verdict = {True: "ok", False: "FAILED", None: "not judged"}[finding.ok]
    named = " ".join(part for part in (finding.probe, finding.place, finding.form) if part)
    value = f"{finding.value:.4g} {finding.unit}" if finding.value is not None else ""
    told = ", ".join(part for part in (value, finding.digest[:12], finding.detail) if part)
    return f"{named}: {verdict}{f' ({told})' if told else ''}, {finding.took_s:.2f} s"


# --- failures --------------------------------------------------------------------------------------------------------


def _collect_failures(found: Found, why: dict[str, list[str]]) -> list[str]:
    """Add failed probes to `why`, by node. For a probe that fails on most nodes, return a note and blame no node."""
    notes = []
    for probe in dict.fromkeys(f.probe for findings in found.values() for f in findings):
        tried = [node for node, findings in found.items() if any(f.probe == probe for f in findings)]
        failed = {node: f for node in tried for f in found[node] if f.probe == probe and f.ok is False}
        if len(failed) > 1 and 2 * len(failed) > len(tried):
            one = next(iter(failed.values()))
            notes.append(f"{probe} failed on {len(failed)} of {len(tried)} nodes: {one.detail}")
            continue
        for node, finding in failed.items():
            at = f" on {finding.place}" if finding.place else ""
            why.setdefault(node, []).append(f"{probe} failed{at}: {finding.detail}")
    return notes


# --- bits ------------------------------------------------------------------------------------------------------------


def _compare_bits(
    key: Key, found: Found, golden: str | None, into: tuple[dict[str, list[str]], dict[str, str]]
) -> list[str]:
    """Compare the results of one probe (`key`), which must have the same bits everywhere: among nodes, and with those
    of a sound device (`golden`) if known. Add bad nodes and suspects to the pair `into`, and return notes."""
    why, suspects = into
    what = f"{key[0]} ({key[3]})" if key[3] else key[0]
    votes: dict[str, str] = {}
    for node, findings in found.items():
        told = {f.place: f.digest for f in findings if f.digest and _finding_key(f) == key}
        if len(set(told.values())) > 1:
            why.setdefault(node, []).append(f"{what} differs between its own devices{_odd_devices(told)}")
        elif told:
            votes[node] = next(iter(told.values()))
    counted = Counter(votes.values())
    most, count = counted.most_common(1)[0] if counted else ("", 0)
    majority = len(votes) >= _VOTES and 2 * count > len(votes)
    # Sound machines agree with one another. Most of them against the golden bits: these are of another library.
    notes = [f"{what}: most nodes differ from the golden bits of {key[1]}"] if golden and majority else []
    if majority and most != golden:
        truth, reason = most, f"{what} differs from {count} of {len(votes)} nodes"
    elif golden and (golden in counted or len(votes) == 1):
        truth, reason, notes = golden, f"{what} differs from the golden bits of {key[1]}", []
    else:
        truth, reason, notes = "", f"{what} differs among them, and no majority agrees", notes if golden else []
        if len(counted) > 1:
            suspects |= dict.fromkeys(votes, reason)
        elif golden and votes:
            notes = [f"{what}: all {len(votes)} nodes agree, and differ from the golden bits of {key[1]}"]
    for node, digest in votes.items() if truth else ():
        if digest != truth:
            why.setdefault(node, []).append(reason)
    return notes


def _odd_devices(told: dict[str, str]) -> str:
    most, count = Counter(told.values()).most_common(1)[0]
    return f", on {', '.join(p for p, digest in told.items() if digest != most)}" if 2 * count > len(told) else ""


def _finding_key(finding: Finding) -> Key:
    return (finding.probe, finding.device, finding.torch, finding.form)


# --- values ----------------------------------------------------------------------------------------------------------


def _compare_values(
    found: Found, past: Mapping[str, MeasurementHistory], why: dict[str, list[str]], least: float
) -> list[str]:
    notes = []
    by_key: dict[Key, dict[tuple[str, str], Finding]] = {}
    for node, findings in found.items():
        for finding in findings:
            if finding.value is not None and finding.ok and not finding.rough:
                by_key.setdefault(_finding_key(finding), {})[node, finding.place] = finding
    for units in by_key.values():
        names = {f"{node} {place}": (node, place) for node, place in units}
        some = next(iter(units.values()))
        samples = {name: units[unit].samples or (_finding_value(units[unit]),) for name, unit in names.items()}
        before = {
            name: p.medians.get(_measurement_kind(units[node, place]), ())
            for name, (node, place) in names.items()
            if (p := past.get(node))
        }
        short = fleet_baseline.below_fleet(samples, lower=some.lower)
        short |= fleet_baseline.below_own_past({n: median(s) for n, s in samples.items()}, before, lower=some.lower)
        for name, by in short.items():
            node, place = names[name]
            unit = units[node, place]
            at = f" on {place}" if place else ""
            said = f"{unit.probe}{at} is {by.by:.0%} short of {by.of} ({_finding_value(unit):.4g} {unit.unit})"
            if by.by < least:
                notes.append(f"{node}: {said}, too little to be the cause")
            else:
                why.setdefault(node, []).append(said)
    return notes


def _finding_value(finding: Finding) -> float:
    return finding.value or 0.0


def _measurement_kind(finding: Finding) -> str:
    return "|".join((*_finding_key(finding), finding.place))
