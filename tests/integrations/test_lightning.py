"""BaguaStrategy: exact training is that of Lightning's DDP to the bit, and checkpoints resume."""

import copy
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from support import training

OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "compiled": {"compiled": True, "max_epochs": 1},
    "of the other package": {"package": "pytorch_lightning"},
}
# Share of the bytes that the exact algorithm sends.
AT_MOST = {
    "gradient_allreduce": 1.0,
    "bytegrad": 0.29,
    "power_sgd": 0.25,
    "sparse": 0.1,
    "decentralized": 1.0,
    "low_precision_decentralized": 0.29,
    "qadam": 0.3,
    "diloco": 0.3,
    "async": 100.0,
}
DIFFERENT_WEIGHTS = {"decentralized", "low_precision_decentralized", "diloco", "async"}


def trained(name, package="lightning", compiled=False, **options):
    """(digest, trainer) of a classifier trained by an algorithm."""
    from integrations import lightning_training as lt

    own = lt.classifier(package, q_adam=name == "qadam")
    if compiled:
        own = torch.compile(own, backend="eager")
    trainer = lt.fit(own, lt.strategy(name, package), package, **options)
    return lt.digest(own), trainer


def as_ddp(options):
    return [trained(name, **options)[0] for name in ("ddp", "gradient_allreduce")]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_exact_training_is_that_of_ddp_to_the_bit(ranks, options):
    for ddp, ours in ranks(2, as_ddp, options):
        assert ours == ddp


def averaged_at_the_end():
    from bagua.torch_api import average_weights
    from integrations import lightning_training as lt

    module, mean = lt.classifier(), {}

    def average():
        mean.update(average_weights(module.trainer.strategy.model).state_dict())

    module.on_train_end = average
    lt.fit(module, lt.strategy("decentralized", peer_selection_mode="shift_one"))
    return lt.digest(module), [value.tolist() for value in mean.values()]


def test_weights_that_differ_have_a_mean_in_the_last_hook(ranks):
    (own, mean), (other, same) = ranks(2, averaged_at_the_end)
    assert own != other
    assert len(mean) > 0
    assert mean[:2] == same[:2]


def by_name_and_twice():
    """Trainer(strategy="bagua"), fit() twice, against ddp; and which node this is."""
    from integrations import lightning_training as lt

    digests = []
    for name in ("ddp", "bagua"):
        module = lt.classifier()
        for _ in range(2):
            lt.fit(module, name, max_epochs=1)
        digests.append(lt.digest(module))
    return *digests, os.environ.get("NODE_RANK")


def test_the_strategy_has_a_name_and_fits_again(ranks):
    for ddp, ours, node in ranks(2, by_name_and_twice):
        assert ours == ddp
        assert node == "0"


def validated(folder, interval):
    """Weights at each moment of a training in rounds, by hooks of its module."""
    from integrations import lightning_training as lt
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = lt.classifier()
    seen = {"validated": [], "trained": [], "anchors": []}

    def validation_step(batch, batch_idx):
        seen["validated"].append(lt.parameters(module))

    def on_train_epoch_end():
        seen["trained"].append(lt.parameters(module))
        with module.trainer.strategy.model.bagua_ddp.bagua_algorithm.anchor():
            seen["anchors"].append(lt.parameters(module))

    module.validation_step, module.on_train_epoch_end = validation_step, on_train_epoch_end
    trainer = lt.fit(
        module,
        lt.strategy("diloco", interval=interval),
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    return seen, lt.parameters(module)


def test_rounds_validate_and_save_the_anchor_and_end_with_equal_weights(ranks, tmp_path):
    (seen, end), (others, other_end) = ranks(2, validated, str(tmp_path), 5)
    assert seen["anchors"] == others["anchors"]
    assert seen["trained"][0] != others["trained"][0]
    for part in (seen, others):
        steps = len(part["validated"]) // 2
        assert part["validated"] == [a for a in part["anchors"] for _ in range(steps)]
        assert part["trained"][0] != part["anchors"][0]
    assert end == other_end
    for name, weights in (("epoch=0", seen["anchors"][0]), ("end", end)):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert [value.tolist() for key, value in saved.items() if "running" not in key] == [
            *weights[:4],
            saved["net.1.num_batches_tracked"].tolist(),
            *weights[4:],
        ]


def guarded():
    from bagua.torch_api import Guard
    from integrations import lightning_training as lt

    module = lt.classifier()
    lt.fit(module, lt.strategy("bytegrad", guard=Guard(every=4)))
    return module.stats["guard"]


def test_a_guard_of_the_strategy_measures(ranks):
    for guard in ranks(2, guarded):
        assert guard["checks"] > 0


def learns_and_resumes(name, folder):
    """Losses, bytes and weights of a training, and weights of one that was saved and resumed."""
    from integrations import lightning_training as lt

    module = lt.classifier(q_adam=name == "qadam")
    lt.fit(module, lt.strategy(name), max_epochs=4)
    whole = lt.parameters(module)
    if name != "async":  # whose averages come in another order
        path = f"{folder}/last.ckpt"
        trained(name, max_epochs=1)[1].save_checkpoint(path)
        again = lt.classifier(q_adam=name == "qadam")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*the checkpoint has no state of.*")
            lt.fit(again, lt.strategy(name), max_epochs=4, ckpt_path=path)
        assert lt.digest(again) == lt.digest(module)
    return module.losses, module.stats["total"]["bytes_sent"], whole


@pytest.mark.parametrize("name", AT_MOST)
def test_every_algorithm_learns_with_its_bytes_and_resumes_to_the_bit(ranks, tmp_path, name):
    results = ranks(2, learns_and_resumes, name, str(tmp_path))
    exact = 4 * (20 * 64 + 3 * 64 + 64 * 5 + 5)
    for losses, sent, parameters in results:
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
        assert 0 < sent <= AT_MOST[name] * exact * len(losses)
        if name not in DIFFERENT_WEIGHTS:
            assert parameters == results[0][2]


def copied_after_training():
    from lightning.pytorch.callbacks import Callback

    class Holder(Callback):
        def on_fit_start(self, trainer, module):
            self.trainer = trainer

    trainer = trained("sparse", max_epochs=1, callbacks=[Holder()])[1]
    return [type(copy.deepcopy(part)).__name__ for part in (trainer, trainer.callbacks)]


def test_a_trainer_is_copied_after_training(ranks):
    """With its callbacks, which may hold it."""
    assert ranks(1, copied_after_training) == [["Trainer", "list"]]


def saved_by_a_callback(name, folder, after_the_epoch):
    """A checkpoint of ModelCheckpoint in the middle of fit(), or in a validation of the anchor."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(
        folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=after_the_epoch
    )
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    whole, _ = trained(name, callbacks=[callback], enable_checkpointing=True, **options)
    return whole, trained(name, ckpt_path=f"{folder}/epoch=0.ckpt", **options)[0]


@pytest.mark.parametrize(("name", "after_the_epoch"), [("sparse", True), ("diloco", False)])
def test_checkpoints_of_callbacks_have_the_state_too(ranks, tmp_path, name, after_the_epoch):
    for whole, parts in ranks(2, saved_by_a_callback, name, str(tmp_path), after_the_epoch):
        assert parts == whole


def saved(name, path):
    trained(name, max_epochs=1)[1].save_checkpoint(path)


def resume(name, path):
    from integrations import lightning_training as lt

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = lt.error_of_fit(lt.classifier(), lt.strategy(name), ckpt_path=path)
    return error, [str(w.message) for w in caught]


def test_another_number_of_ranks_resumes_what_has_one_meaning(ranks, tmp_path):
    paths = {name: str(tmp_path / name) for name in ("sparse", "diloco", "decentralized")}
    for name, path in paths.items():
        ranks(2, saved, name, path)
    for name in ("sparse", "diloco"):
        ((error, _),) = ranks(1, resume, name, paths[name])
        assert error is None
    ((error, _),) = ranks(1, resume, "decentralized", paths["decentralized"])
    assert "resume with the number of ranks that saved it" in error


def test_a_checkpoint_of_another_algorithm_is_refused(ranks, tmp_path):
    path = str(tmp_path / "sparse.ckpt")
    ranks(2, saved, "sparse", path)
    others = {"gradient_allreduce": "GradientAllReduce", "power_sgd": "PowerSGD"}
    for name, algorithm in others.items():
        for error, _ in ranks(2, resume, name, path):
            both = (
                f"the checkpoint is of SparseAlgorithm, and this training of {algorithm}Algorithm"
            )
            assert both in error
            assert len(error) < 600  # not every parameter


def test_a_checkpoint_without_state_warns(ranks, tmp_path):
    path = str(tmp_path / "ddp.ckpt")
    ranks(2, saved, "ddp", path)
    said = []
    for error, messages in ranks(2, resume, "sparse", path):
        assert error is None
        said += [m for m in messages if "the checkpoint has no state of SparseAlgorithm:" in m]
    assert len(said) == 1  # per job


def interrupted(folder):
    """Every rank fails in its third step, and a callback saves then."""
    from integrations import lightning_training as lt
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    module = lt.classifier(fails_at=2)
    callbacks = [OnExceptionCheckpoint(folder, filename="failed")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = lt.error_of_fit(
            module, lt.strategy("sparse"), callbacks=callbacks, enable_checkpointing=True
        )
    return error, [str(w.message) for w in caught]


def test_an_interrupted_training_saves_without_the_other_ranks(ranks, tmp_path):
    for error, messages in ranks(2, interrupted, str(tmp_path)):
        assert error == "ArithmeticError: of the test"
        assert any("no state of bagua's algorithm" in m for m in messages)
    assert (tmp_path / "failed.ckpt").exists()


def scaled():
    from integrations import lightning_training as lt
    from lightning.pytorch.plugins import MixedPrecision

    module = lt.classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    lt.fit(module, lt.strategy("sparse"), plugins=[plugin], max_epochs=1)
    return module.scales, module.losses


def test_the_scaler_of_the_precision_plugin_reaches_the_algorithm(ranks):
    for scales, losses in ranks(2, scaled):
        assert scales
        assert losses[-1] < losses[0]


def refusals():
    from bagua import lightning
    from bagua.lightning import BaguaStrategy
    from bagua.torch_api.algorithms import ByteGradAlgorithm
    from integrations import lightning_training as lt

    lacking = SimpleNamespace(__name__="lightning.old", DDPStrategy=object)

    return {
        "release": training.error_of(
            lambda: lightning._subclass(lacking, "DDPStrategy", lightning._FabricMethods, "")
        ),
        "name": training.error_of(lambda: BaguaStrategy("bytegard")),
        "type": training.error_of(lambda: BaguaStrategy(3)),
        "argument": training.error_of(lambda: BaguaStrategy("bytegrad", rank=3)),
        "value": training.error_of(lambda: BaguaStrategy("sparse", ratio=3.0)),
        "both": training.error_of(lambda: BaguaStrategy(ByteGradAlgorithm(), hierarchical=True)),
        "qadam": training.error_of(lambda: lt.fit(lt.classifier(), BaguaStrategy("qadam"))),
    }


REFUSED = {
    "release": "ImportError: bagua.lightning: DDPStrategy of lightning.old has no setup_module_and",
    "name": "ValueError: BaguaStrategy: ",
    "type": "TypeError: BaguaStrategy: algorithm must be a name or an instance",
    "argument": "TypeError: BaguaStrategy(algorithm='bytegrad'): ",
    "value": "ValueError: ",
    "both": "TypeError: BaguaStrategy: ['hierarchical'] are not arguments of the strategy",
    "qadam": "ValueError: BaguaStrategy(algorithm='qadam') needs exactly one optimizer",
}


def test_wrong_arguments_are_refused(ranks):
    (errors,) = ranks(1, refusals)
    for key, beginning in REFUSED.items():
        assert (errors[key] or "").startswith(beginning), key


def refused_by_the_other_package():
    import lightning.fabric
    import lightning_fabric
    import pytorch_lightning
    from bagua.lightning import strategies

    assert strategies["lightning.pytorch"] is strategies["lightning"]
    said = []
    for make, ours, theirs in (
        (pytorch_lightning.Trainer, "lightning", "pytorch_lightning"),
        (lightning_fabric.Fabric, "lightning.fabric", "lightning_fabric"),
        (lightning.fabric.Fabric, "lightning_fabric", "lightning.fabric"),
    ):
        with pytest.raises(ValueError, match="invalid strategy") as refused:
            make(strategy=strategies[ours]("bytegrad"), accelerator="cpu", devices=2)
        said.append(f"bagua.lightning.strategies[{theirs!r}]" in str(refused.value))
        make(strategy=strategies[theirs]("bytegrad"), accelerator="cpu", devices=2)
    return said


def test_an_error_about_the_other_packages_strategy_names_the_right_one(ranks):
    assert ranks(2, refused_by_the_other_package) == [[True] * 3] * 2
