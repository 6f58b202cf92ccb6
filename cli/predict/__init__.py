"""``dpagent predict``: what a finished model says of inputs."""
