"""The same with Flower's simulation: one core a client app, as many at once as cores (its fastest setting)."""

import os
import tempfile

import flwr
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import RATE, WORKS, Clock, begin, clients, network

given = begin()
work = WORKS[given.work]
data = {}  # in a worker: made once, kept
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message, context):
    torch.set_num_threads(1)
    if not data:
        data.update(enumerate(clients(work, given.device)))
    x, y = data[int(context.node_config["partition-id"])]
    model = network(work)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.to(given.device)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for rows in torch.randperm(len(x), device=given.device).split(work.batch):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    told = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(content=RecordDict(told), reply_to=message)


@server_app.main()
def main(grid, context):
    clock = Clock(given)
    strategy = FedAvg(
        fraction_train=work.cohort / work.clients, min_train_nodes=1, fraction_evaluate=0.0,
        min_available_nodes=work.clients,
    )  # fmt: skip
    strategy.start(
        grid,
        ArrayRecord(network(work).state_dict()),
        num_rounds=given.rounds,
        evaluate_fn=lambda number, arrays: clock.lap() if number else None,
    )
    clock.report(flwr.__version__, f"{os.cpu_count()} clients at a time")


share = 1 / (os.cpu_count() or 1) if given.device == "cuda" else 0.0
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    os.environ["RAY_TMPDIR"] = folder  # a cluster of its own, whatever else runs on this machine
    run_simulation(
        server_app,
        client_app,
        num_supernodes=work.clients,
        backend_config={"init_args": {"address": "local"}, "client_resources": {"num_cpus": 1, "num_gpus": share}},
    )
