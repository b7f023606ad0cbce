"""An activation checkpoint of the whole wrapped module. More: situations/checkpointing.py."""

from support import training
from torch import nn
from torch.utils.checkpoint import checkpoint


@training.with_group
def train_in_one_checkpoint():
    """The wrapped module itself is called again in backward."""

    def loss(module, data):
        outputs = checkpoint(module, data[0], use_reentrant=False)
        return nn.functional.mse_loss(outputs, data[1])

    model = training.network()
    return training.train_as_one_process(model, loss), model.bagua_train_step_counter


def test_a_wrapped_module_that_is_recomputed_trains_as_one_process_does(ranks):
    assert ranks(2, train_in_one_checkpoint) == [(3, 3)] * 2
