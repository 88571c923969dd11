"""What `holdfast report` says about a job that has not ended: what it waits for, and its open incident."""

from holdfast.cli.terminal.quantity_text import clock_text, incidents_text
from holdfast.core.incident.incident_text import count_failures
from holdfast.core.record.job_report import Report
from holdfast.core.record.open_trouble import OpenIncident
from holdfast.model.job_phase import Phase


def incidents_said(report: Report) -> str:
    """Return the number of incidents, an open one included, and of failures."""
    opened = report.standing.incident
    failures = count_failures(report.incidents) + (opened.failures if opened else 0)
    return incidents_text(len(report.incidents) + bool(opened), failures)


def state_said(report: Report) -> str:
    """Return what the job does or waits for, or how it ended."""
    if report.phase == Phase.DONE:
        return f"ended with code {report.code}: {report.ending}"
    if report.code is not None and not report.absence:
        return f"{report.phase}: {report.ending}"
    standing = report.standing
    asks = standing.asking and not standing.held
    if not report.absence:
        if asks:
            return f"asks a person: {standing.asking}; answer with holdfast approve or holdfast stop"
        if report.phase == Phase.HELD and standing.held:
            return f"held by {standing.held}: holdfast resume continues it"
        if standing.waits.startswith(report.phase):
            return standing.waits
        return f"{report.phase}: {standing.waits}" if standing.waits else report.phase
    seen_at = clock_text(report.start_at + report.wall_s)
    stood = f"asks a person ({standing.asking})" if asks else report.phase
    stood = f"held by {standing.held}" if report.phase == Phase.HELD and standing.held else stood
    return f"{stood} at {seen_at}, when its journal ends; it {report.absence}"


def opened_said(opened: OpenIncident) -> str:
    return f"open: {opened.why}" if opened.why else "open"
