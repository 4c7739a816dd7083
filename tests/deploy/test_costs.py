"""What a round costs besides the work: time, and bytes on the wire."""

from __future__ import annotations

import socket
import threading
from statistics import median

import pytest
import torch

from fedloom.deploy.measure import measure
from fedloom.errors import InputError
from tests.deploy.federation import Federation, free_port, together

pytest.importorskip("flwr")


class Proxy:
    """Passes connections on and counts every byte in both directions."""

    def __init__(self, target: int) -> None:
        self.port, self.target, self.bytes = free_port(), target, 0
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for one, two in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, two), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(2**16):
                self.bytes += len(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()


@pytest.mark.slow
def test_traffic_on_the_wire_is_what_the_ledger_counts(tmp_path):
    federation = Federation(tmp_path, model={"name": "cnn"}, run={"rounds": 3}, train={"steps": 2})
    proxy = Proxy(federation.port)
    result, _ = together(federation, server=[f"127.0.0.1:{proxy.port}"] * 3)
    counted = sum(row["upload_bytes"] + row["download_bytes"] for row in result.rows("clients"))
    assert counted > 10**7
    assert counted < proxy.bytes < 1.05 * counted, (counted, proxy.bytes)


@pytest.mark.slow
def test_a_round_without_work_takes_less_than_three_seconds(tmp_path):
    sections = {"model": {"name": "lenet5"}, "run": {"rounds": 8}, "train": {"steps": 1}, "evaluate": {"every": 8}}
    federation = Federation(tmp_path, **sections)
    try:
        server = federation.serve()
        for number in range(3):
            federation.join(number)
        assert federation.finish(server) == 0
        seconds = [row["seconds"] for row in federation.rounds()][1:]
        assert median(seconds) < 3, seconds
    finally:
        federation.close()


def test_a_capacity_is_what_fits():
    whole = measure("lenet5", (1, 28, 28), 10, samples=100, memory=2**30)
    assert whole.capacity == 1
    # Parameters some times over, and what lenet5 saves: two maps before and after each ReLU and pooling, 32 times.
    assert 3 * 61_706 * 4 < whole.training_bytes < 8 * 61_706 * 4 + 32 * 44_944
    less = measure("lenet5", (1, 28, 28), 10, samples=100, memory=whole.training_bytes // 2)
    assert 0 < less.capacity < 1
    assert less.training_bytes <= whole.training_bytes // 2
    with pytest.raises(InputError, match="cannot train even"):
        measure("lenet5", (1, 28, 28), 10, samples=100, memory=1000)


def test_a_capacity_is_written_into_the_settings(tmp_path):
    file = tmp_path / "client.toml"
    file.write_text('name = "one"\ncapacity = 0.5\n')
    found = measure("mlp", (1, 8, 8), 10, samples=10, memory=2**30)
    found.write(file)
    assert file.read_text() == 'name = "one"\ncapacity = 1.0\n'


def test_speed_is_that_of_a_client_and_of_a_typical_step(monkeypatch):
    """One thread, after steps that do not count, by the median: one step that was disturbed changes nothing."""
    threads, step = [], torch.optim.SGD.step
    clock, ticks = [0.0], iter([9.0, 9.0, 9.0, 0.01, 5.0, *[0.01] * 1000])

    def watched(optimizer, *given):
        threads.append(torch.get_num_threads())
        clock[0] += next(ticks)
        return step(optimizer, *given)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    monkeypatch.setattr("fedloom.deploy.measure.perf_counter", lambda: clock[0])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = measure("mlp", (1, 8, 8), 10, samples=320, memory=2**30)
    finally:
        assert torch.get_num_threads() == 2, "as it was"
        torch.set_num_threads(before)
    assert set(threads) == {1}
    assert found.seconds_per_epoch == pytest.approx(10 * 0.01), "ten batches"
