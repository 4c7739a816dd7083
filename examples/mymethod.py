"""A method of one's own in 20 lines: a new objective, private state, a new merge. Explained in docs/own-method.md.

Run it with: fedloom run examples.mymethod:MyMethod (or any import path that Python finds).
"""

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.merge import Mean
from fedloom.policies.objective import Sum


class Pull:
    """A spring to the model with which the client ended its last round."""

    def __call__(self, tensors, fixed):
        return 0.01 * sum((tensors[name] - past).square().sum() for name, past in fixed["past"].items())


class Careful(Mean):
    """Clients whose training loss is high count less."""

    def weight(self, report):
        return report.weight / (1 + report.numbers["loss"])


@dataclass(frozen=True)
class MyMethod(FedAvg):
    """Clients remember where they were; the server trusts those that fit."""

    merge: Mean = Careful()

    def loss(self):
        return Sum(self.objective, Pull())

    def fixed(self, client, tensors):
        past = client.state.get("past", tensors)
        return super().fixed(client, tensors) | {
            "past": {n: past[n] for n in tensors if n not in client.network.buffers}
        }

    def report(self, client, fit, where=None):
        client.state["past"] = fit.tensors
        return super().report(client, fit, where)
