"""Records of a device: reading them from files, checking them, and splitting them for experiments.

``dataset`` and ``derived`` say what records are, ``formats`` reads them from files, ``settings`` and
``opening`` are the way in, ``checking`` and ``splits`` work on whatever was opened. Nothing here knows of
models. Pillow is imported when the first picture is opened.
"""
