"""What ranks tell each other before an aggregation: that it is the same one, and of what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from bagua import _C
from bagua.torch_api._transport import Transport, fingerprint

__all__ = ["ABSENT", "PRESENT", "REFUSED", "agree_on_states"]

# States of one tensor on one rank. Of several ranks the highest counts.
ABSENT, PRESENT, REFUSED = 0, 1, 2

_FINGERPRINT_BYTES = 8
# The first message has one size whatever the model, or ranks with different models would hang.
_FIRST_MESSAGE_STATES = 1008


def agree_on_states(
    transport: Transport,
    communicator: _C.Communicator,
    what: str,
    lines: list[str],
    states: Sequence[int],
) -> list[int]:
    """The highest state over ranks of each tensor. All ranks call it.

    1. Every rank sends the fingerprint of ``lines``, its complement and the first 1008 states, in
       one MAX all_reduce of 1 KiB.
    2. The highest byte and the complement of the lowest add up to 255 only where all are equal.
    3. If they do not, the ranks compare the lines and raise. If there are more states, a second
       all_reduce brings them.

    Args:
        what: the call, for the message.
        lines: describe the call and its tensors; equal on all ranks if these are.

    Raises:
        BaguaMismatchError: on every rank, with the first difference of the lines.
    """
    if transport.size == 1:
        return list(states)
    # 1.
    own = fingerprint(lines).to_bytes(_FINGERPRINT_BYTES, "little")
    first = bytes(states[:_FIRST_MESSAGE_STATES]).ljust(_FIRST_MESSAGE_STATES, b"\0")
    highest = _maximum(communicator, own + bytes(255 - byte for byte in own) + first)
    # 2.
    head = highest[: 2 * _FINGERPRINT_BYTES]
    pairs = zip(head[:_FINGERPRINT_BYTES], head[_FINGERPRINT_BYTES:], strict=True)
    # 3.
    if any(high + low != 255 for high, low in pairs):
        transport.agree(what, lines)
    agreed = highest[len(head) :][: len(states)]
    if len(states) > _FIRST_MESSAGE_STATES:
        agreed += _maximum(communicator, bytes(states[_FIRST_MESSAGE_STATES:]))
    return agreed


def _maximum(communicator: _C.Communicator, values: bytes) -> list[int]:
    message = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    communicator.all_reduce(message, _C.ReduceOp.MAX)
    result: list[int] = message.tolist()
    return result
