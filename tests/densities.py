"""Densities in place of a potential: what a kernel of the microcanonical sampler asks of one."""

import torch


class Density:
    """What a kernel needs of a potential: a Normal of mean 0 with these variances, less a quartic."""

    compiled, initial = None, torch.zeros(1, dtype=torch.float64)

    def __init__(self, variances, quartic=0.0):
        self.precision, self.quartic = 1 / torch.as_tensor(variances, dtype=torch.float64), quartic

    def __call__(self, z):
        gradient = -self.precision * z - 4 * self.quartic * z**3
        return -(0.5 * self.precision * z**2 + self.quartic * z**4).sum(1), gradient


class Mapped(Density):
    """Another density, of z A in place of z."""

    def __init__(self, other, a):
        self.other, self.a = other, torch.as_tensor(a)

    def __call__(self, z):
        density, gradient = self.other(z @ self.a)
        return density, gradient @ self.a.T
