"""Whose model reaches whom: rings, circles, graphs, and who is absent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import InputError
from fedloom.policies.topology import Chain, Graph, Ring, metropolis
from tests.cli.conftest import SMALL, command  # noqa: F401 (a fixture)
from tests.distillation.test_ring import VALID
from tests.methods.tiny import run, study_of, world

SHAPES = ["complete", "ring", "torus", "regular"]
some_members = st.sets(st.integers(0, 60), min_size=1, max_size=24).map(sorted)


def matrix(graph: Graph, members) -> np.ndarray:
    """Who is whose neighbour, by place."""
    place = {member: number for number, member in enumerate(members)}
    found = np.zeros((len(members), len(members)), int)
    (edges,) = graph.stages(0, members)
    for one, two in edges:
        if one != two:
            found[place[one], place[two]] += 1
    return found


def connected(near: np.ndarray) -> bool:
    reached = np.linalg.matrix_power(np.eye(len(near)) + near, len(near))
    return bool((reached > 0).all())


def test_a_ring_turns_around_every_round():
    forward, back = [(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 3), (1, 0), (2, 1), (3, 2)]
    for round in range(6):
        assert Ring().stages(round, range(4)) == [forward if round % 2 == 0 else back] * 3
        assert Ring("clockwise").stages(round, range(4)) == [forward] * 3
        assert Ring("counter").stages(round, range(4)) == [back] * 3


def test_a_ring_skips_who_is_absent():
    assert Ring().stages(0, [0, 2, 3]) == [[(0, 2), (2, 3), (3, 0)]] * 2
    assert Ring().stages(0, [1, 4]) == [[(1, 4), (4, 1)]]
    assert Ring().stages(0, [4]) == []


def test_a_chain_goes_one_by_one():
    assert Chain().stages(0, [0, 1, 2]) == [[(0, 0)], [(0, 1)], [(1, 2)]]
    assert Chain().stages(3, [0, 1, 2]) == [[(2, 0)], [(0, 1)], [(1, 2)]]
    assert Chain().stages(3, [0, 2]) == [[(2, 0)], [(0, 2)]]


@given(some_members, st.sampled_from(SHAPES), st.integers(2, 6), st.integers(0, 3))
def test_graphs_are_symmetric_simple_and_connected(members, shape, degree, seed):
    near = matrix(Graph(shape, degree, seed=seed), members)
    assert (near == near.T).all()
    assert near.max(initial=0) <= 1
    assert connected(near)


@pytest.mark.parametrize(("shape", "count", "degrees"), [
    ("complete", 5, {4}), ("ring", 5, {2}), ("ring", 2, {1}), ("torus", 9, {4}), ("torus", 12, {4}), ("torus", 4, {2}),
    ("torus", 7, {2}), ("regular", 8, {3}), ("regular", 9, {2}), ("regular", 3, {2}), ("regular", 1, {0}),
])  # fmt: skip
def test_degrees(shape, count, degrees):
    assert set(matrix(Graph(shape, 3), range(count)).sum(1).tolist()) == degrees


def test_regular_graphs_differ_by_seed_and_stay_the_same_by_round():
    graphs = [Graph("regular", 3, seed=seed) for seed in range(5)]
    assert len({str(graph.stages(0, range(10))) for graph in graphs}) > 1
    assert graphs[0].stages(0, range(10)) == graphs[0].stages(7, range(10))


def test_listed_edges_and_who_is_absent():
    star = Graph("edges", edges=((0, 1), (0, 2), (0, 3)))
    assert matrix(star, range(4)).sum(1).tolist() == [3, 1, 1, 1]
    # the one in the middle is gone: those around it are joined in a circle
    assert matrix(star, [1, 2, 3]).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    path = Graph("edges", edges=((0, 1), (1, 2), (2, 3)))
    assert path.stages(0, [0, 3]) == [[(0, 3), (3, 0)]]
    # whoever has no edge works alone
    assert path.stages(0, [0, 1, 9]) == [[(0, 1), (1, 0), (9, 9)]]


def test_wrong_graphs_are_refused():
    with pytest.raises(InputError, match=r"topology\.edges goes with shape 'edges'"):
        study_of("gossip", topology={"shape": "edges"})
    with pytest.raises(InputError, match="pairs of different client numbers"):
        study_of("gossip", topology={"shape": "edges", "edges": [[1, 1]]})
    with pytest.raises(InputError, match="averages over a graph"):
        study_of("gossip", topology={"name": "ring"})
    with pytest.raises(InputError, match="cannot run under a cut"):
        study_of("fedrkd", cut={"name": "prefix"})
    with pytest.raises(InputError, match="objective is features or soft; got 'cross_entropy'"):
        study_of("fedrkd", objective={"name": "cross_entropy"})
    for topology in ({"name": "graph"}, {"name": "graph", "shape": "ring"}):
        with pytest.raises(InputError, match=r"one teacher at a time; got topology 'graph', allowed: chain, ring"):
            study_of("metafed", topology=topology)
    assert study_of("metafed", topology={"name": "ring"}).topology.name == "ring"
    assert study_of("gossip", topology={"shape": "edges", "edges": [[0, 1], [1, 2]]}).topology.fields


def test_edges_to_clients_that_do_not_exist_are_refused(command, tmp_path):  # noqa: F811
    """A ring that counts from 1 would leave client 0 alone and drop its last member without a word."""
    words = [*SMALL, "--clients", 3, "--set", "topology.shape=edges"]
    ended = command("run", "gossip", *words, "--set", "topology.edges=[[1, 2], [2, 3], [3, 1], [4, 2]]")
    assert ended.sentence() == "topology.edges name client(s) 3, 4, but 3 clients are numbered 0 to 2"
    assert not list(tmp_path.glob("runs/*")), "before the run"
    world("gossip", topology={"shape": "edges", "edges": [[0, 1], [1, 2], [2, 0]]}).check()


def test_a_graph_in_parts_is_told_once(command, caplog):  # noqa: F811
    words = [*SMALL, "--clients", 6, "--set", "topology.shape=edges", "--set", "topology.edges=[[0, 1], [2, 3]]"]
    ended = command("run", "gossip", *words)
    assert ended.code == 0, ended.err
    assert caplog.messages == [
        "topology.edges: client(s) 4 and 5 have no neighbour and train alone",
        "topology.edges: these 2 groups never hear of each other: 0 and 1; 2 and 3",
    ]


def test_who_has_no_neighbour_sends_nothing(tmp_path):
    """Whoever is heard of by somebody, now or when the next round begins, sends; a client alone never does."""
    edges = {"shape": "edges", "edges": [[0, 1]]}
    sent = uploads(run("gossip", tmp_path / "edges", topology=edges, run={"rounds": 2}))
    assert all((size == 0) == (client == 2) for (client, *_), size in sent.items())
    for method, study in (("gossip", {}), ("fedrkd", VALID), ("metafed", VALID)):
        alone = run(method, tmp_path / method, fleet={"clients": 1}, run={"rounds": 2}, **study)
        assert set(uploads(alone).values()) == {0}, method
    assert all(uploads(run("metafed", tmp_path / "circle", run={"rounds": 2}, **VALID)).values())


def uploads(result):
    return {
        (row["client"], row["round"], row["stage"]): row["upload_bytes"]
        for row in result.rows("clients")
        if row["job"] == "work"
    }


@given(st.integers(2, 14), st.sampled_from(SHAPES))
def test_metropolis_weights_keep_the_mean(count, shape):
    """Rows and columns add up to 1, nothing is negative; mixing again and again ends in agreement."""
    near = matrix(Graph(shape, 3), range(count))
    degrees, weights = near.sum(1), np.zeros((count, count))
    for one in range(count):
        mine = metropolis(int(degrees[one]), {int(two): int(degrees[two]) for two in np.flatnonzero(near[one])})
        for two, weight in mine.items():
            weights[one, two] = weight
        weights[one, one] = 1 - sum(mine.values())
    assert (weights > -1e-12).all()
    assert np.allclose(weights.sum(0), 1)
    assert np.allclose(weights.sum(1), 1)
    values = np.random.default_rng(count).normal(size=count)
    assert np.allclose(np.linalg.matrix_power(weights, 4000) @ values, values.mean())
