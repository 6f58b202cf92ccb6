"""``dpagent plan``: a privacy target, the schedules that meet it, and what it means."""

from cli.plan.command import ScheduleKind, plan

__all__ = ["ScheduleKind", "plan"]
