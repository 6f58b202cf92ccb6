"""Configurations of MQTT brokers: TLS, access rules for each role, limits and persistence."""
