"""Options that stand for settings: one table maps a setting, its key in YAML and its option."""
