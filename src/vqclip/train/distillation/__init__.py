"""Distillation: terms of the training loss that make the model follow frozen teachers.

    Distillation.build(config.distillation, model, ...)   teachers are loaded, once each
    student = distillation.wrap(model)                     forward also compares the towers' features
    targets = distillation.targets(images, tokens, step)   the teachers' features, without a graph
    terms, weights = distillation.losses(...)              over the global batch

Embeddings are compared by `vqclip.losses.DistillationLoss`. Token features are compared in forward; their sums travel
with the quantizers' statistics, so they add up over microbatches and ranks and need no exchange of their own.
"""

from vqclip.train.distillation.config import DistillationConfig, DistillationTerm
from vqclip.train.distillation.terms import Distillation

__all__ = ["Distillation", "DistillationConfig", "DistillationTerm"]
