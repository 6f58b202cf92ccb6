"""Operators of ONNX that do the same work for all numbers.

Measured for each, with numbers of one sign and of both, small, large, in order, and zero. What takes another
way for other numbers is not here, be it in its library, such as sines and most powers, or by a branch for
each number, as recurrent layers do: where their sums overflow, they take up to three times as long.
"""

from __future__ import annotations

from typing import Final

_ELEMENTS: Final = (
    "Abs Add And Cast Ceil Clip Div Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish"
    " Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mul Neg Not Or Reciprocal Relu Round"
    " Sigmoid Softsign Sqrt Sub Sum Tanh ThresholdedRelu Where Xor"
)
_LAYERS: Final = (
    "AveragePool BatchNormalization Conv ConvTranspose Dropout Einsum Gemm GlobalAveragePool GlobalMaxPool"
    " GroupNormalization InstanceNormalization LRN LayerNormalization LogSoftmax MatMul"
    " MaxPool MeanVarianceNormalization RMSNormalization Softmax"
)
_SHAPES: Final = "Concat Constant DepthToSpace Flatten Shape Size SpaceToDepth Transpose"
FREE: Final = frozenset(f"{_ELEMENTS} {_LAYERS} {_SHAPES}".split())
"""Operators whose shapes and work depend on the shapes of their inputs alone."""

_PLACED: Final = (
    "CumSum Expand Gather GatherElements GatherND ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd"
    " ReduceSum ReduceSumSquare Reshape Split Squeeze Tile Trilu Unsqueeze Upsample"
)
FIXED_INPUTS: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(_PLACED.split(), (1,)),
    "ConstantOfShape": (0,),
    "Pad": (1, 3),
    "Pow": (1,),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
}
"""Operators that pass while these inputs, by their number, hang on no record."""

POWERS: Final = (2.0, 3.0)
"""That are computed as products; all others, and several at once, by a function that looks at each number."""
