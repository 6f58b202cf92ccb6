"""``dpagent plan``: a privacy target, the schedules that meet it, and what it means."""
