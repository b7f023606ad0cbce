"""torch.compile with Inductor. With other backends, in every way: ranks/test_compile.py."""

import pytest
from ranks.test_compile import train


@pytest.mark.timeout(300)
def test_inductor(ranks):
    answers = ranks(2, train, "compiled_wrap", "exact", "inductor", timeout=250.0, fresh=True)
    assert answers == [(3, 1)] * 2
