"""``dpagent model …``: architectures, before anything is trained."""
