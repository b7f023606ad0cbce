"""The last line of `bagua doctor`: what the slowest link asks for."""

from bagua._tools.doctor import advice as doctor_advice
from bagua._tools.doctor.advice import advice
from bagua._tools.doctor.links import Measured, all_pairs
from bagua._tools.doctor.verdict import own_card

EXACT = "take GradientAllReduceAlgorithm(): a step takes 1 s"
EIGHT = "take ByteGradAlgorithm(): a step takes 1 s, 1.8 s with exact gradients"
FOUR = 'take ByteGradAlgorithm(codec="int4_block", error_feedback=True): a step takes 1 s, '
DILOCO = 'take DiLoCoAlgorithm(interval={}, codec="int4_block"): a round every {} steps takes '


def advised(nodes, mbit, trip, slow=None, **given):
    cards = {rank: own_card("cpu")._replace(node=node) for rank, node in enumerate(nodes)}
    link = Measured(trip / 2, 0.0, mbit * 125e3, mbit * 125e3)
    links = dict.fromkeys(all_pairs(len(nodes)), link)
    if slow is not None:
        links[slow] = link._replace(received=mbit * 125e2, again=0.002)
    return advice(cards, links, **({"parameters": 25e6, "compute": 1.0} | given))


def told(*links, **given):
    return advised(*links, **given)[0]


def test_the_algorithm_is_the_most_exact_one_whose_steps_hardly_wait():
    for mbit, trip, words in (
        (10_000, 0.0001, EXACT),
        (600, 0.001, EIGHT),
        (250, 0.001, FOUR),
        (92, 0.048, DILOCO.format(50, 50) + "3%"),
        (10, 0.150, DILOCO.format(100, 100)),
    ):
        assert words in told([0, 1], mbit, trip), told([0, 1], mbit, trip)


def test_round_trips_count_as_bytes_do():
    near, far = (told([0, 1, 2, 3], 10_000, trip) for trip in (0.0001, 0.4))
    assert "take GradientAllReduceAlgorithm()" in near
    assert "take DiLoCoAlgorithm" in far


def test_the_slowest_link_between_nodes_counts():
    text = told([0, 0, 1, 1], 1000, 0.002, slow=(1, 2))
    assert text.startswith("2 ms there and back, 100 Mbit/s, 0.2% of the segments sent again, the ")
    inside = told([0, 0, 1, 1], 1000, 0.002, slow=(0, 1))
    assert inside.startswith("2 ms there and back, 1,000 Mbit/s, the slowest of the links between ")
    assert "of the links of one node" in told([0, 0], 1000, 0.002)


def test_loss_on_a_far_link_asks_for_bbr_where_it_is_missing(monkeypatch):
    word = "slow cubic down, but not BBR (modprobe tcp_bbr"
    for known, trip, asked in (
        (["cubic", "reno"], 0.08, True),
        (["cubic", "reno"], 0.002, False),
        (["cubic", "reno", "bbr"], 0.08, False),
    ):
        monkeypatch.setattr(doctor_advice, "congestion_controls", lambda known=known: known)
        assert (word in told([0, 1], 50, trip, slow=(0, 1))) == asked, (known, trip)


def test_model_and_computation_are_named():
    text = told([0, 1], 1000, 0.002, parameters=7e9, compute=20.0)
    assert "For a model of 7,000 million parameters, of which a rank alone computes" in text
    assert "a step in 20 s" in text
