"""The optimiser's step and Polyak averaging, against torch's own."""

import copy

import torch
from torch import Tensor, nn

from sansac.optimizer import Adam, averaged, polyak


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for i in range(start, start + steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        net(torch.randn(7, 3)).square().sum().backward()
        optimizer.step()


def groups(net: nn.Sequential) -> list[tuple[list[Tensor], float]]:
    return [([*net[0].parameters(), *net[1].parameters()], 1e-2), ([*net[2].parameters()], 3e-2)]


def torchs(net: nn.Sequential) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": p, "lr": lr} for p, lr in groups(net)], fused=True)


def assert_equal(net: nn.Module, other: nn.Module) -> None:
    for key, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_steps_are_those_of_torchs_adam_with_rates_by_group() -> None:
    ours, theirs = network(), network()
    train(ours, Adam(groups(ours)), 20)
    train(theirs, torchs(theirs), 20)
    assert_equal(ours, theirs)


def test_a_rate_changed_between_steps_counts() -> None:
    ours, theirs = network(), network()
    for net, optimizer in ((ours, Adam(groups(ours))), (theirs, torchs(theirs))):
        train(net, optimizer, 3)
        optimizer.param_groups[0]["lr"] = 0.5
        train(net, optimizer, 3, start=3)
    assert_equal(ours, theirs)


def test_state_goes_to_torchs_adam_and_back() -> None:
    ours, theirs = network(), network()
    first = Adam(groups(ours))
    train(ours, first, 5)
    theirs.load_state_dict(ours.state_dict())
    second = torchs(theirs)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(theirs, second, 5, start=5)
    again = network()
    again.load_state_dict(ours.state_dict())
    third = Adam(groups(again))
    train(again, third, 2)  # lists of its own, which the loaded state must replace
    again.load_state_dict(ours.state_dict())
    third.load_state_dict(copy.deepcopy(first.state_dict()))
    train(again, third, 5, start=5)
    assert_equal(again, theirs)


def test_a_copy_steps_on_its_own_tensors() -> None:
    ours = network()
    optimizer = Adam(groups(ours))
    train(ours, optimizer, 2)
    before = copy.deepcopy(ours)
    other, its_own = copy.deepcopy((ours, optimizer))
    train(other, its_own, 3, start=2)
    assert_equal(ours, before)
    train(ours, optimizer, 3, start=2)
    assert_equal(ours, other)


def test_polyak_moves_parameters_and_statistics_and_counts_nothing() -> None:
    slow, online = network(), network()
    for tensor in averaged(online):
        nn.init.constant_(tensor, 3.0)
    expected = {k: 0.75 * v + 0.75 for k, v in slow.state_dict().items() if v.is_floating_point()}
    assert "1.running_var" in expected
    polyak(averaged(slow), averaged(online), 0.25)
    for key, value in expected.items():
        torch.testing.assert_close(slow.state_dict()[key], value)
