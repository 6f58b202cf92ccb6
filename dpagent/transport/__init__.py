"""The supervised MQTT session: the only user of the MQTT library."""
