"""Several wrapped models, and one parameter in several wrappers."""

import torch
from ranks.situations.rows import better, refused, row
from ranks.situations.values import batch, everything, grads, linear, perceptron, trained, x
from torch import nn


def two_wrapped_parts_of_one_model(wrap, rank, size):
    """Backbone and head wrapped apart, one loss through both."""
    torch.manual_seed(0)
    body, head = nn.Linear(5, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    b, h = wrap(body), wrap(head)
    for step in range(3):
        optimizer.zero_grad()
        h(torch.tanh(b(batch(step, rank)))).square().mean().backward()
        optimizer.step()
    return everything(body, "body.") | everything(head, "head.")


def two_models_backward_in_other_order_than_forward(wrap, rank, size):
    one, other = perceptron(0), perceptron(1)
    a, b = wrap(one), wrap(other)
    first, second = a(batch(0, rank)), b(batch(0, rank))
    second.square().mean().backward()
    first.square().mean().backward()
    return grads(one, "one") | grads(other, "other")


class Tied(nn.Module):
    """A decoder with the encoder's weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(5, 4, bias=False)
        self.decoder = nn.Linear(4, 5, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t().detach().clone())
        self.again = nn.Linear(5, 4, bias=False)
        self.again.weight = self.encoder.weight

    def forward(self, inputs):
        return self.again(self.decoder(torch.tanh(self.encoder(inputs))))


def tied_weights(wrap, rank, size):
    module = Tied()
    model, _ = trained(wrap, rank, module)
    tied = model.module if hasattr(model, "module") else model
    return everything(module) | {"tied": tied.again.weight is tied.encoder.weight}


def the_same_layer_twice_in_a_forward(wrap, rank, size):
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    module = nn.Sequential(layer, nn.Tanh(), layer)
    trained(wrap, rank, module)
    return everything(module)


#: torch's default; those that `with_bagua` gives must be asked for.
COPIED = {"gradient_as_bucket_view": False}


def _two_heads():
    torch.manual_seed(0)
    trunk = nn.Linear(5, 4)
    return [nn.Sequential(trunk, nn.Tanh(), nn.Linear(4, outputs)) for outputs in (2, 1)]


def the_same_module_wrapped_again_after_the_first_is_gone(wrap, rank, size):
    module = linear()
    model = wrap(module)
    model(x(rank)).sum().backward()
    module.zero_grad()
    del model
    model = wrap(module)
    model(x(rank)).sum().backward()
    return grads(module)


def two_wrappers_trained_in_turn(wrap, rank, size):
    module = linear()
    one, other = wrap(module), wrap(module)
    result = {}
    for step, model in enumerate((one, other, one, other)):
        module.zero_grad()
        model(x(rank)).sum().backward()
        result |= grads(module, f"step{step}")
    return result


def encoder_under_two_heads_summed(wrap, rank, size):
    one, other = _two_heads()
    parameters = dict.fromkeys([*one.parameters(), *other.parameters()])
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    a, b = wrap(one, **COPIED), wrap(other, **COPIED)
    for step in range(3):
        optimizer.zero_grad()
        data = batch(step, rank)
        (a(data).square().mean() + b(data).square().mean()).backward()
        optimizer.step()
    return everything(one, "one.") | everything(other, "other.")


def _two_forwards_first(wrap, rank, backwards, **arguments):
    """Two forwards, then two backwards in the order of `backwards`."""
    one, other = _two_heads()
    models = wrap(one, **arguments), wrap(other, **arguments)
    losses = [model(batch(0, rank)).square().mean() for model in models]
    for number in backwards:
        losses[number].backward()
    return grads(one, "one") | grads(other, "other")


def encoder_under_two_heads_a_then_b(wrap, rank, size):
    return _two_forwards_first(wrap, rank, (0, 1), **COPIED)


def encoder_under_two_heads_b_then_a(wrap, rank, size):
    return _two_forwards_first(wrap, rank, (1, 0))


def a_wrapped_module_inside_a_wrapped_one(wrap, rank, size):
    torch.manual_seed(0)
    inside = wrap(nn.Linear(5, 4), **COPIED)
    outside = nn.Sequential(inside, nn.Tanh(), nn.Linear(4, 2))
    model, _ = trained(wrap, rank, outside, **COPIED)
    return {f"weight{number}": p for number, p in enumerate(model.parameters())}


def _sequential(*order):
    """Two backwards one after the other, of the mean losses."""

    def oracle(rank, size):
        modules = _two_heads()
        for number in order:
            parts = [modules[number](batch(0, r)).square().mean() for r in range(size)]
            (sum(parts) / size).backward()
        return grads(modules[0], "one") | grads(modules[1], "other")

    return oracle


SHARED = refused(
    "belongs to module .* too",
    "gradients are views of one wrapper's buckets; do_flatten=False or the class share",
)


TORCH_RAISES = "torch raises 'Expected to mark a variable ready only once'"


EXCEPTIONS = [
    row(encoder_under_two_heads_a_then_b, both=better(_sequential(0, 1), TORCH_RAISES)),
    row(
        encoder_under_two_heads_b_then_a,
        klass=better(_sequential(1, 0), TORCH_RAISES),
        method=SHARED,
    ),
]
