"""torch.compile in every way with every algorithm, a compiled backward, and Inductor."""

import pytest
from ranks.test_compile import (
    WAYS,
    assert_a_compiled_backward_communicates,
    assert_compiled_is_uncompiled,
    train,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bytegrad", "decentralized"])
def test_compiled_training_is_the_uncompiled(ranks, way, name):
    assert_compiled_is_uncompiled(ranks, way, name)


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_backward_communicates_too(ranks, way):
    assert_a_compiled_backward_communicates(ranks, way)


@pytest.mark.timeout(300)
def test_inductor(ranks):
    answers = ranks(2, train, "compiled_wrap", "exact", "inductor", timeout=250.0, fresh=True)
    assert answers == [(3, 1)] * 2
