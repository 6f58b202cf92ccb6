"""A trained model as an ONNX file. Needs the ``onnx`` package, which no device has."""
