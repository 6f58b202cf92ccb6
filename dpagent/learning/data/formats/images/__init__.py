"""Pictures by class, in folders or in a zip archive."""
