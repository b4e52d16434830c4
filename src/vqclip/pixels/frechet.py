"""Fréchet distance of two sets of images, in the features of a frozen network.

The distance of two normal distributions that have the means and covariances of the features (Heusel et al. 2017,
https://arxiv.org/abs/1706.08500). In the features of one file of Inception's weights it is called FID; in others it
is not, because their numbers cannot be compared.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError, import_extra
from vqclip.pixels.networks import FeatureNetwork, NetworkConfig, build_network
from vqclip.towers.weights import explain, require_plain_size

INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
"""SHA-256 of ``pt_inception-2015-12-05-6726825d.pth``, which torch-fidelity and pytorch-fid use under other names."""


class Moments(NamedTuple):
    """Sums over the features of a set; those of parts add up."""

    images: Tensor
    """() float64, number of images."""
    total: Tensor
    """``(D,)`` float64, sum of the features."""
    products: Tensor
    """``(D, D)`` float64, sum of the products of each two features."""

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Return the moments of features ``(B, D)``."""
        x = features.double()
        return cls(torch.tensor(float(len(x)), dtype=torch.float64, device=x.device), x.sum(dim=0), x.T @ x)

    def add(self, other: Moments) -> Moments:
        """Return the moments of both sets."""
        return Moments(*(a + b for a, b in zip(self, other, strict=True)))

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Return the mean ``(D,)`` and the unbiased covariance ``(D, D)``."""
        mean = self.total / self.images
        return mean, (self.products - self.images * torch.outer(mean, mean)) / (self.images - 1)


def frechet_distance(first: Moments, second: Moments) -> float:
    """Return |m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½), at least 0; each set must have two images or more."""
    (mean, cov), (other_mean, other_cov) = first.mean_and_covariance(), second.mean_and_covariance()
    values, vectors = torch.linalg.eigh(cov)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    between = torch.linalg.eigvalsh(root @ other_cov @ root).clamp(min=0).sqrt().sum()
    distance = (mean - other_mean).square().sum() + cov.trace() + other_cov.trace() - 2 * between
    return max(0.0, float(distance))


class FrechetFeatures(NamedTuple):
    """Features of images, and the name of their Fréchet distance."""

    name: str
    """FID, or a name that says in which features the distance is."""
    network: nn.Module
    """The frozen network, to be moved to a device."""
    features: Callable[[Tensor], Tensor]
    """Function of images ``(B, 3, H, W)`` uint8 on that device that returns ``(B, D)``."""


class InceptionConfig(Config):
    """Inception v3 as the authors of FID used it, by torch-fidelity (``pip install 'vqclip[fidelity]'``)."""

    kind: Literal["inception"] = "inception"
    """Inception v3, pooled features of width 2,048."""
    weights: Path
    """A file of its weights with torch-fidelity's names. Only with ``weights-inception-2015-12-05-6726825d.pth`` is the
    distance called FID."""

    def build(self) -> FrechetFeatures:
        """Load the network.

        Raises:
            ConfigError: torch-fidelity is missing, or the file is missing, damaged or of other tensors.
        """
        inception = import_extra("torch_fidelity.feature_extractor_inceptionv3", "fidelity", "network: kind inception ")
        path = self.weights.expanduser()
        try:
            require_plain_size(path)
            content = path.read_bytes()
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            with tempfile.TemporaryDirectory(prefix="vqclip-inception-") as folder:
                # torch-fidelity would run code in a file; this one contains tensors only.
                torch.save(state, plain := Path(folder, "weights.pth"))
                settings = {"feature_extractor_weights_path": str(plain)}
                network = inception.FeatureExtractorInceptionV3("inception", ["2048"], **settings)
        except Exception as error:  # damaged files raise errors of any kind
            raise ConfigError(
                f"network.weights: {path} cannot be used ({explain(error)}); expected a file of "
                "torch-fidelity's Inception weights"
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        name = "FID" if digest == INCEPTION_SHA256 else f"Fréchet distance (Inception, other weights {digest[:8]})"
        return FrechetFeatures(name, network.eval(), lambda images: network(images)[0].float())


class FrechetConfig(Config):
    """Fréchet distance of the set of reconstructions from the set of originals."""

    kind: Literal["frechet"] = "frechet"
    """Fréchet distance."""
    network: Annotated[InceptionConfig | NetworkConfig, Field(discriminator="kind")]
    """Network of the features: those of Inception; of an image tower, the mean over positions after its last block."""

    def build(self) -> FrechetFeatures:
        """Load the network.

        Raises:
            ConfigError: it cannot be loaded, or has random weights.
        """
        if isinstance(self.network, InceptionConfig):
            return self.network.build()
        network: FeatureNetwork = build_network(self.network, (-1,))
        return FrechetFeatures(
            f"Fréchet distance ({self.network.kind} {network.digest[:8]})",
            network,
            lambda images: network(images.float() / 255)[0].mean(dim=1),
        )
