"""FedAvg as one would write it by hand: one client after another, eager, with as many threads as there are cores."""

import random

import torch
import torch.nn.functional as F
from workload import RATE, WORKS, Clock, begin, clients, network

given = begin()
work = WORKS[given.work]
data = clients(work, given.device)
model = network(work).to(given.device)
optimizer = torch.optim.SGD(model.parameters(), RATE)
whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
clock = Clock(given)
for _ in range(given.rounds):
    total = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for client in random.sample(range(work.clients), work.cohort):
        x, y = data[client]
        model.load_state_dict(whole)
        for rows in torch.randperm(len(x), device=given.device).split(work.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        for name, tensor in model.state_dict().items():
            total[name] += tensor / work.cohort
    whole = total
    clock.lap()
clock.report(torch.__version__)
