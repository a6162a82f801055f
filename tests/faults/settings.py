"""Everything quick, so that a test waits seconds where a user waits a minute."""

from __future__ import annotations

HEARTBEAT_SECONDS = 0.2
DEAD_AFTER_SECONDS = 1.0
INTERVAL_SECONDS = 2.0

SETTINGS = {
    "runner_heartbeat_seconds": f"{HEARTBEAT_SECONDS}s",
    "runner_considered_dead_after_minutes": f"{DEAD_AFTER_SECONDS}s",
    "atomic_service_interval_minutes": f"{INTERVAL_SECONDS}s",
    "atomic_service_spread_margin_minutes": "0.1s",
    "atomic_service_check_interval_minutes": "0.2s",
    "recover_running_invocations_cron": "*/2 * * * * *",
    "recover_pending_invocations_cron": "*/2 * * * * *",
    "max_pending_seconds": "1s",
    "poll_interval_seconds": "0.2s",
    "workflow_linger_seconds": "0.1s",
}
