"""``dpagent service``: agent, coordinator or mixer as a service of systemd."""
