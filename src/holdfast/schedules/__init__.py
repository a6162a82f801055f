"""Schedules: calls of a task by the calendar or the clock. See docs/guides/schedules.md."""

from holdfast.schedules.records import ScheduleRecord
from holdfast.schedules.timing import Cron, Every, Once, Schedule, cron, every, once

__all__ = ["Cron", "Every", "Once", "Schedule", "ScheduleRecord", "cron", "every", "once"]
