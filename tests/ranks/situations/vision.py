"""Classification, detection, segmentation."""

import torch
import torch.distributed as dist
from ranks.situations.networks import _loop
from ranks.situations.rows import ONLY_CLASS, row
from ranks.situations.values import (
    batch,
    classes,
    sgd,
)
from torch import nn
from torch.nn import functional


def classification(wrap, rank, size):
    """Batch norm, dropout of one seed, momentum, weight decay and a schedule."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)

    def loss(model, step):
        torch.manual_seed(step)
        return functional.cross_entropy(model(batch(step, rank)), classes(step, rank))

    return _loop(wrap, rank, module, optimizer, loss, 4, lambda *_: schedule.step())


class Detector(nn.Module):
    """A dict of losses in training, boxes in evaluation; a frozen normalisation in the trunk."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)

    def forward(self, images, targets=None):
        features = self.trunk(images)
        scores, boxes = self.scores(features), self.boxes(features)
        if targets is None:
            return {"scores": scores, "boxes": boxes}
        return {
            "classification": functional.cross_entropy(scores, targets["labels"]),
            "regression": functional.smooth_l1_loss(boxes, targets["boxes"]),
        }


def _targets(step, rank):
    labels = classes(step, rank, 2, 2 * 16).view(2, 4, 4)
    return {"labels": labels, "boxes": batch(step + 40, rank, 2, 4, 4, 4)}


def detection_with_a_dict_of_losses(wrap, rank, size):
    module = Detector()

    def loss(model, step):
        losses = model(batch(step, rank, 2, 3, 4, 4), _targets(step, rank))
        return sum(losses.values())

    return _loop(wrap, rank, module, sgd(module), loss)


def detection_with_frozen_normalisation(wrap, rank, size):
    module = Detector()
    module.trunk[1].eval().requires_grad_(False)

    def loss(model, step):
        losses = model(batch(step, rank, 2, 3, 4, 4), _targets(step, rank))
        return sum(losses.values())

    return _loop(wrap, rank, module, sgd(module), loss)


def detection_validated_on_rank_0(wrap, rank, size):
    """Evaluation by rank 0 alone on the inner module, others wait."""
    wrap.need_class()
    module = Detector()

    def loss(model, step):
        model.train()
        losses = model(batch(step, rank, 2, 3, 4, 4), _targets(step, rank))
        return sum(losses.values())

    def after(model, step):
        if rank == 0:
            model.module.eval()
            with torch.no_grad():
                model.module(batch(9, rank, 2, 3, 4, 4))
        dist.barrier()

    return _loop(wrap, rank, module, sgd(module), loss, after=after)


def detection_without_objects_on_one_rank(wrap, rank, size):
    """Its box head gets no gradient there."""
    module = Detector()

    def loss(model, step):
        losses = model(batch(step, rank, 2, 3, 4, 4), _targets(step, rank))
        return losses["classification"] + (0 if rank == 1 else losses["regression"])

    return _loop(wrap, rank, module, sgd(module), loss, find_unused_parameters=True)


def segmentation_with_an_auxiliary_head(wrap, rank, size):
    """The auxiliary head is off in evaluation and part of the loss in training."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
            self.auxiliary = nn.Conv2d(4, 2, 1)

        def forward(self, images):
            features = self.body(images)
            out = {"out": self.head(features)}
            if self.training:
                out["aux"] = self.auxiliary(features)
            return out

    module = Net()

    def loss(model, step):
        out = model(batch(step, rank, 2, 3, 4, 4))
        labels = classes(step, rank, 2, 32).view(2, 4, 4)
        return sum(functional.cross_entropy(value, labels) for value in out.values())

    def after(model, step):
        model.eval()
        with torch.no_grad():
            model(batch(step, rank, 2, 3, 4, 4))
        model.train()

    return _loop(wrap, rank, module, sgd(module), loss, after=after)


def masked_autoencoder(wrap, rank, size):
    """Another number of kept patches on each rank."""

    class Mae(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder, self.decoder = nn.Linear(5, 6), nn.Linear(6, 5)
            self.token = nn.Parameter(torch.zeros(6))

        def forward(self, patches, kept):
            hidden = torch.cat([self.encoder(patches[:kept]), self.token.repeat(8 - kept, 1)])
            return (self.decoder(hidden) - patches).square().mean()

    module = Mae()

    def loss(model, step):
        return model(batch(step, rank, 8, 5), 3 + rank)

    return _loop(wrap, rank, module, torch.optim.AdamW(module.parameters(), 0.01), loss)


SITUATIONS = [
    row(classification),
    row(detection_with_a_dict_of_losses),
    row(detection_with_frozen_normalisation),
    row(detection_validated_on_rank_0, method=ONLY_CLASS),
    row(detection_without_objects_on_one_rank),
    row(segmentation_with_an_auxiliary_head),
    row(masked_autoencoder),
]
