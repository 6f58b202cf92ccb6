"""Using a trained model: export to ONNX, evaluation, prediction."""
