"""Accelerate's settings of the process, which the calls of the pool share."""


def forget():
    """Have the next Accelerator read its settings anew, and find the call's own process group."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
