"""``dpagent predict``: a trained model's answers."""
