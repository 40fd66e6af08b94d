"""A stored state whose index somebody else has made: nothing of it runs, and what does not fit is said in one line."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile_pickles import broken, touching
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from hacpo_mega.megatron.checkpoint.stored_state import Part, StateReader, write_parts

WHOLE = torch.arange(24.0).reshape(6, 4)
# As two ranks of another layout hold it: three rows, and of the others the columns apart.
PARTS = {
    "param.w": [
        Part((6, 4), (0, 0), WHOLE[:3].clone()),
        Part((6, 4), (3, 0), WHOLE[3:, :1].clone()),
        Part((6, 4), (3, 1), WHOLE[3:, 1:].clone()),
    ],
    "exp_avg.b": [Part((5,), (0,), torch.full((5,), torch.pi))],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    write_parts(PARTS, tmp_path / "state")
    return tmp_path / "state"


def read(folder: Path, name: str = "param.w", shape: tuple[int, ...] = (6, 4)) -> torch.Tensor:
    found = torch.full(shape, torch.nan)
    StateReader(folder).read({name: [Part(shape, (0,) * len(shape), found)]})
    return found


def test_what_was_written_is_read(folder: Path) -> None:
    assert torch.equal(read(folder), WHOLE)
    assert torch.equal(read(folder, "exp_avg.b", (5,)), PARTS["exp_avg.b"][0].data)
    assert sorted(file.name for file in folder.iterdir()) == [".metadata", "__0_0.distcp"]


def test_a_state_that_torchs_own_save_has_written_is_read(tmp_path: Path) -> None:
    """As all checkpoints were until its object collectives were left out."""
    tensors = {"param.w": WHOLE.clone(), "exp_avg.b": torch.randn(5)}
    for flatten in (False, True):  # with torch's own planner data, which nobody here asks for
        writer = FileSystemWriter(tmp_path / str(flatten))
        checkpoint.save(tensors, storage_writer=writer, planner=DefaultSavePlanner(flatten), no_dist=True)
    assert torch.equal(read(tmp_path / "False"), WHOLE)
    assert torch.equal(read(tmp_path / "False", "exp_avg.b", (5,)), tensors["exp_avg.b"])


def test_torch_reads_what_is_written(folder: Path) -> None:
    """The format is torch's, index and all."""
    tensors = {"param.w": torch.zeros(6, 4), "exp_avg.b": torch.zeros(5)}
    checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    assert torch.equal(tensors["param.w"], WHOLE) and torch.equal(tensors["exp_avg.b"], PARTS["exp_avg.b"][0].data)


@pytest.mark.parametrize("way", [*touching(Path("file")), *broken()])
def test_an_index_that_does_something_is_refused_by_name(way: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "touched"
    (folder / ".metadata").write_bytes((touching(file) | broken())[way])
    with pytest.raises(ValueError, match=rf"^{folder}/.metadata is no index of a stored state: [ -~]+$"):
        StateReader(folder)
    assert not file.exists()


def changed(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """Rewrites an index, as somebody who has this program would."""

    def harm(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        change(index)
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return harm


def placed(**fields: object) -> Callable[[Path], None]:
    def change(index: Metadata) -> None:
        for item, place in index.storage_data.items():
            index.storage_data[item] = _StorageInfo(**vars(place) | fields)

    return changed(change)


def of_tensor(**fields: object) -> Callable[[Path], None]:
    return changed(lambda index: vars(index.state_dict_metadata["param.w"]).update(fields))


class Path_(os.PathLike):
    def __fspath__(self) -> str:
        return "__0_0.distcp"


LIES = {
    "a file above": (placed(relative_path="../../secret"), "it leads to '../../secret', which is no file of"),
    "a file of the machine": (placed(relative_path="/etc/passwd"), "it leads to '/etc/passwd'"),
    "a device": (placed(relative_path="/dev/zero"), "it leads to '/dev/zero'"),
    "a file beside": (placed(relative_path="__0_0.distcp\n"), "it leads to '__0_0.distcp"),
    "a path that is an object": (placed(relative_path=Path_()), "it names test_stored_index.Path_"),
    "an extension": (placed(transform_descriptors=["zstd"]), "it leads to '__0_0.distcp'"),
    "an offset below 0": (placed(offset=-1), "a number of it is no count"),
    "an offset that is none": (placed(offset=1.5), "a number of it is no count"),
    "a switch for a number": (placed(offset=True), "a number of it is no count"),
    "an offset behind the end": (placed(offset=1 << 40), "is damaged: its files are not what .metadata says"),
    "a length of nothing": (placed(length=0), "is damaged: its files are not what .metadata says"),
    "another type": (of_tensor(properties=TensorProperties(torch.float64)), "it names torch.float64"),
    "no pieces": (of_tensor(chunks=[]), "does not have every number of param.w once"),
    "pieces that are no list": (of_tensor(chunks={}), "the pieces of a tensor are no list"),
    "another shape": (of_tensor(size=torch.Size((7, 4))), "param.w should be [6, 4] and is [7, 4] there"),
    "no size": (of_tensor(size=(6, 4)), "where a Size belongs there is another thing"),
    "no tensor of that name": (
        changed(lambda index: index.state_dict_metadata.pop("param.w")),
        "param.w should be [6, 4] and is not there",
    ),
    "no places": (changed(lambda index: vars(index).pop("storage_data")), "'storage_data' is missing in it"),
    "places by name": (changed(lambda index: vars(index).update(storage_data={"param.w": 1})), "where a MetadataIndex"),
    "no place of a piece": (
        changed(lambda index: index.storage_data.pop(MetadataIndex("param.w", (0, 0)))),
        "is damaged: its files are not what .metadata says",
    ),
    "another tensor's numbers": (
        changed(
            lambda index: index.storage_data.update(
                dict.fromkeys(index.storage_data, index.storage_data[MetadataIndex("exp_avg.b", (0,))])
            )
        ),
        "is damaged: its files are not what .metadata says",
    ),
    "only a list": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([])), "where a Metadata belongs"),
    "a class": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Metadata)),
        "where a Metadata belongs there is another thing",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_one_line(lie: str, folder: Path) -> None:
    harm, said = LIES[lie]
    harm(folder)
    with pytest.raises(ValueError, match=r"^[ -~]+$") as refused:
        read(folder)
    assert said in str(refused.value) and str(folder) in str(refused.value)


def test_a_shard_that_is_a_pickle_is_not_run(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "touched"
    attack = touching(file)["os.system"]
    size = (folder / "__0_0.distcp").stat().st_size
    (folder / "__0_0.distcp").write_bytes(attack * (size // len(attack) + 1))
    placed(offset=0, length=len(attack))(folder)
    with pytest.raises(ValueError, match="is damaged: its files are not what"):
        read(folder)
    assert not file.exists()
