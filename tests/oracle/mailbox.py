"""Rounds of islands of which some are late, in plain torch, from the formulas.

A round with the islands C that count, of weights w (samples), and the anchor a:

D   = sum over C of w_i (s(a) - x_i) / sum of w_i        x_i: at the launch of island i
m  <- mu m + D;   u = D + mu m;   a' = a - eta u
x_i <- x_i + s(a') - x_i of its launch                   for i in C
x_j <- x_j + s(a') - s(a)                                for j not in C, when it hears of the round
"""

import torch


class Islands:
    def __init__(self, weights, lr, momentum):
        """`weights`: list of tensors with which all begin."""
        self.lr, self.mu = lr, momentum
        self.anchors = [[w.detach().clone() for w in weights]]  # after each round
        self.momenta = [torch.zeros_like(w) for w in self.anchors[0]]

    def round(self, launched, samples):
        """`launched`: for each island that counts its weights at the launch."""
        shares = torch.tensor(samples, dtype=torch.float64)
        shares /= shares.sum()
        new = []
        for place, anchor in enumerate(self.anchors[-1]):
            deltas = [(anchor - own[place]).double() for own in launched]
            mean = sum(share * delta for share, delta in zip(shares, deltas, strict=True)).float()
            self.momenta[place] = self.mu * self.momenta[place] + mean
            new.append(anchor - self.lr * (mean + self.mu * self.momenta[place]))
        self.anchors.append(new)

    def after(self, round, now, launched):
        """Weights of an island that counted in the last round."""
        anchors = self.anchors[round + 1]
        return [x + a - at for x, a, at in zip(now, anchors, launched, strict=True)]

    def late(self, round, now):
        """Weights of an island that did not."""
        pairs = zip(now, self.anchors[round + 1], self.anchors[round], strict=True)
        return [x + new - old for x, new, old in pairs]
