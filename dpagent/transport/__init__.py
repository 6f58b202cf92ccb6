"""The supervised MQTT session: the only place that knows the MQTT library."""
