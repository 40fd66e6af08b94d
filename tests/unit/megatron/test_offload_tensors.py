"""Tensors that go to the host and come back: every number, every view, and an error for who wants them meanwhile."""

import pytest
import torch

from hacpo_mega.megatron.train.offload import Offload, Residence


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
    offload.begin_offload()
    offload.finish_offload()


def test_numbers_come_back_to_where_they_were_under_every_view(tensors, offload):
    views = [tensor.view(-1)[:1] for tensor in tensors]
    for trip in range(2):
        expected = [tensor.clone() for tensor in tensors]
        go(offload)
        assert [tensor.numel() for tensor in tensors] == [0, 0, 0]
        assert [view.untyped_storage().nbytes() for view in views] == [0, 0, 0], "the memory was not given back"
        offload.begin_onload()
        offload.ensure_on_device()
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
    offload.begin_onload()
    assert all(offload.readable(tensor) is copy for tensor, copy in zip(tensors, copies, strict=True))
    offload.ensure_on_device()
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
    offload.begin_offload()
    with pytest.raises(RuntimeError, match=r"on its way to the host: begin_onload\(\) comes before its use"):
        offload.ensure_on_device()
    offload.finish_offload()
    with pytest.raises(RuntimeError, match="is in host memory"):
        offload.ensure_on_device()


def test_a_second_call_changes_nothing(tensors, offload):
    expected = [tensor.clone() for tensor in tensors]
    offload.finish_offload()
    offload.begin_onload()
    offload.ensure_on_device()
    assert offload.residence is Residence.ON_DEVICE
    offload.begin_offload()
    offload.begin_offload()
    offload.begin_onload()
    assert offload.residence is Residence.OFFLOADING
    offload.finish_offload()
    offload.begin_offload()
    assert offload.residence is Residence.ON_HOST
    offload.begin_onload()
    offload.begin_offload()  # nobody has used them: they turn around
    assert offload.residence is Residence.OFFLOADING
    assert all(torch.equal(offload.readable(tensor), then) for tensor, then in zip(tensors, expected, strict=True))


def test_of_nothing_nothing_leaves():
    offload = Offload(())
    go(offload)
    offload.ensure_on_device()
    assert offload.residence is Residence.ON_DEVICE


def test_a_part_of_a_storage_cannot_leave(tensors):
    with pytest.raises(AssertionError):
        Offload([tensors[0][:3]])


def test_where_there_is_no_room_to_return_nothing_is_taken(offload, tensors, monkeypatch):
    """As on a device that is full: half of the memory would be nobody's."""
    expected, homes = [tensor.clone() for tensor in tensors], offload._originals
    go(offload)
    resize = torch.UntypedStorage.resize_

    def full(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if size == homes[1].nbytes:
            raise torch.OutOfMemoryError("full")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(torch.OutOfMemoryError):
        offload.begin_onload()
    assert [home.untyped_storage().nbytes() for home in homes] == [0, 0, 0]
    assert offload.residence is Residence.ON_HOST
    monkeypatch.undo()
    offload.begin_onload()
    offload.ensure_on_device()
    assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("with_state", [False, True])
def test_scratch_is_freed_and_taken_back_without_a_copy(tensors, with_state, monkeypatch):
    """By hand, in float32: 5 numbers of scratch beside 6 + 12 + 1 of state. Copies are counted."""
    (scratch,) = drawn((5,))
    offload, copied = Offload(tensors if with_state else (), scratch=[scratch]), []
    home, view = scratch.detach(), scratch[1:]  # as a bucket and a parameter see a gradient buffer
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, out_of: (copied.extend(into), copy(into, out_of)))
    for _ in range(2):
        go(offload)
        assert scratch.numel() == home.untyped_storage().nbytes() == 0 and offload.residence is Residence.ON_HOST
        assert sum(tensor.numel() for tensor in tensors) == (0 if with_state else 19)
        assert sum(offload.readable(tensor).numel() for tensor in tensors) == 19
        offload.begin_onload()
        assert scratch.shape == (5,) and home.untyped_storage().nbytes() == 20, "before anyone waits for the state"
        offload.ensure_on_device()
        scratch.zero_()
        assert not view.any() and offload.residence is Residence.ON_DEVICE
    assert len(copied) == (12 if with_state else 0)
