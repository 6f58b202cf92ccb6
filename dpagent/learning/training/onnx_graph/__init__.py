"""One ONNX graph for a microbatch of private training: forward, backward, norms, clip and sum.

The coordinator builds it (``build``, which needs the ``onnx`` package), a device runs it
(:class:`~dpagent.learning.training.onnx_engine.OnnxEngine`, which needs ONNX Runtime). What is imported
here needs neither: inputs and outputs, and the graphs that a device may run.
"""
