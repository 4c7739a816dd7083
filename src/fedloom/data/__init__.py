"""Data sets, partitions and splits. Importing this costs numpy and nothing more; files are read when asked for."""

from fedloom.data import cifar, digits, idx, npz
from fedloom.data.dataset import Dataset, load
from fedloom.data.partition import Partition, Rows, parse
from fedloom.data.split import Split, split

__all__ = ["Dataset", "Partition", "Rows", "Split", "cifar", "digits", "idx", "load", "npz", "parse", "split"]
