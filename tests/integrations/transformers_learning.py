"""Tiny models with learned anchors, all different, and steps that train them."""

import torch
from transformers_models import batch, make, real

from implicit_attention.integrations.transformers import attach, learn_anchors


def learning(name="llama", dtype=torch.float32, per="head", **options):
    """A model, its learned anchors, all different, and arguments of a forward."""
    model = attach(make(name, dtype), **{"on_failure": "raise", **options})
    anchors = learn_anchors(model, 0.7, per)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in anchors.values():
            parameter += torch.randn(parameter.shape, generator=generator).to(dtype) / 2
    return model, anchors, batch(name, padding=3)


def loss_of(model, given, name="llama"):
    return model(**given).logits[real(name, given)].log_softmax(-1)[..., 0].mean()


def values(anchors):
    """The equation of a learned anchor, written out."""
    return [1e-4 + (1 - 2e-4) * torch.sigmoid(logit.detach().double()) for logit in anchors.values()]


def written_out(module):
    return (1e-4 + (1 - 2e-4) * torch.sigmoid(module.anchor.logit))[:, None, None]


def steps(model, given, count=3, optimizer=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, given)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), optimizer
