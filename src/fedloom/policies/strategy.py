"""How do real vectors evolve over a federation? A (1+1) evolution strategy a client, one covariance for all.

Gong et al. 2023, Adaptive federated learning algorithm based on evolution strategies (in Chinese), Sci Sin Inform 53,
equations 6 to 11, after CMA-ES. Every client holds a vector of genes, its parent. The server proposes an offspring, the
client says which of the two is better, and the server learns from all answers: which directions win (covariance C,
shared) and how far to go (step size sigma and evolution path p, one a client).

Differences. C is learned by an exponential mean over the winners' directions instead of equation 7's mean over one
round, which would forget all earlier rounds and be singular for fewer clients than genes (`survivors` is equation 7).
It is scaled to trace L, since sigma carries the scale, and its eigenvalues are bounded below. Where the parent won
nothing moved, so its path only fades. Genes are clipped, and directions are those of the clipped genes. A step size
grows at most e-fold a round.

All is plain NumPy over columns, so that a population can be stored and sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, lgamma, sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Population", "Strategy", "expected_length"]

Vector = npt.NDArray[np.float64]
Population = Mapping[str, Vector]
"""genes, most (largest allowed), path, arose (the direction by which the genes arose): a row a client; sigma, and how
many offspring were tried: a number a client; covariance: (L, L)."""

THINNEST = 1e-3  # smallest eigenvalue of C, whose mean eigenvalue is 1


def expected_length(genes: int) -> float:
    """E|N(0, I)| in so many dimensions.

    >>> round(expected_length(1), 6), round(expected_length(2), 6)
    (0.797885, 1.253314)
    """
    return sqrt(2) * exp(lgamma((genes + 1) / 2) - lgamma(genes / 2))


@dataclass(frozen=True)
class Strategy:
    """The rules; what they work on is a population."""

    first: float = 0.8
    least: float = 0.05
    sigma: float = 0.1
    bounds: tuple[float, float] = (0.01, 0.3)
    path_rate: float = 0.3
    covariance_rate: float = 0.2
    covariance: Literal["winners", "survivors", "identity"] = "winners"

    def begin(self, most: Vector) -> Population:
        """The first population; `most` says how large every client's genes may be."""
        clients, genes = most.shape
        return {
            "genes": np.clip(np.full_like(most, self.first), self.least, most),
            "most": most,
            "sigma": np.full(clients, self.sigma),
            "tried": np.zeros(clients),
            "path": np.zeros_like(most),
            "arose": np.zeros_like(most),
            "covariance": np.eye(genes),
        }

    def offspring(self, population: Population, client: int, generator: np.random.Generator) -> Vector:
        """Equation 6: the parent, moved along a direction drawn from N(0, C)."""
        covariance = population["covariance"]
        direction = power(covariance, 0.5) @ generator.standard_normal(len(covariance))
        moved = population["genes"][client] + population["sigma"][client] * direction
        clipped: Vector = np.clip(moved, self.least, population["most"][client])
        return clipped

    def next(self, population: Population, tried: Mapping[int, tuple[Vector, bool]]) -> Population:
        """The population after some clients have tried an offspring and said whether it won."""
        after = {name: column.copy() for name, column in population.items()}
        covariance, won = population["covariance"], []
        whiten, fade = power(covariance, -0.5), 1 - self.path_rate
        for client, (told, better) in sorted(tried.items()):
            sigma = float(population["sigma"][client])
            offspring = np.clip(told, self.least, population["most"][client])
            move = (offspring - population["genes"][client]) / sigma if sigma else np.zeros_like(offspring)
            after["tried"][client] += 1
            after["path"][client] *= fade
            if better:
                after["genes"][client], after["arose"][client] = offspring, move
                after["path"][client] += sqrt(1 - fade**2) * whiten @ move
                won.append(move)
            after["sigma"][client] = self._step(sigma, float(np.linalg.norm(after["path"][client])), len(offspring))
        if self.covariance == "winners" and won:
            mean, rate = np.mean([np.outer(move, move) for move in won], axis=0), self.covariance_rate
            after["covariance"] = safe((1 - rate) * covariance + rate * mean)
        elif self.covariance == "survivors" and after["arose"].any():
            lines = after["arose"][after["arose"].any(axis=1)]
            after["covariance"] = safe(lines.T @ lines / len(lines))
        return after

    def _step(self, sigma: float, length: float, genes: int) -> float:
        """Equation 11: longer where moves add up, shorter where they cancel or fail; 0 stays 0."""
        # At most e-fold a round, as implementations of CMA-ES have it.
        grown = sigma * exp(min(1.0, self.path_rate * (length / expected_length(genes) - 1)))
        return min(max(grown, self.bounds[0]), self.bounds[1]) if sigma else 0.0


def power(matrix: Vector, exponent: float) -> Vector:
    """A power of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh(matrix)
    result: Vector = (vectors * values**exponent) @ vectors.T
    return result


def safe(matrix: Vector) -> Vector:
    """The matrix scaled to trace L, symmetric, its eigenvalues bounded below; the identity if nothing is left of it."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    if not values.max() > 0:
        return np.eye(len(matrix))
    values = np.maximum(values * (len(values) / values.sum()), THINNEST)
    result: Vector = (vectors * (values * (len(values) / values.sum()))) @ vectors.T
    return (result + result.T) / 2
