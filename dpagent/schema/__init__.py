"""Values with names, types and limits: what messages and configurations are made of.

A class that derives from :class:`dpagent.schema.base.Schema` says what its values must be; one of its
instances holds values that are so, or that the program made itself. Of the libraries that do this, pydantic
takes 13 MiB of an agent that may have 48 (``docs/decisions/2026-11-26-schemas-of-our-own.md``).
"""
