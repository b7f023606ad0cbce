"""Accelerate's settings of the process, which the calls of the pool share."""


def forget():
    """Have the next Accelerator read its settings anew, and find the call's own process group.

    It also forgets data loaders whose iteration an earlier call left unfinished: their weak
    references cannot be pickled.
    """
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
