"""Windows over a record: of convolutions and pooling layers.

A series is computed as an image of height one, so an engine knows windows over two axes only.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpagent.errors import ConfigurationError, require_count
from dpagent.learning.models.part import Shape

MAX_AXIS = 65_536
"""No window, stride, padding or number of channels is larger."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over the two axes of an image; over a series, the first axis has length one.

    Attributes:
        image: height, width, channels of the input.
        kernel, stride, padding: down and across.
        count: windows down and across.
    """

    image: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    count: tuple[int, int]

    @property
    def positions(self) -> int:
        """Number of windows."""
        return self.count[0] * self.count[1]

    @property
    def taps(self) -> int:
        """Numbers in one window: kernel area times channels."""
        return self.kernel[0] * self.kernel[1] * self.image[2]


def windows_over(shape: Shape, axes: int, kernel: int, stride: int, padding: int) -> Windows:
    """The positions of windows of one size over a record.

    Args:
        shape: of the record.
        axes: 1 over a series, 2 over an image.
        kernel, stride, padding: the same along each axis.

    Raises:
        ConfigurationError, ParameterError: they do not fit the record.
    """
    require_count("kernel", kernel, maximum=MAX_AXIS)
    require_count("stride", stride, maximum=MAX_AXIS)
    require_count("padding", padding, minimum=0, maximum=MAX_AXIS)
    if len(shape) != axes + 1:
        expected = "a series (length, channels)" if axes == 1 else "an image (height, width, channels)"
        raise ConfigurationError(f"its input has shape {shape}; expected {expected}.")
    *sizes, channels = shape
    counts = [(size + 2 * padding - kernel) // stride + 1 for size in sizes]
    if min(counts) < 1:
        window, whole = ("x".join(map(str, each)) for each in ([kernel] * axes, sizes))
        raise ConfigurationError(
            f"its window of {window} is larger than its input of {whole} with padding {padding};"
            " expected a smaller kernel or more padding."
        )
    if axes == 1:
        return Windows((1, sizes[0], channels), (1, kernel), (1, stride), (0, padding), (1, counts[0]))
    return Windows(
        (sizes[0], sizes[1], channels), (kernel,) * 2, (stride,) * 2, (padding,) * 2, (counts[0], counts[1])
    )
