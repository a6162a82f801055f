"""When something is due: pure arithmetic over time, without a store or a clock. See docs/schedules.md."""

from holdfast.schedules.timing import Cron, Every, Once, Schedule, cron, every, once

__all__ = ["Cron", "Every", "Once", "Schedule", "cron", "every", "once"]
