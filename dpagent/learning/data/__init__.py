"""Records of a device: reading them from files, checking them, and splitting them for experiments.

``dataset`` and ``derived`` hold records; each file of ``formats`` is a ``format`` that ``registry``
lists; ``settings`` and ``opening`` are the way in; ``checking`` and ``splits`` work on any dataset. Nothing
here knows of models. Pillow is imported when the first picture is opened.
"""
