"""``dpagent service``: agent, coordinator, page or mixer as a service of systemd."""
