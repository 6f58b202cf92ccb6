"""Records of a device: reading them from files, checking them, and splitting them for experiments.

What is imported here needs numpy and the standard library. Pillow is imported when the first picture is
opened; :mod:`dpagent.learning.data.settings` (needs pydantic) by those who have a configuration.
"""
