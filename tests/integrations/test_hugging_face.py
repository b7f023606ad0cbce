"""Hooks under Accelerate and transformers: exact training is theirs to the bit, state is saved."""

import gc
import hashlib
import pickle
import warnings
import weakref

import pytest
import torch
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    PowerSGDAlgorithm,
    SparseAlgorithm,
)
from support import training
from torch import nn
from torch.nn.functional import cross_entropy

ALGORITHMS = {
    "exact": "gradient_allreduce",
    "bytegrad": ByteGradAlgorithm(hierarchical=False),
    "power_sgd": PowerSGDAlgorithm(rank=2, warmup_steps=0),
    "sparse": SparseAlgorithm(ratio=0.2),
}
# Share of the bytes that the exact algorithm sends.
AT_MOST = {"exact": 1.0, "bytegrad": 0.29, "power_sgd": 0.25, "sparse": 0.26}


def data():
    inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :5].argmax(1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def digest(module):
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    return hashlib.sha256(weights).hexdigest()


def accelerator(**options):
    from accelerate import Accelerator
    from integrations import accelerate_state

    accelerate_state.forget()
    return Accelerator(cpu=True, **options)


def fixed_buckets():
    """Buckets that torch never makes anew: a resumed training begins with the same ones."""
    from accelerate.utils import DistributedDataParallelKwargs

    return [DistributedDataParallelKwargs(find_unused_parameters=True)]


def train_by(own, algorithm, net, optimizer, epochs, load=None, save=None):
    """(prepared model, bytes sent) after training by the accelerator `own`."""
    from bagua.integrations.accelerate import use

    hooks = None if algorithm is None else use(own, algorithm)
    dataset = torch.utils.data.TensorDataset(*data())
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    model, optimizer, loader = own.prepare(net, optimizer, loader)
    if load is not None:
        own.load_state(load)
    for _ in range(epochs):
        for inputs, labels in loader:
            with own.accumulate(model):
                own.backward(cross_entropy(model(inputs), labels))
                if own.sync_gradients:
                    own.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    if save is not None:
        own.save_state(save)
    return model, None if hooks is None else hooks.stats()["total"]["bytes_sent"]


def accelerated(algorithm, epochs=2, load=None, save=None, **options):
    """(digest, bytes sent) after training by Accelerate; algorithm None: without bagua."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    _, sent = train_by(accelerator(**options), algorithm, net, optimizer, epochs, load, save)
    return digest(net), sent


def accelerated_both_ways(options):
    return [accelerated(algorithm, **options)[0] for algorithm in (None, "gradient_allreduce")]


OPTIONS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "bf16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_exact_training_by_accelerate_is_its_own_to_the_bit(ranks, options):
    for theirs, ours in ranks(2, accelerated_both_ways, options):
        assert ours == theirs


def accelerated_in_parts(algorithm, folder):
    """Weights and bytes of a training, and weights of one that was saved and loaded."""
    options = {"kwargs_handlers": fixed_buckets()}
    whole, sent = accelerated(algorithm, 2, **options)
    accelerated(algorithm, 1, save=folder, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no state of bagua's hooks.*")
        return whole, sent, accelerated(algorithm, 1, load=folder, **options)[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_accelerate_sends_less_and_resumes_to_the_bit(ranks, tmp_path, name):
    results = ranks(2, accelerated_in_parts, ALGORITHMS[name], str(tmp_path / "state"))
    steps, parameters = 16, 20 * 64 + 64 + 64 * 5 + 5
    for whole, sent, parts in results:
        assert parts == whole == results[0][0]
        assert 0 < sent <= AT_MOST[name] * 4 * parameters * steps
    saved = {path.name for path in (tmp_path / "state").glob("bagua_*")}
    remembers = name in ("power_sgd", "sparse")
    assert saved == ({"bagua_0.pt", "bagua_1.pt"} if remembers else set())


def loaded_alone(algorithm, folder):
    return training.error_of(lambda: accelerated(algorithm, 0, load=folder))


def test_missing_files_of_other_ranks_are_named(ranks, tmp_path):
    folder = tmp_path / "state"
    ranks(2, accelerated_in_parts, ALGORITHMS["sparse"], str(folder))
    state = torch.load(folder / "bagua_0.pt", weights_only=True)
    (folder / "bagua_1.pt").unlink()
    torch.save(state | {"size": 3}, folder / "bagua_0.pt")
    for error in ranks(2, loaded_alone, ALGORITHMS["sparse"], str(folder)):
        assert "bagua_<rank>.pt of ranks [1, 2] of 3" in error


def pickled_and_freed():
    from bagua.integrations.accelerate import use

    own = accelerator()
    use(own, PowerSGDAlgorithm(rank=2))
    model, _ = own.prepare(network(), torch.utils.data.DataLoader([0]))
    again = pickle.loads(pickle.dumps(own))
    later = again.prepare(network()), own.prepare(network())
    hooked = [getattr(part, "_bagua_comm_hook", None) is not None for part in (model, *later)]
    gone = weakref.ref(own)
    gc.disable()
    try:
        del own
        return hooked, gone() is None
    finally:
        gc.enable()


def test_an_accelerator_is_pickled_and_freed_as_without_bagua(ranks):
    assert ranks(2, pickled_and_freed) == [([True, True, True], True)] * 2


def prepared_for_evaluation():
    """The error of a training after an evaluation, and whether each remedy has a hook."""
    from bagua.integrations.accelerate import use

    def prepared(before=lambda own, net: None, frozen=False):
        own, net = accelerator(), network().requires_grad_(not frozen)
        use(own, "bytegrad")
        before(own, net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return getattr(own.prepare(net, optimizer)[0], "_bagua_comm_hook", None) is not None

    def evaluated(own, net):
        own.prepare_model(net, evaluation_mode=True)

    def as_the_error_says(own, net):
        evaluated(own, net)
        del net._is_accelerate_prepared

    error = training.error_of(lambda: prepared(evaluated))
    return error, prepared(), prepared(as_the_error_says), prepared(evaluated, frozen=True)


def test_a_module_prepared_for_evaluation_is_refused_where_ranks_would_train_apart(ranks):
    for error, *hooked in ranks(2, prepared_for_evaluation):
        assert error.startswith("RuntimeError: use: the 2 ranks would train Sequential apart")
        assert hooked == [True, True, False]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, inputs, labels):
        return {"loss": cross_entropy(self.net(inputs), labels)}


def by_trainer(
    algorithm, folder, epochs=2, resume=None, anew=False, before=lambda trainer: None, **options
):
    """(digest, bytes sent) after `before` and a training by transformers.Trainer."""
    import transformers
    from bagua.integrations.transformers import use
    from integrations import accelerate_state

    accelerate_state.forget()
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        use_cpu=True,
        save_strategy="epoch",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        learning_rate=0.01,
        **options,
    )
    examples = [{"inputs": x, "labels": y} for x, y in zip(*data(), strict=True)]
    model = Classifier()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=examples, eval_dataset=examples[:32]
    )
    hooks = None if algorithm is None else use(trainer, algorithm)
    if anew:  # as a search for hyperparameters does
        trainer.create_accelerator_and_postprocess()
    before(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return digest(model), None if hooks is None else hooks.stats()["total"]["bytes_sent"]


def by_trainer_both_ways(folder, options):
    return [
        by_trainer(algorithm, f"{folder}/{algorithm}", **options)[0]
        for algorithm in (None, "gradient_allreduce")
    ]


@pytest.mark.parametrize("accumulated", [1, 2], ids="accumulate{}".format)
def test_exact_training_by_trainer_is_its_own_to_the_bit(ranks, tmp_path, accumulated):
    options = {"gradient_accumulation_steps": accumulated}
    for theirs, ours in ranks(2, by_trainer_both_ways, str(tmp_path), options):
        assert ours == theirs


def by_trainer_in_parts(algorithm, folder):
    whole, sent = by_trainer(algorithm, folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no state of bagua's hooks.*")
        resumed, _ = by_trainer(algorithm, folder, resume=f"{folder}/checkpoint-8")
    return whole, sent, resumed


@pytest.mark.parametrize("name", ["bytegrad", "power_sgd", "sparse"])
def test_trainer_sends_less_and_resumes_to_the_bit(ranks, tmp_path, name):
    results = ranks(2, by_trainer_in_parts, ALGORITHMS[name], str(tmp_path))
    for whole, sent, resumed in results:
        assert whole == resumed == results[0][0]
        assert 0 < sent <= AT_MOST[name] * 4 * (20 * 64 + 64 + 64 * 5 + 5) * 16


def test_a_new_accelerator_of_the_trainer_compresses_too(ranks, tmp_path):
    results = ranks(2, again_anew, str(tmp_path))
    for first, second in results:
        assert first == second
        assert first[1] > 0


def again_anew(folder):
    algorithm = ALGORITHMS["bytegrad"]
    return [by_trainer(algorithm, folder, epochs=1, anew=anew) for anew in (False, True)]


def evaluated_first(folder):
    def train():
        by_trainer(
            "gradient_allreduce", folder, epochs=1, before=lambda trainer: trainer.evaluate()
        )

    return training.error_of(train)


def test_training_after_an_evaluation_is_refused_where_ranks_would_train_apart(ranks, tmp_path):
    """The trainer leaves the module unwrapped then, also without bagua."""
    for error in ranks(2, evaluated_first, str(tmp_path)):
        assert error.startswith("RuntimeError: use: the 2 ranks would train Classifier apart")


def resumed_without_state(folder):
    by_trainer("gradient_allreduce", folder, epochs=1)
    algorithm = ALGORITHMS["sparse"]
    resume = f"{folder}/checkpoint-8"
    return training.warnings_of(lambda: by_trainer(algorithm, folder, resume=resume))


def test_a_checkpoint_without_state_warns(ranks, tmp_path):
    first, second = ranks(2, resumed_without_state, str(tmp_path))
    said = [text for text in first + second if "has no state of bagua's hooks" in text]
    assert len(said) == 1  # per job


def refusals():
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
    from bagua.integrations.accelerate import use
    from bagua.integrations.transformers import use as use_trainer

    def prepared():
        own = accelerator()
        own.prepare(network())
        use(own, "bytegrad")

    def twice():
        own = accelerator()
        use(own, "bytegrad")
        use(own, "bytegrad")

    def with_a_hook():
        handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        use(accelerator(kwargs_handlers=[handler]), "bytegrad")

    def no_handler():
        own = accelerator()
        del own.ddp_handler
        use(own, "bytegrad")

    def sharded():
        own = accelerator()
        own.state.distributed_type = type(own.distributed_type).FSDP
        use(own, "bytegrad")

    cases = (prepared, twice, with_a_hook, no_handler, sharded)
    errors = {case.__name__: training.error_of(case) for case in cases}
    errors["accelerator"] = training.error_of(lambda: use(network(), "bytegrad"))
    errors["algorithm"] = training.error_of(lambda: use(accelerator(), 3))
    errors["trainer"] = training.error_of(lambda: use_trainer(network(), "bytegrad"))
    return errors


def sharded_by_accelerate(late):
    """What training says of plain parameters beside the shards that Accelerate makes on a GPU."""
    import bagua.fsdp
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    own = accelerator()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    own.state.fsdp_plugin = plugin
    model = fsdp2_prepare_model(own, network())
    adapter = nn.Linear(5, 5)

    def train():
        if not late:
            model.append(adapter)
        bagua.fsdp.compress(model)
        model(data()[0]).sum().backward()
        if late:
            model.append(adapter)
        model(data()[0]).sum().backward()

    return training.error_of(train)


def test_a_late_adapter_beside_shards_of_accelerate_is_refused_by_name(ranks):
    for late in (False, True):
        for error in ranks(2, sharded_by_accelerate, late):
            assert error.startswith("BaguaError: "), error
            assert "parameters '3.weight', '3.bias' are trainable and not" in error, error
            assert "ignored_params" in error


REFUSED = {
    "prepared": "RuntimeError: use: a model is prepared already",
    "twice": "RuntimeError: use was called for this accelerator already",
    "with_a_hook": "ValueError: use: the accelerator's handler has comm_hook=",
    "no_handler": "RuntimeError: use: accelerate 1.15.0 has no Accelerator.ddp_handler",
    "sharded": "NotImplementedError: use: this Accelerator trains by FSDP",
    "accelerator": "TypeError: use takes an accelerate.Accelerator, not a Sequential",
    "algorithm": "TypeError: use: algorithm must be a name or an instance",
    "trainer": "TypeError: use takes a transformers.Trainer, not a Sequential",
}


def test_what_would_stay_exact_or_is_wrong_is_refused(ranks):
    for errors in ranks(2, refusals):
        for case, beginning in REFUSED.items():
            assert errors[case].startswith(beginning), errors[case]
