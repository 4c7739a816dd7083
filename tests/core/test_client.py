"""A client's batches, its own tensors, and the versions of its state."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom import wire
from fedloom.engine.states import States
from fedloom.types import NEVER, Samples, Train
from tests.core.small import Normed, client_of, images_of, network_of

NETWORK, IMAGES = network_of(Normed), images_of(100)


def planned(rows, **train):
    return client_of(rows, NETWORK, IMAGES, train=Train(**train))


def flat(steps, part=0):
    return [int(row) for step in steps for row in step[part]]


@given(st.integers(1, 40), st.integers(2, 12), st.integers(1, 3))
@settings(deadline=None)
def test_every_epoch_is_a_permutation(count, size, epochs):
    rows = list(range(50, 50 + count))
    plan = planned(rows, batch_size=size, epochs=epochs).plan()
    assert len(plan.steps) == epochs * plan.epoch
    for epoch in range(epochs):
        steps = plan.steps[epoch * plan.epoch : (epoch + 1) * plan.epoch]
        assert sorted(flat(steps)) == (rows * 2 if count == 1 else rows)  # norm layers need two, so it is seen twice
        sizes = [len(step[0]) for step in steps]
        # all full, but for a short last one; a single left-over sample joins the batch before it
        assert all(each == size for each in sizes[:-1])
        assert sizes[-1] == (
            max(2, count) if count <= size else size + 1 if count % size == 1 else count % size or size
        )


def test_epochs_clients_and_rounds_are_shuffled_differently():
    plan = planned(range(40), batch_size=8, epochs=2).plan()
    assert flat(plan.steps[:5]) != flat(plan.steps[5:])
    others = [client_of(range(40), NETWORK, IMAGES, train=Train(batch_size=8), **task).plan()
              for task in ({"client": 1}, {"round": 1}, {"stage": 1})]  # fmt: skip
    orders = [flat(plan.steps[:5]), *(flat(other.steps) for other in others)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({plan.seed, *(other.seed for other in others)}) == 4


@pytest.mark.parametrize(("count", "sizes"), [(6, (2, 2, 2)), (16, (6, 5, 5)), (24, (8, 8, 8)), (5, (5, 5, 5))])
def test_batches_of_a_step_share_no_sample_as_long_as_there_are_two_for_each(count, sizes):
    client = planned(range(count), batch_size=8)
    (step,) = client.plan((client.train,) * 3).steps
    assert tuple(map(len, step)) == sizes
    assert len(set(torch.cat(step).tolist())) == min(sum(sizes), count)


def test_a_plan_is_the_same_every_time_it_is_drawn():
    one, two = (planned(range(20), batch_size=8).plan() for _ in range(2))
    assert flat(one.steps) == flat(two.steps)
    assert one.seed == two.seed


def test_steps_instead_of_epochs():
    plan = planned(range(10), batch_size=4, steps=7, epochs=3).plan()
    assert len(plan.steps) == 7
    assert plan.epoch == 3
    assert Counter(flat(plan.steps[:3])) == Counter(range(10)) == Counter(flat(plan.steps[3:6]))
    assert planned(range(10), batch_size=4, steps=2).plan().epoch == 2


def test_batches_of_one_stay_batches_of_one_if_that_is_what_was_asked_for():
    plan = planned(range(5), batch_size=1).plan()
    assert [len(step[0]) for step in plan.steps] == [1, 1, 1, 1, 1]


def test_two_parts_give_a_batch_each_and_the_shorter_starts_again():
    client = planned(range(20), batch_size=5)
    other = Samples(IMAGES, torch.arange(60, 67))
    plan = client.plan([client.train, other])
    assert len(plan.steps) == 4
    assert sorted(flat(plan.steps, 0)) == list(range(20))
    assert sorted(flat(plan.steps[:2], 1)) == list(range(60, 67)) == sorted(flat(plan.steps[2:], 1))


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_part_beside_an_augmented_one_keeps_its_own_images(epochs):
    """The first part's copies are turned over; the other's images are as they were, with their labels."""
    client = planned(range(20), batch_size=5, epochs=epochs)
    augmented = replace(client.train, augment=lambda x, generator: x.flip(-1))
    other = Samples(IMAGES, torch.arange(60, 67))
    plan = client.plan([augmented, other])
    pixels = {image.numpy().tobytes(): number for number, image in enumerate(IMAGES.x.float())}
    for first, second in plan.steps:
        turned = [pixels[image.flip(-1).float().numpy().tobytes()] for image in plan.images.x[first]]
        left = [pixels[image.float().numpy().tobytes()] for image in plan.images.x[second]]
        assert set(turned) <= set(range(20))
        assert set(left) <= set(range(60, 67))
        assert torch.equal(plan.images.y[first], IMAGES.y[turned])
        assert torch.equal(plan.images.y[second], IMAGES.y[left])


@pytest.mark.parametrize("count", [40, 36, 20, 24, 30, 33])
def test_the_same_part_twice_gives_disjoint_batches(count):
    client = planned(range(count), batch_size=8, epochs=3)
    plan = client.plan([client.train, client.train])
    for one, two in plan.steps:
        assert not set(one.tolist()) & set(two.tolist())


def test_variants_are_all_drawn_and_leave_the_batches_as_they_are():
    client = planned(range(100), batch_size=2, epochs=4)
    plan = client.plan(variants=3)
    assert set(plan.variants) == {0, 1, 2}
    assert len(plan.variants) == len(plan.steps)
    assert flat(plan.steps) == flat(client.plan().steps)
    assert set(client.plan().variants) == {0}


def test_a_client_without_samples_says_so():
    with pytest.raises(ValueError, match="client 0 has no samples"):
        planned([]).plan()


def test_classes_are_those_of_the_training_part():
    client = planned([int(row) for row in (IMAGES.y == 2).nonzero()[:4]])
    assert client.classes.tolist() == [2]


def test_own_tensors_start_as_the_common_ones():
    client = client_of(range(4), NETWORK)
    own = client.own(frozenset({"norm.weight", "last.bias"}))
    first = NETWORK.initial(7)
    assert own.keys() == {"norm.weight", "last.bias"}
    assert all(torch.equal(tensor, first[name]) for name, tensor in own.items())
    assert client.state == {}


def test_what_is_kept_is_its_own_from_then_on():
    client = client_of(range(4), NETWORK)
    client.keep({"last.bias": torch.full((3,), 5.0)})
    client.keep({"norm.weight": torch.full((4,), 6.0)})
    own = client.own(frozenset({"last.bias", "norm.weight", "norm.bias"}))
    assert own["last.bias"].tolist() == [5.0] * 3
    assert own["norm.weight"].tolist() == [6.0] * 4
    assert torch.equal(own["norm.bias"], NETWORK.initial(7)["norm.bias"])


def test_a_cut_version_is_kept_at_full_size():
    client, first = client_of(range(4), NETWORK), NETWORK.initial(7)
    client.keep({"first.bias": torch.tensor([1.0, 2.0])}, {"first": torch.tensor([0, 2])})
    before = client.state["own"]
    assert torch.equal(
        before["first.bias"],
        torch.stack([torch.tensor(1.0), first["first.bias"][1], torch.tensor(2.0), first["first.bias"][3]]),
    )
    kept = before["first.bias"].clone()
    client.keep({"first.bias": torch.tensor([9.0])}, {"first": torch.tensor([3])})
    assert client.state["own"]["first.bias"].tolist() == [*kept[:3].tolist(), 9.0]
    assert torch.equal(before["first.bias"], kept), "an entry was changed in place"


def state(value):
    return {"own": {"a": torch.tensor([float(value)])}}


def value_of(loaded):
    return float(loaded["own"]["a"]) if loaded else None


def test_a_version_counts_only_once_it_was_accepted():
    states = States()
    assert states.load(3, NEVER) == {}
    states.propose(3, (0, 0), state(1))
    states.propose(4, (0, 0), state(9))
    assert value_of(states.load(3, (0, 0))) == 1
    states.propose(3, (1, 0), state(2))
    # the report of round 1 never counted: its version is dropped, and stays away when round 2 counts
    assert value_of(states.load(3, (0, 0))) == 1
    assert value_of(states.load(3, (2, 0))) == 1
    assert value_of(states.load(4, (5, 3))) == 9


def test_a_first_version_that_never_counted_leaves_nothing():
    states = States()
    states.propose(3, (0, 0), state(1))
    assert states.load(3, NEVER) == {}
    assert states.load(3, (0, 0)) == {}


def test_stages_are_moments_of_their_own():
    states = States()
    for stage in range(3):
        states.propose(0, (1, stage), state(stage))
    assert value_of(states.load(0, (1, 1))) == 1
    assert value_of(states.load(0, (2, 0))) == 1


def test_loading_gives_a_copy_to_write_to():
    states = States()
    states.propose(0, (0, 0), state(1))
    loaded = states.load(0, (0, 0))
    loaded["own"] = None
    assert value_of(states.load(0, (0, 0))) == 1


def test_checkpoint_writes_what_was_accepted_and_forgets_what_is_older(tmp_path):
    states = States()
    for round in range(3):
        states.propose(1, (round, 0), state(round))
    states.propose(2, (0, 0), state(7))  # never accepted
    files = states.checkpoint(tmp_path, {1: (1, 0), 2: NEVER})
    assert list(files) == ["1"]
    assert [path.name for path in tmp_path.iterdir()] == list(files.values())
    assert value_of(wire.load(tmp_path / files["1"])) == 1
    assert value_of(states.load(1, (2, 0))) == 2, "a version newer than the checkpoint must stay"
    assert value_of(states.load(1, (1, 0))) == 1
    assert value_of(states.load(1, (0, 0))) is None, "older than the checkpoint: nobody may ask for it again"


def test_versions_are_kept_back_to_the_last_checkpoint():
    states = States()
    for round in range(5):
        states.propose(1, (round, 0), state(round))
        states.load(1, (round, 0))
    assert value_of(states.load(1, (1, 0))) == 1


def test_without_history_a_client_has_two_versions_at_most(tmp_path):
    """The one that counts, and the one that counts again if the round under way is never finished."""
    states = States(history=False)
    for round in range(5):
        states.propose(1, (round, 0), state(round))
        states.propose(1, (round, 1), state(10 + round))
        assert value_of(states.load(1, (round, 1))) == 10 + round
        assert len(states._versions[1]) <= 2
    states.propose(1, (5, 0), state(5))
    assert value_of(states.load(1, (5, 0))) == 5, "accepted in a stage of a round that is then interrupted"
    files = states.checkpoint(tmp_path, {1: (4, 1)})
    assert value_of(wire.load(tmp_path / files["1"])) == 14
    assert value_of(states.load(1, (4, 1))) == 14


def test_restored_states_are_read_when_needed_and_written_once(tmp_path):
    states, again = States(), States()
    states.propose(1, (0, 0), state(1))
    states.propose(2, (0, 1), state(2))
    files = states.checkpoint(tmp_path, {1: (0, 0), 2: (0, 1)})
    again.restore(tmp_path, files)
    assert value_of(again.load(1, (0, 0))) == 1
    assert value_of(again.load(2, (0, 1))) == 2
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert again.checkpoint(tmp_path, {1: (0, 0), 2: (4, 0)}) == files
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_a_file_left_by_a_killed_checkpoint_does_not_stand_for_another_version(tmp_path):
    """Killed after a client's file and before the manifest; the round was then done again and came out differently."""
    states, again = States(), States()
    states.propose(1, (0, 0), state(1))
    states.checkpoint(tmp_path, {1: (0, 0)})
    again.propose(1, (0, 0), state(2))
    files = again.checkpoint(tmp_path, {1: (0, 0)})
    assert value_of(wire.load(tmp_path / files["1"])) == 2


def steps_of(number: int, train: Train, **task) -> int:
    return len(client_of(range(40), train=train, client=number, **task).plan().steps)


def test_uneven_work_is_each_clients_draw_anew_in_every_round():
    train = Train(batch_size=10, epochs=5, uneven=1.0, least=2)
    done = [[steps_of(number, train, round=round) for number in range(60)] for round in range(2)]
    assert {steps for row in done for steps in row} == {8, 12, 16, 20}  # two to five epochs of four batches
    assert done[0] != done[1]
    assert done[0] == [steps_of(number, train, round=0) for number in range(60)]


def test_a_share_of_the_clients_does_less():
    even, uneven = Train(batch_size=10, epochs=4), Train(batch_size=10, epochs=4, uneven=0.5)
    done = [steps_of(number, uneven) for number in range(400)]
    less = sum(steps < 16 for steps in done) / 400  # three of four amounts are less than all
    assert abs(less - 0.5 * 0.75) < 4 * (0.375 * 0.625 / 400) ** 0.5
    assert {steps_of(number, even) for number in range(20)} == {16}
    assert {steps_of(number, Train(batch_size=10, steps=3, uneven=1.0)) for number in range(40)} == {1, 2, 3}


def test_the_batches_of_who_does_less_are_the_first_of_those_of_all():
    """What is trained on depends on the amount in nothing but its length."""
    all_of_it, less = (
        client_of(range(40), train=Train(batch_size=10, epochs=6, uneven=share), round=1, client=5).plan().steps
        for share in (0.0, 1.0)
    )
    assert len(less) < len(all_of_it)
    assert all(torch.equal(one, two) for (one,), (two,) in zip(all_of_it, less, strict=False))
