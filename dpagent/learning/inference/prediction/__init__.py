"""A finished model's predictions. Needs ONNX Runtime; pictures need Pillow.

:class:`ExportedModel` reads the file that a coordinator wrote, :class:`InputReader` reads inputs of any
known kind one by one, with or without labels, and :func:`predict` brings the two together, a batch at a time.
"""
