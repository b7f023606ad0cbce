"""The table of docs/optimizers.md: each optimizer beside torch's DDP, in rounds, and resumed."""

import copy
import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import wrap
from bagua.torch_api.algorithms import ByteGradAlgorithm, DiLoCoAlgorithm
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from support import training
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAGE = Path(__file__).resolve().parents[2] / "docs/optimizers.md"
#: Of 8 steps the checkpoint is after 5, between the rounds after 3 and after 6.
STEPS, SAVED_AFTER = 8, 5
ALGORITHMS = {
    "exact": lambda: "gradient_allreduce",
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False),
    "diloco": lambda: DiLoCoAlgorithm(interval=3, codec="int4_block"),
}


def network(seed=0):
    """One weight has more than 4096 elements: smaller ones have no state in 8 bits."""
    torch.manual_seed(seed)
    sizes = (training.FEATURES, 64, 96, training.OUTPUTS)
    first, second, third = (nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)


class Trained:
    """Optimizers of a model, and a step of theirs."""

    def __init__(self, *optimizers, for_wrap=None):
        self.optimizers = optimizers
        self.for_wrap = list(for_wrap or optimizers)

    def step(self, loss):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss().backward()
        for optimizer in self.optimizers:
            optimizer.step()


def plain(constructor, **arguments):
    return lambda model: Trained(constructor()(model.parameters(), **arguments))


def of(module, name, **arguments):
    """Imports in the rank."""
    return plain(lambda: getattr(__import__(module, fromlist=[name]), name), **arguments)


def muon_beside_adamw(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return Trained(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01))


class Closures(Trained):
    def step(self, loss):
        def closure():
            self.optimizers[0].zero_grad()
            found = loss()
            found.backward()
            return found

        self.optimizers[0].step(closure)


def lbfgs(model):
    return Closures(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2))


class Compiled(Trained):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        torch._dynamo.reset()  # after some compilations of a function torch runs it uncompiled
        self._compiled = torch.compile(optimizer.step, backend="eager")

    def step(self, loss):
        self.optimizers[0].zero_grad()
        loss().backward()
        self._compiled()


def compiled(model):
    return Compiled(torch.optim.AdamW(model.parameters(), lr=0.01))


def schedule_free(module, name, model):
    found = of(module, name, lr=0.01)(model)
    found.optimizers[0].train()
    return found


def lookahead(model):
    from pytorch_optimizer import Lookahead

    return Trained(Lookahead(torch.optim.SGD(model.parameters(), lr=0.01), k=2))


class TwoPasses(Trained):
    def step(self, loss):
        (sam,) = self.optimizers
        for step in (sam.first_step, sam.second_step):
            loss().backward()
            step(zero_grad=True)


def sam(model):
    from pytorch_optimizer import SAM

    found = SAM(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.01)
    return TwoPasses(found, for_wrap=[found.base_optimizer])


def muon_with_groups(model):
    from pytorch_optimizer import Muon

    parts = {True: [], False: []}
    for parameter in model.parameters():
        parts[parameter.ndim == 2].append(parameter)
    groups = [{"params": part, "use_muon": muon} for muon, part in parts.items()]
    return Trained(Muon(groups, lr=0.01))


def heavyball(name, model):
    import heavyball

    heavyball.utils.compile_mode = None
    return Trained(getattr(heavyball, name)(model.parameters(), lr=0.01))


#: What the page names in a row that says yes, and how it is made.
SERVED = {
    "AdamW (`foreach`": plain(lambda: torch.optim.AdamW, lr=0.01, foreach=True),
    "`fused`": plain(lambda: torch.optim.AdamW, lr=0.01, fused=True),
    "Muon beside AdamW": muon_beside_adamw,
    "Adafactor": plain(lambda: torch.optim.Adafactor, lr=0.01),
    "NAdam": plain(lambda: torch.optim.NAdam, lr=0.01),
    "LBFGS": lbfgs,
    "a step compiled": compiled,
    "bitsandbytes 0.50.2: AdamW8bit": of("bitsandbytes.optim", "AdamW8bit", lr=0.01),
    "AdamWScheduleFree": functools.partial(schedule_free, "schedulefree", "AdamWScheduleFree"),
    "SGDScheduleFree": functools.partial(schedule_free, "schedulefree", "SGDScheduleFree"),
    "ScheduleFreeAdamW": functools.partial(schedule_free, "pytorch_optimizer", "ScheduleFreeAdamW"),
    **{
        name: of("pytorch_optimizer", name, lr=0.01)
        for name in ("Shampoo", "SOAP", "AdEMAMix", "Adan", "Adai")
    },
    "SOAP, Muon": muon_with_groups,
    "Lookahead": lookahead,
    "SAM": sam,
    "heavyball 3.2.1: SOAP": functools.partial(heavyball, "SOAP"),
    "heavyball: Muon": functools.partial(heavyball, "Muon"),
    "lion-pytorch 0.2.5": of("lion_pytorch", "Lion", lr=0.001),
    "prodigyopt 1.1.2": of("prodigyopt", "Prodigy", lr=1.0),
}
#: Those that multiply matrices of gradients, which rounds by their addresses.
OF_MATRICES = ["Shampoo", "SOAP", "heavyball 3.2.1: SOAP"]
NOT_RESUMED_TO_THE_BIT = ["heavyball: Muon"]
#: Those whose states are tensors that hold others.
NOT_SAVED = {
    "torchao 0.18.0: AdamW8bit": of("torchao.optim", "AdamW8bit", lr=0.01),
    "AdamW4bit": of("torchao.optim", "AdamW4bit", lr=0.01),
}


def steps(model, trained, first, last):
    for step in range(first, last):
        data = training.batch(step, dist.get_rank())
        trained.step(lambda data=data: training.squared_error(model, data))


def at(tensor, offset):
    """A copy of `tensor` whose address is `offset` behind a multiple of 64."""
    room = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
    first = (offset - room.data_ptr()) % 64 // tensor.element_size()
    copied = room[first : first + tensor.numel()].view_as(tensor).copy_(tensor)
    assert copied.data_ptr() % 64 == offset
    return copied


def by_torch(make, offsets=None):
    model = network()
    trained = make(model)

    def move(*_):
        for parameter, offset in zip(model.parameters(), offsets, strict=True):
            parameter.grad = at(parameter.grad, offset)

    if offsets is not None:
        trained.optimizers[0].register_step_pre_hook(move)
    steps(DistributedDataParallel(model), trained, 0, STEPS)
    return training.bits(model.parameters())


def offsets_of_gradients():
    """Addresses of gradients in a bucket of bagua, from a multiple of 64."""
    model, _ = wrapped(SERVED["NAdam"], "exact")
    training.squared_error(model, training.batch(0, 0)).backward()
    return [parameter.grad.data_ptr() % 64 for parameter in model.parameters()]


def wrapped(make, algorithm, seed=0):
    model = network(seed)
    trained = make(model)
    model = wrap(model, trained.for_wrap, ALGORITHMS[algorithm]())
    return model, trained


def state(model, trained):
    optimizers = {f"optimizer{i}": one for i, one in enumerate(trained.optimizers)}
    return {"model": model, "algorithm": model.bagua_algorithm, **optimizers}


def whole(make, algorithm):
    model, trained = wrapped(make, algorithm)
    steps(model, trained, 0, STEPS)
    found = [training.bits(model.parameters())]
    if algorithm == "diloco":
        model.bagua_algorithm.sync()
        found.append(training.bits(model.parameters()))
    return found


def resumed(make, algorithm, folder):
    model, trained = wrapped(make, algorithm)
    steps(model, trained, 0, SAVED_AFTER)
    save_checkpoint(folder, state(model, trained), SAVED_AFTER)
    model, trained = wrapped(make, algorithm, seed=1)
    assert load_latest(folder, state(model, trained)) == SAVED_AFTER
    steps(model, trained, SAVED_AFTER, STEPS)
    return training.bits(model.parameters())


@training.with_group
def served(name, folder):
    make = (SERVED | NOT_SAVED)[name]
    offsets = offsets_of_gradients() if name in OF_MATRICES else None
    found = {"torch": by_torch(make, offsets)}
    for algorithm in ALGORITHMS:
        found[algorithm] = whole(make, algorithm)
        if name not in (*NOT_SAVED, *NOT_RESUMED_TO_THE_BIT):
            place = f"{folder}/{algorithm}"
            found[f"{algorithm}, resumed"] = resumed(make, algorithm, place)
    return found


@pytest.mark.parametrize("name", [*SERVED, *NOT_SAVED])
def test_an_optimizer_of_the_table_trains_as_with_torch_and_resumes(ranks, tmp_path, name):
    first, second = ranks(2, served, name, str(tmp_path))
    assert first["exact"] == second["exact"] == [first["torch"]]
    assert first["bytegrad"] == second["bytegrad"] != first["exact"]
    assert first["diloco"][0] != second["diloco"][0]  # two steps after a round
    assert first["diloco"][-1] == second["diloco"][-1] != first["diloco"][0]
    for found in (first, second):
        for algorithm in ALGORITHMS:
            again = found.get(f"{algorithm}, resumed", found[algorithm][0])
            assert again == found[algorithm][0], algorithm


def resumed_by_torch(make):
    model = network()
    trained = make(model)
    steps(model, trained, 0, SAVED_AFTER)
    saved = copy.deepcopy((model.state_dict(), trained.optimizers[0].state_dict()))
    model = network(seed=1)
    trained = make(model)
    model.load_state_dict(saved[0])
    trained.optimizers[0].load_state_dict(saved[1])
    steps(model, trained, SAVED_AFTER, STEPS)
    return training.bits(model.parameters())


def whole_by_torch(make):
    model = network()
    steps(model, make(model), 0, STEPS)
    return training.bits(model.parameters())


@training.with_group
def whole_and_resumed(name, folder):
    make = SERVED[name]
    assert whole_by_torch(make) == whole_by_torch(make)
    found = [(whole_by_torch(make), resumed_by_torch(make))]
    for algorithm in ALGORITHMS:
        found.append((whole(make, algorithm)[0], resumed(make, algorithm, f"{folder}/{algorithm}")))
    return found


def test_what_the_page_does_not_resume_to_the_bit_torch_alone_does_not_either(ranks, tmp_path):
    for name in NOT_RESUMED_TO_THE_BIT:
        for pairs in ranks(2, whole_and_resumed, name, str(tmp_path)):
            assert all(uninterrupted != resumed for uninterrupted, resumed in pairs), name


@training.with_group
def refusals(folder):
    from schedulefree import ScheduleFreeWrapper

    errors = []
    model = network()
    inside = ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.01))
    for algorithm in ("exact", "diloco"):
        chosen = ALGORITHMS[algorithm]()
        errors.append(training.error_of(lambda chosen=chosen: wrap(network(), [inside], chosen)))
    for make in NOT_SAVED.values():
        model, trained = wrapped(make, "bytegrad")
        steps(model, trained, 0, 1)
        here = state(model, trained)
        errors.append(training.error_of(lambda here=here: save_checkpoint(folder, here, 1)))
        del here["optimizer0"]
        save_checkpoint(folder, here, 1)
        model = network()
        trained = make(model)
        steps(model, trained, 0, 1)
        errors.append(training.error_of(lambda m=model, t=trained: wrap(m, t.for_wrap, "bytegrad")))
    return errors


def test_what_the_table_refuses_is_refused_by_name(ranks, tmp_path):
    of_tensor = "is a OptimState{}bit, a tensor that holds others, which cannot be sent or saved"
    for wrapper, in_rounds, *of_states in ranks(2, refusals, str(tmp_path)):
        assert wrapper == in_rounds
        assert "bagua.wrap: ScheduleFreeWrapper is not a torch.optim.Optimizer" in wrapper
        for bits, errors in zip((8, 4), (of_states[:2], of_states[2:]), strict=True):
            entries = ("optimizer entry 'optimizer0/state/2/exp_avg'", "state[2]['exp_avg']")
            for entry, error in zip(entries, errors, strict=True):
                assert f"{entry} {of_tensor.format(bits)}" in error


@training.with_group
def schedule_free_after_rounds():
    """Digests of the weights after sync(), and in evaluation."""
    model, trained = wrapped(SERVED["AdamWScheduleFree"], "diloco")
    steps(model, trained, 0, STEPS)
    model.bagua_algorithm.sync()
    synchronised = training.bits(model.parameters())
    trained.optimizers[0].eval()
    return synchronised, training.bits(model.parameters())


def test_only_the_weights_that_schedule_free_trains_are_averaged(ranks):
    first, second = ranks(2, schedule_free_after_rounds)
    assert first[0] == second[0]
    assert first[1] != second[1]


def rows_of_the_page():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_each_optimizer_with_the_release_that_was_tried():
    for name in SERVED | NOT_SAVED:
        (row, *_) = [row for row in rows_of_the_page() if name in row[0]]
        assert row[1] == "yes", name
        assert row[2].strip("[").startswith("yes"), name
        assert (row[3] == "yes") == (name not in (*NOT_SAVED, *NOT_RESUMED_TO_THE_BIT)), name
    pins = (PAGE.parents[1] / "requirements-integrations.txt").read_text().replace("_", "-")
    for package, release in re.findall(r"([a-z_-]+) ([0-9.]+[0-9])", str(rows_of_the_page())):
        assert f"{package.replace('_', '-')}=={release}" in pins, package
