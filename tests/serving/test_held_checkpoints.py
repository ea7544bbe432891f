"""Copies of checkpoints that a search may delete: whole ones, and none that nobody may load any more."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow.fs
import pytest
from ray import cloudpickle
from ray.tune import Checkpoint

from fluidtune.serving import held_checkpoints
from fluidtune.serving.following import deploy_better
from fluidtune.serving.held_checkpoints import HeldCheckpoints, held, let_go
from fluidtune.serving.model_process import Loading
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError
from tests.serving import stand_ins
from tests.serving.stand_ins import device, settled

HERE = pyarrow.fs.LocalFileSystem()


def winner(run: Path, trial: str, value: float = 1.0, *, goes_on: bool = True) -> Winner:
    """Of a trial in the run, with a checkpoint in which the value stands twice."""
    folder = run / trial / "checkpoint_000000"
    folder.mkdir(parents=True)
    (folder / "value").write_text(str(value))
    return Winner(trial, Checkpoint(str(folder), HERE), {}, value, goes_on=goes_on)


def copies(run: Path) -> list[str]:
    """The trials of which there are copies."""
    return sorted(path.name.rsplit("-", 1)[0] for path in (run / "checkpoints").glob("*"))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_what_a_search_deletes_is_still_there(tmp_path, within, nested):
    """within: the run is known by its path within a file system. Seen: the service answered nothing any more."""
    one = winner(tmp_path / "run", "t")
    if nested:
        Path(one.checkpoint.path, "weights").mkdir()
        Path(one.checkpoint.path, "weights", "all").write_text("2.0")
    run, storage = str(tmp_path / "run"), HERE
    if within:
        run, storage = "run", pyarrow.fs.SubTreeFileSystem(str(tmp_path), HERE)
    found = held(one, run, storage)
    shutil.rmtree(tmp_path / "run" / "t")
    with found.checkpoint.as_directory() as directory:
        there = {path.name: path.read_text() for path in Path(directory).rglob("*") if path.is_file()}
    assert there == {"value": "1.0", **({"all": "2.0"} if nested else {})}
    assert found.value == 1.0 and held(found, run, storage) is found
    let_go([one, found], run)
    assert copies(tmp_path / "run") == []
    let_go([found], run)


def test_the_checkpoint_of_a_trial_that_has_ended_is_not_copied(tmp_path):
    one = winner(tmp_path, "t", goes_on=False)
    assert held(one, str(tmp_path), HERE) is one
    let_go([one], str(tmp_path))
    assert Path(one.checkpoint.path).is_dir() and not copies(tmp_path)


@pytest.mark.parametrize("deleted", ["all before", "a part before", "a part after"])
def test_of_a_checkpoint_that_is_deleted_meanwhile_there_is_no_copy(tmp_path, monkeypatch, deleted):
    one = winner(tmp_path, "t")

    def copy(source, *given, really=held_checkpoints.copy_files, **named):
        if deleted == "a part before":
            Path(source, "value").unlink()
        really(source, *given, **named)
        if deleted == "a part after":
            Path(source, "value").unlink()
        else:
            shutil.rmtree(source)

    monkeypatch.setattr(held_checkpoints, "copy_files", copy)
    if deleted == "all before":
        shutil.rmtree(one.checkpoint.path)
    with pytest.raises(ServeError, match=r"the checkpoint of trial t is not there \(any more\): .*num_to_keep"):
        held(one, str(tmp_path), HERE)
    assert copies(tmp_path) == []


def test_a_copy_that_cannot_be_made_is_said_with_its_place(tmp_path):
    one = winner(tmp_path, "t")
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(ServeError, match=r"trial t, which goes on, cannot be copied to .*/checkpoints/t-"):
        held(one, str(tmp_path), HERE)


@pytest.fixture
def front(kept, tmp_path):
    """Makes the versions of a front, whose models are of these winners."""
    return lambda *winners: stand_ins.rollouts(trials=Loading(b"", (), winners), folder=str(tmp_path))


async def deploy(rollouts, one: Winner, fails: bool = False) -> None:
    """On a device that loads at once."""
    has(rollouts, device(lambda key: ServeError("it is slow") if fails and "@" in key else True))
    await rollouts.deploy(one, "run", 1.0)
    await settled()


def has(rollouts, made) -> None:
    """The service has this device."""
    rollouts._devices.present[0] = made
    rollouts._devices.reconcile()
    for process in made.processes.values():
        process.where = SimpleNamespace(node="n", used=0, free=1, gpu_used=0, gpu_free=0)


@pytest.mark.serve
async def test_a_copy_goes_when_neither_the_service_nor_its_next_front_loads_it(tmp_path, front):
    left = held(winner(tmp_path, "left by a service that was killed"), str(tmp_path), HERE)
    first = held(winner(tmp_path, "a"), str(tmp_path), HERE)
    rollouts = front(first)
    assert left.name in copies(tmp_path)
    await rollouts.restore()
    assert copies(tmp_path) == ["a"]
    await deploy(rollouts, winner(tmp_path, "b", 2.0))
    assert copies(tmp_path) == ["a", "b"]
    assert "checkpoints/b-" in rollouts._loading(rollouts.versions.serving).trials[0].checkpoint.path
    await deploy(rollouts, winner(tmp_path, "c", 3.0), fails=True)
    assert rollouts.versions.last.state == "refused" and copies(tmp_path) == ["b"]
    await deploy(rollouts, winner(tmp_path, "d", 3.0, goes_on=False))
    assert rollouts.versions.serving.trial == "d" and copies(tmp_path) == ["b"]
    # The front is killed, and the next one has b, which is kept, to load.
    after = front(first)
    await after.restore()
    assert copies(tmp_path) == ["b"]
    await rollouts.rollback()
    assert rollouts.versions.serving.trial == "b" and copies(tmp_path) == ["b"]
    await rollouts.close()
    assert copies(tmp_path) == []


async def test_a_storage_that_lists_paths_in_its_own_way_loses_no_copy_that_is_served(tmp_path):
    """This one lists what is in "run" as "/run/...", and others leave a "/" out."""
    storage = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory", skip_instance_cache=True)))
    path = tmp_path.name
    left, served = (held(winner(tmp_path, name), path, storage) for name in ("left", "served"))
    holding = HeldCheckpoints(path, served)
    await holding.begin()
    await holding.keep([served])
    there = [storage.get_file_info(one.checkpoint.path).type for one in (left, served)]
    assert there == [pyarrow.fs.FileType.NotFound, pyarrow.fs.FileType.Directory]


async def test_services_of_one_run_leave_each_other_their_copies(tmp_path):
    _, mine = (held(winner(tmp_path, name), str(tmp_path / f"serving-{name}"), HERE) for name in "ab")
    holding = HeldCheckpoints(str(tmp_path / "serving-b"), mine)
    await holding.begin()
    await holding.keep([])
    assert (copies(tmp_path / "serving-a"), copies(tmp_path / "serving-b")) == (["a"], [])


async def test_a_copy_that_cannot_be_removed_is_tried_again_at_the_next_time(tmp_path, caplog):
    one = held(winner(tmp_path, "t"), str(tmp_path), HERE)
    holding = HeldCheckpoints(str(tmp_path), one)
    await holding.begin()
    folder = tmp_path / "checkpoints"
    whole = folder.rename(tmp_path / "away")
    folder.mkdir()
    (folder / Path(one.checkpoint.path).name).write_text("no folder, which cannot be removed as one")
    await holding.keep([])
    assert "stays in" in caplog.text
    shutil.rmtree(folder)
    whole.rename(folder)
    await holding.keep([])
    assert copies(tmp_path) == []


@pytest.mark.serve
@pytest.mark.parametrize("restarted", [False, True])
async def test_the_copies_of_all_models_of_a_service_stay(tmp_path, front, kept, restarted):
    left, *models = [held(winner(tmp_path, name), str(tmp_path), HERE) for name in ("left", "a", "b", "c")]
    assert left.name in copies(tmp_path)
    rollouts = front(*models)
    if restarted:
        kept["front"] = cloudpickle.dumps(rollouts.versions)
    await rollouts.restore()
    assert copies(tmp_path) == ["a", "b", "c"]
    await rollouts.close()
    assert copies(tmp_path) == []


@pytest.mark.serve
async def test_a_value_whose_checkpoint_is_gone_keeps_no_other_one_back(tmp_path, front):
    """Seen: `serve --follow` deployed no other version."""
    gone, there = winner(tmp_path, "b", 0.95), winner(tmp_path, "c", 0.94)
    shutil.rmtree(gone.checkpoint.path)
    rollouts = front(winner(tmp_path, "a", 0.90, goes_on=False))
    has(rollouts, device())
    with pytest.raises(ServeError, match="is not there"):
        await deploy_better(rollouts, gone, str(tmp_path), "max")
    await deploy_better(rollouts, there, str(tmp_path), "max")
    await settled()
    assert rollouts.versions.serving.what.value == 0.94
