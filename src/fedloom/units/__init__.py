"""Units (channels, neurons) of any model that are kept or cut together, and sub-models made of them."""

from fedloom.units.find import find_units
from fedloom.units.macs import macs
from fedloom.units.memory import saved_bytes
from fedloom.units.probe import activations, gradients
from fedloom.units.skeleton import skeleton
from fedloom.units.table import Units, Where, rising
from fedloom.units.taps import called, tapped

__all__ = [
    "Units",
    "Where",
    "activations",
    "called",
    "find_units",
    "gradients",
    "macs",
    "rising",
    "saved_bytes",
    "skeleton",
    "tapped",
]
