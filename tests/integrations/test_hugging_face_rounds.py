"""Algorithms that send weights, under Accelerate and transformers: no DDP, and the anchor shown."""

import warnings

import pytest
import torch
from bagua.torch_api import wrap
from bagua.torch_api.algorithms import (
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from integrations.test_hugging_face import (
    accelerated,
    accelerator,
    by_trainer,
    data,
    digest,
    network,
)
from safetensors.torch import load_file
from support import training
from torch.nn.functional import cross_entropy

PARAMETERS = 20 * 64 + 64 + 64 * 5 + 5
BATCHES = 8  # of a rank and an epoch
# Rounds in the middle of an epoch: every checkpoint is between two of them.
ROUNDS = DiLoCoAlgorithm(interval=5, codec="int4_block")
ALGORITHMS = {
    "rounds": ROUNDS,
    "overlapped": DiLoCoAlgorithm(interval=6, overlap_steps=2),
    "decentralized": DecentralizedAlgorithm(hierarchical=False),
    "low_precision": LowPrecisionDecentralizedAlgorithm(hierarchical=False),
}


def with_bagua(algorithm, accumulated):
    """As `accelerated` without Accelerate: the digest of this rank's weights."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = wrap(net, [optimizer], algorithm)
    inputs, labels = data()
    own = slice(torch.distributed.get_rank(), None, 2)  # Accelerate deals out batches in turn
    batches = list(zip(inputs.split(16), labels.split(16), strict=True))[own]
    for _ in range(2):
        for index, (batch, targets) in enumerate(batches, 1):
            last = index % accumulated == 0 or index == BATCHES
            model.require_backward_grad_sync = last
            (cross_entropy(model(batch), targets) / accumulated).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return digest(net)


def both_ways(algorithm, accumulated):
    by_accelerate = accelerated(algorithm, gradient_accumulation_steps=accumulated)[0]
    return by_accelerate, with_bagua(algorithm, accumulated)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("name", ["rounds", "decentralized"])
def test_accelerate_trains_as_with_bagua_does(ranks, name, accumulated):
    for theirs, ours in ranks(2, both_ways, ALGORITHMS[name], accumulated):
        assert theirs == ours


def in_parts(algorithm, folder):
    whole, sent = accelerated(algorithm, 2)
    accelerated(algorithm, 1, save=folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no state of.*")
        return whole, accelerated(algorithm, 1, load=folder)[0], sent


@pytest.mark.parametrize("name", ALGORITHMS)
def test_accelerate_resumes_to_the_bit(ranks, tmp_path, name):
    results = ranks(2, in_parts, ALGORITHMS[name], str(tmp_path))
    for whole, parts, sent in results:
        assert parts == whole
        if name == "rounds":
            assert 0 < sent < 0.16 * 4 * PARAMETERS * 3
    assert results[0][0] != results[1][0]  # each rank's own, between two rounds


def shown(folder):
    """What Accelerate saves between two rounds, beside the anchor and this rank's weights."""
    from bagua.integrations.accelerate import use

    own = accelerator()
    use(own, ROUNDS)
    net = network()
    model, optimizer = own.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    inputs, labels = data()
    for step in range(7):
        part = slice(16 * (2 * step + own.process_index), None)
        own.backward(cross_entropy(model(inputs[part][:16]), labels[part][:16]))
        optimizer.step()
        optimizer.zero_grad()
    before = digest(net)
    own.save_state(f"{folder}/state")
    own.save_model(model, f"{folder}/model")
    gathered = own.get_state_dict(model)
    assert digest(net) == before
    with model.bagua_algorithm.anchor():
        anchor = {name: value.tolist() for name, value in net.state_dict().items()}
    return before, anchor, {name: value.tolist() for name, value in gathered.items()}


def test_accelerate_saves_the_anchor(ranks, tmp_path):
    (own, anchor, gathered), (other, same, _) = ranks(2, shown, str(tmp_path))
    assert own != other
    assert anchor == same == gathered
    for folder in ("state", "model"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert {name: value.tolist() for name, value in saved.items()} == anchor


def refused(algorithm, folder):
    return training.error_of(lambda: accelerated(algorithm, 1, load=folder))


def went_on(algorithm, folder):
    return accelerated(algorithm, 1, load=folder)[1]


def saved(algorithm, folder):
    return accelerated(algorithm, 1, save=folder)


def test_another_number_of_ranks_goes_on_from_the_anchor_or_is_refused(ranks, tmp_path):
    for name in ("rounds", "decentralized"):
        ranks(2, saved, ALGORITHMS[name], str(tmp_path / name))
    for sent in ranks(3, went_on, ALGORITHMS["rounds"], str(tmp_path / "rounds")):
        assert sent > 0
    for error in ranks(3, refused, ALGORITHMS["decentralized"], str(tmp_path / "decentralized")):
        assert "the weights of 2 ranks, and DecentralizedAlgorithm trains 3 here" in error


def begun_anew(folder):
    """The anchor after the weights of an exact training were loaded, and those weights."""
    from bagua.integrations.accelerate import use

    accelerated("gradient_allreduce", 1, save=folder)
    own = accelerator()
    use(own, ROUNDS)
    net = network()
    model, _, _ = own.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=16),
    )
    messages = training.warnings_of(lambda: own.load_state(folder))
    loaded = digest(net)
    with model.bagua_algorithm.anchor():
        return messages, loaded, digest(net), digest(network())


def test_weights_without_state_become_the_anchor_with_a_warning(ranks, tmp_path):
    said = []
    for messages, loaded, anchor, initial in ranks(2, begun_anew, str(tmp_path)):
        said += [text for text in messages if "no state of DiLoCoAlgorithm: it begins anew" in text]
        assert loaded == anchor != initial
    assert len(said) == 1  # per job


def wrong_state(folder):
    saved(ALGORITHMS["decentralized"], folder)
    return training.error_of(lambda: accelerated(ROUNDS, 1, load=folder))


def test_a_state_of_another_algorithm_is_refused(ranks, tmp_path):
    for error in ranks(2, wrong_state, str(tmp_path)):
        assert "is of DecentralizedAlgorithm, and this training of DiLoCoAlgorithm" in error


def by_q_adam():
    from bagua.integrations.accelerate import use

    own = accelerator()
    net = network()
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=2)
    hooks = use(own, QAdamAlgorithm(optimizer, hierarchical=False))
    model, optimizer = own.prepare(net, optimizer)
    inputs, labels = data()
    for step in range(6):
        part = slice(16 * (2 * step + own.process_index), None)
        own.backward(cross_entropy(model(inputs[part][:16]), labels[part][:16]))
        optimizer.step()
        optimizer.zero_grad()
    return digest(net), hooks.stats()["buckets"][0]["bytes_sent"]


def test_an_algorithm_with_an_optimizer_of_its_own_is_wrapped_too(ranks):
    (weights, sent), (same, _) = ranks(2, by_q_adam)
    assert weights == same
    assert 0 < sent < 0.3 * 4 * PARAMETERS * 4


def by_trainer_in_parts(name, folder):
    algorithm = ALGORITHMS[name]
    whole, sent = by_trainer(algorithm, folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no state of.*")
        resumed, _ = by_trainer(algorithm, folder, resume=f"{folder}/checkpoint-{BATCHES}")
    return whole, resumed, sent


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_trainer_resumes_to_the_bit_and_ends_with_equal_weights(ranks, tmp_path, name):
    results = ranks(2, by_trainer_in_parts, name, str(tmp_path))
    for whole, parts, _ in results:
        assert parts == whole
        if name in ("rounds", "overlapped"):
            assert whole == results[0][0]


class Watched:
    """The weights that a trainer evaluates, and its own in the next step."""

    def __init__(self, trainer):
        self.evaluated, self.trained = [], []
        loop = trainer.evaluation_loop

        def evaluation_loop(*arguments, **options):
            self.evaluated.append(digest(trainer.model))
            return loop(*arguments, **options)

        trainer.evaluation_loop = evaluation_loop
        step = trainer.training_step

        def training_step(*arguments, **options):
            self.trained.append(digest(trainer.model))
            return step(*arguments, **options)

        trainer.training_step = training_step


def evaluated(folder):
    """What the trainer has evaluated and trained, its end, and the step of its best model."""
    watched, trainers = [], []
    options = {
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }

    def watch(trainer):
        trainers.append(trainer)
        watched.append(Watched(trainer))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gather.*")
        end, _ = by_trainer(ROUNDS, folder, before=watch, **options)
    best_step = trainers[0].state.best_global_step
    return watched[0].evaluated, watched[0].trained, end, best_step


def test_the_trainer_evaluates_and_saves_the_anchor(ranks, tmp_path):
    (shown, trained, end, step), (same, others, other_end, _) = ranks(2, evaluated, str(tmp_path))
    assert shown == same
    assert end == other_end
    assert trained[BATCHES] != others[BATCHES]
    assert shown[0] not in (trained[BATCHES], others[BATCHES])
    best_index, saved = step // BATCHES - 1, []
    for step in (BATCHES, 2 * BATCHES):
        net = network()
        state = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
        saved.append(digest(net))
    assert saved == shown
    assert end == saved[best_index]


def refusals():
    from bagua.integrations.accelerate import use

    def apart():
        own = accelerator()
        use(own, ROUNDS)
        net = network()
        own.prepare(net)

    def of_another_model():
        own = accelerator()
        use(own, ROUNDS)
        own.prepare(network(), torch.optim.SGD(network().parameters(), lr=0.1))

    own, net = accelerator(), network()
    use(own, ROUNDS)
    own.prepare_model(net, evaluation_mode=True)
    model, _ = own.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert model.bagua_stats()["rounds"] == 0
    return [training.error_of(case) for case in (apart, of_another_model)]


def test_a_model_without_its_optimizer_is_refused(ranks):
    for errors in ranks(2, refusals):
        for error in errors:
            assert error.startswith("RuntimeError: use: prepare() got Sequential without its opti")
