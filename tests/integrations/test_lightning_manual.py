"""Manual optimization with BaguaStrategy: backwards and steps inside of training_step."""

import pytest


def manual(name, step):
    from integrations import lightning_training as lt

    module = lt.gan(getattr(lt, step))
    error = lt.error_of_fit(module, lt.strategy(name))
    parameters = [p.detach() for p in module.parameters()]
    rounds = None if module.stats is None else module.stats["rounds"]
    return lt.digest(module), parameters, rounds, error


def exact_and_ddp(step):
    return [
        manual(name, step) for name in ("gradient_allreduce", "ddp_find_unused_parameters_true")
    ]


@pytest.mark.parametrize("step", ["one_backward", "two_backwards", "toggled"])
def test_every_backward_is_that_of_ddp_to_the_bit(ranks, step):
    for ours, ddp in ranks(2, exact_and_ddp, step):
        assert ours[3] is ddp[3] is None
        assert ours[0] == ddp[0]
        assert ours[2] == 2 * 8 * (1 if step == "one_backward" else 2)


def test_what_is_accumulated_is_not_communicated(ranks):
    for ours, ddp in ranks(2, exact_and_ddp, "accumulated"):
        assert ours[3] is ddp[3] is None
        assert ours[2] == 2 * 8
        for own, other in zip(ours[1], ddp[1], strict=True):
            assert (own - other).abs().max() < 1e-6


def both_ways(name):
    return [manual(name, step) for step in ("past_lightning", "one_backward")]


def test_a_backward_past_lightning_is_communicated_too(ranks):
    """Lightning's DDP leaves it local, without an error."""
    for past, through in ranks(2, both_ways, "bytegrad"):
        assert past[3] is None
        assert past[0] == through[0]


@pytest.mark.parametrize("name", ["bytegrad", "power_sgd", "sparse"])
def test_compressed_gans_stay_equal_on_all_ranks(ranks, name):
    results = ranks(2, manual, name, "toggled")
    assert results[0][3] is None
    assert results[0][0] == results[1][0]
    assert results[0][2] == 2 * 8 * 2


def test_weights_are_averaged_in_every_backward(ranks):
    for _, _, rounds, error in ranks(2, manual, "decentralized", "two_backwards"):
        assert error is None
        assert rounds == 2 * 8 * 2
    for _, _, rounds, error in ranks(
        2, manual, "low_precision_decentralized", "one_backward", init=False
    ):
        assert error is None
        assert rounds == 2 * 8


REFUSED = {
    ("decentralized", "past_lightning"): "optimizer.step() came between a training forward and",
    ("decentralized", "accumulated"): "a second backward through one forward",
    ("low_precision_decentralized", "past_lightning"): "optimizer.step() came between",
    ("low_precision_decentralized", "two_backwards"): "a second backward through one forward",
}


@pytest.mark.parametrize(("name", "step"), REFUSED)
def test_averages_refuse_what_they_cannot_do(ranks, name, step):
    for _, _, _, error in ranks(2, manual, name, step):
        assert REFUSED[name, step] in error
