"""Data sets, partitions and splits. Importing this costs numpy and nothing more; files are read when asked for."""

from fedloom.data import cifar, digits, domains, folders, idx, leaf, mat, npz, render, usps  # noqa: F401  they register
from fedloom.data.dataset import Dataset, load
from fedloom.data.export import export
from fedloom.data.partition import Partition, parse
from fedloom.data.picture import draw
from fedloom.data.rows import Rows
from fedloom.data.split import Split, split

__all__ = ["Dataset", "Partition", "Rows", "Split", "draw", "export", "load", "parse", "split"]
