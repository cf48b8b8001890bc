"""What must have happened before a CUDA graph is captured: memory is made and ranks compare notes on the host, and neither
can be part of a graph.
"""

import torch

from counterpoint.errors import OperatorError


def is_capturing(device: torch.device) -> bool:
    """Whether what is issued on that kind of device now is captured in a graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def refuse_in_capture(what: str, device: torch.device) -> None:
    """Raise `OperatorError` within a capture; `what` is about to run for the first time."""
    if is_capturing(device):
        raise OperatorError(
            f"{what} was never run before this capture, and what it needs cannot be made within one. Run it once before."
        )
