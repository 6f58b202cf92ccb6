"""Messages, codec, topics, sealing and signing. No sockets.

``docs/protocol.md`` is the specification; :mod:`dpagent.protocol.messages` is its schema.
"""
