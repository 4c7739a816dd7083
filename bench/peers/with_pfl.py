"""The same with pfl-research (package pfl): its simulated backend and its federated averaging.

Under `torchrun` it shares a round's clients among the processes, its own way to use several cores.
"""

import os
import random
import types

import torch
import torch.nn.functional as F
from workload import RATE, WORKS, Clock, begin, clients, network

given = begin()
os.environ["PFL_PYTORCH_DEVICE"] = given.device  # read when pfl is imported

from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.version import __version__

torch.set_num_threads(max(1, (os.cpu_count() or 1) // distributed.world_size))
work = WORKS[given.work]
users = [PyTorchTensorDataset(part) for part in clients(work, given.device)]
net = network(work)
net.loss = types.MethodType(lambda self, x, y: F.cross_entropy(self(x), y), net)
net.metrics = types.MethodType(lambda self, x, y: {}, net)
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
everybody = FederatedDataset(lambda user: users[user], lambda: random.randrange(work.clients))
settings = NNAlgorithmParams(
    central_num_iterations=given.rounds, evaluation_frequency=given.rounds + 1, train_cohort_size=work.cohort,
    val_cohort_size=0,
)  # fmt: skip
local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=work.batch)
clock = Clock(given)


class Lap(TrainingProcessCallback):
    """Told after every round."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        clock.lap()
        return False, Metrics()


backend = SimulatedBackend(everybody, everybody, postprocessors=[WeightByDatapoints()])
FederatedAveraging().run(settings, backend, model, model_train_params=local, callbacks=[Lap()])
if distributed.global_rank == 0:
    clock.report(__version__, f"{distributed.world_size} process(es)")
