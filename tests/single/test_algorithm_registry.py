"""Algorithms by name, and arguments that are refused when they are given."""

import pytest
from bagua.torch_api.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
)


def test_algorithms_are_constructed_by_name_with_their_arguments():
    exact = Algorithm.init("gradient_allreduce", hierarchical=True, average=False)
    assert isinstance(exact, GradientAllReduceAlgorithm)
    assert (exact.hierarchical, exact.average) == (True, False)
    compressed = Algorithm.init("bytegrad", codec="minmax_uint8")
    assert isinstance(compressed, ByteGradAlgorithm)
    assert (compressed.hierarchical, compressed.codec) == (None, "minmax_uint8")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"unknown algorithm 'nonsense'.*gradient_allreduce.*byteg"):
        Algorithm.init("nonsense")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'bytegrad' is registered already"):
        GlobalAlgorithmRegistry.register("bytegrad", ByteGradAlgorithm)
    assert GlobalAlgorithmRegistry.get("bytegrad") is ByteGradAlgorithm


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="must be a str, not int"):
        GlobalAlgorithmRegistry.register(1, ByteGradAlgorithm)
    assert 1 not in GlobalAlgorithmRegistry


def test_own_algorithms_can_be_registered():
    class Own(Algorithm):
        pass

    GlobalAlgorithmRegistry.register("own", Own, "a test's")
    try:
        assert isinstance(Algorithm.init("own"), Own)
        assert GlobalAlgorithmRegistry.available_algorithms()[-1] == "own"
        assert "own" in str(GlobalAlgorithmRegistry)
    finally:
        del GlobalAlgorithmRegistry["own"]


def test_an_unknown_codec_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"(?s)nonsense.*block_uint8"):
        ByteGradAlgorithm(codec="nonsense")


def test_an_algorithm_without_reify_says_which_one_it_is():
    class Unfinished(Algorithm):
        pass

    with pytest.raises(NotImplementedError, match="Unfinished does not implement reify"):
        Unfinished().reify(None)
