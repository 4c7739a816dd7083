"""The same with FedLab: its standalone pipeline, its FedAvg handler and its serial trainer."""

import logging
import sys
from unittest.mock import MagicMock

# FedLab's ready-made data sets import torchvision, which has no build for every torch; none of them is used here.
sys.modules |= {name: MagicMock() for name in ("torchvision", "torchvision.datasets", "torchvision.transforms")}

import fedlab
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset
from workload import RATE, WORKS, Clock, begin, clients, network

logging.getLogger().setLevel(logging.WARNING)
given = begin()
work, cuda = WORKS[given.work], given.device == "cuda"


class Parts:
    """What FedLab's trainers ask a data set for."""

    def __init__(self):
        self.parts = [TensorDataset(*part) for part in clients(work, given.device)]

    def get_dataloader(self, client, batch_size):
        return DataLoader(self.parts[client], batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    """Told after every round, where the original evaluates."""

    def evaluate(self):
        clock.lap()


handler = FedAvgServerHandler(network(work), given.rounds, work.cohort / work.clients, cuda)
trainer = FedAvgSerialClientTrainer(network(work), work.clients, cuda)
trainer.setup_dataset(Parts())
trainer.setup_optim(1, work.batch, RATE)
clock = Clock(given)
Pipeline(handler, trainer).main()
clock.report(fedlab.__version__)
