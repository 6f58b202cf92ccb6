"""Models, data, training and inference. Nothing here knows of privacy or of messages.

``models`` describes networks, ``data`` reads records, ``front_end`` makes features of them, ``training``
sums clipped gradients, ``inference`` exports and runs trained models. ``model_files`` reads the models that
operators write; ``onnx_session`` starts ONNX Runtime for all that need it. Import each name from the module
that defines it: a device then loads only what it uses.
"""
