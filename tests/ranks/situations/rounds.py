"""Which backward is communicated: no_sync, accumulation, several forwards and backwards."""

from ranks.situations.rows import better, row
from ranks.situations.values import (
    batch,
    everything,
    gradient,
    grads,
    linear,
    perceptron,
    sgd,
    x,
)


def no_sync_then_sync(wrap, rank, size):
    model = wrap(linear())
    with wrap.no_sync(model):
        model(x(rank)).sum().backward()
    local = grads(wrap.inner(model), "local")
    model(x(rank, 10.0)).sum().backward()
    return local | grads(wrap.inner(model))


def no_sync_around_the_backward_only(wrap, rank, size):
    model = wrap(linear())
    loss = model(x(rank)).sum()
    with wrap.no_sync(model):
        loss.backward()
    return grads(wrap.inner(model))


def no_sync_around_the_forward_only(wrap, rank, size):
    model = wrap(linear())
    with wrap.no_sync(model):
        loss = model(x(rank)).sum()
    loss.backward()
    return grads(wrap.inner(model))


def no_sync_around_the_first_of_two_backwards(wrap, rank, size):
    model = wrap(linear())
    output = model(x(rank))
    with wrap.no_sync(model):
        output.sum().backward(retain_graph=True)
    output.sum().backward()
    return grads(wrap.inner(model))


def two_backwards_of_one_forward(wrap, rank, size):
    """One round each: the mean of the first, then of the second with twice the scale."""
    model = wrap(linear())
    output = model(x(rank))
    output.sum().backward(retain_graph=True)
    first = grads(wrap.inner(model), "first")
    (2 * output).sum().backward()
    return first | grads(wrap.inner(model))


def two_forwards_two_backwards(wrap, rank, size):
    model = wrap(linear())
    one, other = model(x(rank)), model(x(rank, 10.0))
    one.sum().backward()
    first = grads(wrap.inner(model), "first")
    other.sum().backward()
    return first | grads(wrap.inner(model))


def two_forwards_two_backwards_in_reverse(wrap, rank, size):
    model = wrap(linear())
    one, other = model(x(rank)), model(x(rank, 10.0))
    other.sum().backward()
    first = grads(wrap.inner(model), "first")
    one.sum().backward()
    return first | grads(wrap.inner(model))


def two_forwards_one_backward(wrap, rank, size):
    model = wrap(linear())
    (model(x(rank)) + model(x(rank, 10.0))).sum().backward()
    return grads(wrap.inner(model))


def three_forwards_without_backward_in_a_row(wrap, rank, size):
    module = linear()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        model(x(rank, 5.0))
        model(x(rank, 6.0))
        optimizer.zero_grad()
        model(x(rank, step + 1.0)).sum().backward()
        optimizer.step()
    return everything(wrap.inner(model))


def a_graph_kept_from_the_step_before(wrap, rank, size):
    model = wrap(linear())
    kept = model(x(rank)).sum()
    kept.backward(retain_graph=True)
    model(x(rank, 10.0)).sum().backward()
    kept.backward()
    return grads(wrap.inner(model))


def accumulation_with_no_sync(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module, momentum=0.9)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with wrap.no_sync(model):
            for micro in range(3):
                (model(batch(10 * step + micro, rank)).square().mean() / 4).backward()
        (model(batch(10 * step + 3, rank)).square().mean() / 4).backward()
        optimizer.step()
    return everything(wrap.inner(model))


def accumulation_without_no_sync(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module, momentum=0.9)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            (model(batch(10 * step + micro, rank)).square().mean() / 4).backward()
        optimizer.step()
    return everything(wrap.inner(model))


def accumulation_with_the_attribute(wrap, rank, size):
    """As nanoGPT, Lightning and fairseq do it: require_backward_grad_sync is set."""
    model = wrap(linear())
    model.require_backward_grad_sync = False
    model(x(rank)).sum().backward()
    model.require_backward_grad_sync = True
    model(x(rank, 10.0)).sum().backward()
    return grads(wrap.inner(model))


def accumulation_that_ends_without_sync(wrap, rank, size):
    """The last micro-batches of an epoch: local gradients are thrown away."""
    module = linear()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    with wrap.no_sync(model):
        model(x(rank, 100.0)).sum().backward()
    optimizer.zero_grad()
    model(x(rank)).sum().backward()
    optimizer.step()
    return everything(wrap.inner(model))


def no_sync_in_eval(wrap, rank, size):
    model = wrap(linear())
    model.eval()
    with wrap.no_sync(model):
        model(x(rank)).sum().backward()
    local = grads(wrap.inner(model), "local")
    model(x(rank, 10.0)).sum().backward()
    return local | grads(wrap.inner(model))


def nested_no_sync(wrap, rank, size):
    model = wrap(linear())
    with wrap.no_sync(model):
        with wrap.no_sync(model):
            model(x(rank)).sum().backward()
        model(x(rank)).sum().backward()
    model(x(rank)).sum().backward()
    return grads(wrap.inner(model))


def _rounds(first, total):
    """The right gradient after the first backward and after both, in parts of the mean."""

    def oracle(rank, size):
        return gradient(size, first, "first.weight") | gradient(size, total)

    return oracle


def _total(scale):
    return lambda rank, size: gradient(size, scale)


ONLY_THE_FIRST = "torch communicates only the first backward after a forward: its ranks drift apart"


SITUATIONS = [
    row(no_sync_then_sync, right=lambda rank, size: gradient(size, 11.0)),
    row(no_sync_around_the_backward_only, right=lambda rank, size: gradient(size)),
    row(no_sync_around_the_forward_only),
    row(
        no_sync_around_the_first_of_two_backwards,
        both=better(_total(2.0), ONLY_THE_FIRST),
    ),
    row(two_backwards_of_one_forward, both=better(_rounds(1.0, 3.0), ONLY_THE_FIRST)),
    row(two_forwards_two_backwards, both=better(_rounds(1.0, 11.0), ONLY_THE_FIRST)),
    row(
        two_forwards_two_backwards_in_reverse,
        both=better(_rounds(10.0, 11.0), ONLY_THE_FIRST),
    ),
    row(two_forwards_one_backward, right=lambda rank, size: gradient(size, 11.0)),
    row(three_forwards_without_backward_in_a_row),
    row(a_graph_kept_from_the_step_before, both=better(_total(12.0), ONLY_THE_FIRST)),
    row(accumulation_with_no_sync),
    row(accumulation_without_no_sync),
    row(accumulation_with_the_attribute, right=lambda rank, size: gradient(size, 11.0)),
    row(accumulation_that_ends_without_sync),
    row(no_sync_in_eval, right=lambda rank, size: gradient(size, 11.0)),
    row(nested_no_sync, right=lambda rank, size: gradient(size, 3.0)),
]
