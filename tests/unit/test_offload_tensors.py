"""Tensors that go to the host and come back: every number, every view, and an error for who wants them meanwhile."""

import pytest
import torch

from hacpo_mega.megatron.train.offload import Offload, Where


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return drawn((6,), (3, 4), (1,))


@pytest.fixture
def offload(tensors) -> Offload:
    return Offload(tensors)


def go(offload: Offload) -> None:
    offload.start_leaving()
    offload.finish_leaving()


def test_numbers_come_back_to_where_they_were_under_every_view(tensors, offload):
    views = [tensor.view(-1)[:1] for tensor in tensors]
    for trip in range(2):
        expected = [tensor.clone() for tensor in tensors]
        go(offload)
        assert [tensor.numel() for tensor in tensors] == [0, 0, 0]
        assert [view.untyped_storage().nbytes() for view in views] == [0, 0, 0], "the memory was not given back"
        offload.start_returning()
        offload.require_home()
        assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, expected, strict=True))
        for tensor, view in zip(tensors, views, strict=True):
            tensor.add_(trip + 1)
            assert view.data_ptr() == tensor.data_ptr() and torch.equal(view, tensor.view(-1)[:1])


def test_the_host_holds_each_number_once(tensors, offload):
    expected = [tensor.clone() for tensor in tensors]
    go(offload)
    copies = [offload.readable(tensor) for tensor in tensors]
    assert all(torch.equal(copy, then) for copy, then in zip(copies, expected, strict=True))
    assert copies[0].untyped_storage().nbytes() == 4 * (6 + 12 + 1)
    offload.start_returning()
    assert all(offload.readable(tensor) is copy for tensor, copy in zip(tensors, copies, strict=True))
    offload.require_home()
    assert all(offload.readable(tensor) is tensor for tensor in tensors)


def test_what_does_not_leave_is_read_where_it_is(offload):
    (other,) = drawn((2,))
    go(offload)
    assert offload.readable(other) is other


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.add_(torch.ones(6)),
        lambda tensor: torch.ones(6).copy_(tensor),
        lambda tensor: tensor.copy_(torch.ones(6)),
        lambda tensor: tensor[2:6].view(2, 2),
        lambda tensor: setattr(tensor, "grad", torch.ones(6)),
    ],
    ids=["a gradient to a moment", "a main weight to a weight", "from a checkpoint", "to a checkpoint", "a gradient"],
)
def test_use_while_away_is_an_error(tensors, offload, use):
    go(offload)
    with pytest.raises(RuntimeError):
        use(tensors[0])


def test_nobody_waits_for_what_was_not_called_back(offload):
    offload.start_leaving()
    with pytest.raises(RuntimeError, match=r"on its way to the host: start_returning\(\) comes before its use"):
        offload.require_home()
    offload.finish_leaving()
    with pytest.raises(RuntimeError, match="is in host memory"):
        offload.require_home()


def test_a_second_call_changes_nothing(tensors, offload):
    expected = [tensor.clone() for tensor in tensors]
    offload.finish_leaving()
    offload.start_returning()
    offload.require_home()
    assert offload.where is Where.HOME
    offload.start_leaving()
    offload.start_leaving()
    offload.start_returning()
    assert offload.where is Where.LEAVING
    offload.finish_leaving()
    offload.start_leaving()
    assert offload.where is Where.AWAY
    offload.start_returning()
    offload.start_leaving()  # nobody has used them: they turn around
    assert offload.where is Where.LEAVING
    assert all(torch.equal(offload.readable(tensor), then) for tensor, then in zip(tensors, expected, strict=True))


def test_of_nothing_nothing_leaves():
    offload = Offload(())
    go(offload)
    offload.require_home()
    assert offload.where is Where.HOME


def test_a_part_of_a_storage_cannot_leave(tensors):
    with pytest.raises(AssertionError):
        Offload([tensors[0][:3]])


def test_where_there_is_no_room_to_return_nothing_is_taken(offload, tensors, monkeypatch):
    """As on a device that is full: half of the memory would be nobody's."""
    expected, homes = [tensor.clone() for tensor in tensors], offload._at_home
    go(offload)
    resize = torch.UntypedStorage.resize_

    def full(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if size == homes[1].nbytes:
            raise torch.OutOfMemoryError("full")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(torch.OutOfMemoryError):
        offload.start_returning()
    assert [home.untyped_storage().nbytes() for home in homes] == [0, 0, 0]
    assert offload.where is Where.AWAY
    monkeypatch.undo()
    offload.start_returning()
    offload.require_home()
    assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, expected, strict=True))
