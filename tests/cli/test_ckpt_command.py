"""`holdfast ckpt`: what it lists, what it finds broken, what it refuses to remove, and what others can load of it."""

import contextlib
import dataclasses
import json
import os
import pickle  # noqa: TID251  # torch's metadata is one, and this test's own
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint.checkpoint_publication import publish_checkpoint, staging_folder, write_part
from holdfast.checkpoint.disk_state_record import DiskNote
from holdfast.checkpoint.manifest import Author, Manifest, encode_manifest
from holdfast.checkpoint.stored_checkpoints import describe_published, find_checkpoints, mark_doubts
from holdfast.cli import main
from holdfast.cli.commands import ckpt_command
from holdfast.model.state_doubt import Doubt
from tests.agent.peers import layout
from tests.checkpoint.making import save
from tests.checkpoint.test_trainer_checkpoints import write_deepspeed
from tests.checkpoint.trainer_checkpoint_export.zero_making import Zero, write_zero
from tests.cli.console_transcript import assert_screens


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    for step in (1, 2, 3):
        save(base, step, sizes=(5000, 70))
    return base


def begin(base: Path) -> str:
    folder = staging_folder(str(base), 4, Author(1, "run"))
    write_part(folder, 0, [memoryview(b"some")])
    return folder


def spoil(base: Path, step: int, part: int = 1) -> None:
    (base / f"step-{step:08d}" / f"__{part}_0.distcp").write_bytes(b"short")


def steps(base: Path) -> list[int]:
    return [one.step for one in find_checkpoints(str(base))]


def test_ls(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = begin(base)
    (base / "step-00000002" / "holdfast.json").write_text("{}")
    assert ckpt_command.main(["ls", str(base), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in shown["checkpoints"]] == [3, 2, 1]
    assert shown["unfinished"] == [unfinished]
    assert ckpt_command.main(["ls", str(base / "nowhere")]) == 1
    assert str(base / "nowhere") in capsys.readouterr().out


def test_ls_of_a_database(base: Path, shared_postgres: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says the same of each checkpoint as the storage."""
    mark_doubts(str(base), "", (Doubt(generation=1, not_after=2),))
    run_id, other = str(tmp_path / "gpt"), str(tmp_path / "other")
    fill_table(shared_postgres, run_id, base)
    fill_table(shared_postgres, other, tmp_path / "nothing")
    assert ckpt_command.main(["ls", str(base)]) == 0
    stored = capsys.readouterr().out.splitlines()
    words = ["ls", "--journal", shared_postgres, "--run-id"]
    assert main(["ckpt", *words, run_id]) == 0
    head, *listed = capsys.readouterr().out.splitlines()
    assert head.startswith(f"run {run_id}, {base} as of ") and listed == stored and len(stored) == 3
    assert ckpt_command.main([*words, run_id, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(one["run_id"], one["step"], one["doubted"]) for one in shown] == [
        (run_id, 3, True),
        (run_id, 2, False),
        (run_id, 1, False),
    ]
    assert ckpt_command.main([*words, other]) == 1
    assert other in capsys.readouterr().out
    assert ckpt_command.main([*words, other, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"checkpoints": []}
    assert ckpt_command.main(words[:-1]) == 0
    assert set(stored) <= set(capsys.readouterr().out.splitlines()), "of all runs"


def fill_table(url: str, run_id: str, base: Path) -> None:
    from holdfast.journal.journal_key import JournalKey
    from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal

    journal = PostgresJournal(url, run_id, LeaseHolder(name="h0"), JournalKey("", run_id))
    journal.put_listing(describe_published(str(base), find_checkpoints(str(base)), 1))
    journal.close()


@pytest.mark.parametrize(
    "words", [[], ["base", "--journal", "postgres://h/d"], ["base", "--run-id", "x"], ["--run-id", "x"]]
)
def test_ls_of_both_or_of_nothing_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt_command.main(["ls", *words]) == 2
    assert "--journal" in capsys.readouterr().err


def test_ls_of_a_database_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("psycopg")
    assert ckpt_command.main(["ls", "--journal", "postgres://127.0.0.1:1/d"]) == 2
    assert "postgres://127.0.0.1:1/d" in capsys.readouterr().err


def test_ls_of_what_a_run_has_left_on_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        save(tmp_path / f"rank-{rank}", 40)
    assert ckpt_command.main(["ls", str(tmp_path), "--json"]) == 1, "no checkpoint"
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["states"]] == [40, 40]
    assert ckpt_command.main(["verify", str(tmp_path)]) == 0
    spoil(tmp_path / "rank-1", 40, part=0)
    assert ckpt_command.main(["verify", str(tmp_path)]) == 1
    assert ckpt_command.main(["verify", str(tmp_path), "--step", "39"]) == 2
    assert ckpt_command.main(["export", str(tmp_path), str(tmp_path / "to")]) == 2, "of one rank alone"


def leave_states(folder: Path, step: int, ranks: Sequence[int], generation: int = 1) -> dict[int, bytes]:
    """Leave states of a world of two there, as a run does that has no storage; return the image of each rank."""
    images, author = {}, Author(generation, "r.")
    for rank in ranks:
        plan = layout(rank, 2, shared=True)
        images[rank] = random.Random(step * 10 + rank).randbytes(plan.image_bytes)
        base = str(folder / f"rank-{rank}")
        part = write_part(staging_folder(base, step, author), 0, [memoryview(images[rank])])
        note = msgspec.msgpack.encode(DiskNote(layout=plan, verified=False))
        publish_checkpoint(base, step, (part,), note, author=author)
    return images


def test_gather(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disks, to = [tmp_path / "a", tmp_path / "b"], tmp_path / "to"
    images = leave_states(disks[0], 40, [0]) | leave_states(disks[1], 40, [1])
    leave_states(disks[0], 50, [0])
    ask = ["gather", *map(str, disks), str(to), "--step"]
    for step, said in (("60", "there is no state of step 60 in "), ("50", "rank 1 of 2 lacks step 50: give the ")):
        assert ckpt_command.main([*ask, step]) == 2
        assert said in capsys.readouterr().err and not to.exists()
    assert ckpt_command.main([*ask, "40"]) == 0
    assert capsys.readouterr().out == f"step 40 of 2 ranks -> {to}/step-00000040\n"
    assert ckpt_command.main(["verify", str(to)]) == 0
    for rank, image in images.items():
        owned = b"".join(image[one.start : one.end] for one in layout(rank, 2, shared=True).owned_ranges())
        assert (to / "step-00000040" / f"__{rank}_0.distcp").read_bytes() == owned
    state = disks[1] / "rank-1" / "step-00000040" / "__0_0.distcp"
    content = bytearray(state.read_bytes())
    content[5000] ^= 1
    state.write_bytes(content)
    assert ckpt_command.main([*ask[:-2], str(tmp_path / "again"), "--step", "40"]) == 2
    assert "__0_0.distcp" in capsys.readouterr().err and steps(tmp_path / "again") == []


def test_what_is_shown(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        ckpt_command.main([*words])
        return re.sub(r"\.tmp-\S+", ".tmp-WRITER", capsys.readouterr().out.replace(str(base), "BASE"))

    begin(base)
    (base / "step-00000002" / "holdfast.json").write_text("{}")
    spoil(base, 1)
    screens = {"ls": shown("ls", str(base)), "verify": shown("verify", str(base))}
    for rank in (0, 1):
        save(base / "disk" / f"rank-{rank}", 40)
    screens["ls of states on a disk"] = shown("ls", str(base / "disk"))
    assert_screens("ckpt", screens)


def test_verify(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt_command.main(["verify", str(base)]) == 0
    assert capsys.readouterr().out.count(": sound\n") == 3
    doubt = Doubt(generation=99, not_after=2)
    assert mark_doubts(str(base), find_checkpoints(str(base))[0].author.run, (doubt,)) == (3,)
    assert ckpt_command.main(["verify", str(base)]) == 0
    [doubted] = [line for line in capsys.readouterr().out.splitlines() if "step-00000003: " in line]
    assert ": sound, " in doubted and " after step 2 " in doubted
    spoil(base, 2)
    assert ckpt_command.main(["verify", str(base)]) == 1
    assert ckpt_command.main(["verify", str(base), "--step", "3"]) == 0
    assert ckpt_command.main(["verify", str(base / "step-00000002")]) == 1
    assert ckpt_command.main(["verify", str(base), "--step", "9"]) == 2
    assert "step 9 " in capsys.readouterr().err


@pytest.mark.parametrize("buffering", [1, 1 << 20])
def test_verify_looks_at_all_though_nobody_reads_on(
    base: Path, buffering: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(base, 1)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering) as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(["ckpt", "verify", str(base)]) == 1
        assert sys.stdout is unread


def test_rm(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt_command.main(["rm", str(base), "1", "2"]) == 0
    assert steps(base) == [3]
    assert capsys.readouterr().out.count("removed ") == 2
    assert ckpt_command.main(["rm", str(base), "3"]) == 2
    assert "--force" in capsys.readouterr().err
    assert ckpt_command.main(["rm", str(base), "7"]) == 2
    assert ckpt_command.main(["rm", str(base)]) == 2
    assert steps(base) == [3]
    assert ckpt_command.main(["rm", str(base), "3", "--force"]) == 0
    assert list(base.iterdir()) == []


def test_rm_partial_leaves_what_may_be_going_on(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begin(base)
    assert ckpt_command.main(["rm", str(base), "--partial"]) == 0
    assert "--force" in capsys.readouterr().out
    assert Path(folder).exists()
    assert ckpt_command.main(["rm", str(base), "--partial", "--force"]) == 0
    assert not Path(folder).exists()
    assert steps(base) == [3, 2, 1]


def lay_links(to: Path) -> Path:
    """Put links to a file of the user's in place of files to come, as whoever else may write there could; return it."""
    to.mkdir()
    mine = to.parent / "mine"
    mine.write_text("not of this folder")
    index, parts = "model.safetensors.index.json", [f"model-0000{n}-of-00002.safetensors.new" for n in (1, 2)]
    for name in ("model.safetensors.new", *parts, index, f"{index}.new"):
        (to / name).symlink_to(mine)
    return mine


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("file_gb", ["5", "0.00002"], ids=["one file", "several"])
def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], file_gb: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    import torch.distributed.checkpoint as dcp

    weights = {"a.weight": torch.rand(50, 60), "b": torch.rand(70).bfloat16(), "c": torch.tensor(3.0)}
    weights["d"] = torch.rand(3000)
    state = {"model": weights, "optimizer": {"lr": 0.1, "moment": torch.rand(50, 60)}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(tmp_path / "torch")), no_dist=True)
    author = Author(1)
    image = memoryview((tmp_path / "torch" / "__0_0.distcp").read_bytes())
    told = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())
    metadata = pickle.dumps(dataclasses.replace(told, storage_meta=None), protocol=2)
    for step in (1, 2):
        part = write_part(staging_folder(str(tmp_path), step, author), 0, [image])
        publish_checkpoint(str(tmp_path), step, [part], metadata, author=author)
    (tmp_path / "step-00000002" / "__0_0.distcp").write_bytes(b"broken")
    to = tmp_path / "to"
    mine = lay_links(to)
    assert ckpt_command.main(["export", str(tmp_path), str(to), "--file-gb", file_gb]) == 0
    assert mine.read_text() == "not of this folder"
    assert "step-00000001 -> " in capsys.readouterr().out  # the newest that is sound
    for link in filter(Path.is_symlink, to.iterdir()):
        link.unlink()
    files = sorted(to.glob("*.safetensors"))
    assert sorted(to.iterdir()) == sorted([*files, *to.glob("*.index.json")])  # and nothing else is left there
    assert len(files) == (1 if file_gb == "5" else 2)
    found = {name: tensor for path in files for name, tensor in safetensors.load_file(path).items()}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    if len(files) > 1:
        index = json.loads((to / "model.safetensors.index.json").read_text())
        assert {name: to / file for name, file in index["weight_map"].items()} == {
            name: path for path in files for name in safetensors.load_file(path)
        }
    assert ckpt_command.main(["export", str(tmp_path), str(to), "--file-gb", file_gb]) == 2
    assert str(to) in capsys.readouterr().err
    assert ckpt_command.main(["export", str(tmp_path), str(to / "x"), "--prefix", "weights."]) == 2
    assert re.search(r"'weights\.'.* model, optimizer", capsys.readouterr().err)
    assert ckpt_command.main(["export", str(tmp_path), "/proc/holdfast"]) == 2
    assert "/proc/holdfast " in capsys.readouterr().err
    assert ckpt_command.main(["export", str(tmp_path), str(to), "--step", "2"]) == 2
    assert f" {tmp_path} is " in (said := capsys.readouterr().err) and " ckpt verify " in said


def test_checkpoints_of_trainers_are_listed_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_deepspeed(tmp_path / "global_step10")
    assert ckpt_command.main(["ls", str(tmp_path)]) == 0
    assert f"        10  {folder}  by DeepSpeed, " in (said := capsys.readouterr().out), said
    assert " 3 files" in said
    assert ckpt_command.main(["ls", str(tmp_path), "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["trainers"]
    assert (one["step"], one["trainer"], one["ok"]) == (10, "DeepSpeed", True)
    for place in (tmp_path, folder):
        assert ckpt_command.main(["verify", str(place)]) == 0
        sound, checked, unchecked = capsys.readouterr().out.splitlines()
        assert sound == f"{folder}: sound, by DeepSpeed"
        assert checked == "  checked: 3 files, the CRC-32 of every record, and that all parts are there"
        assert unchecked == "  its format does not tell: whether all files are of one write"
    assert ckpt_command.main(["verify", str(tmp_path), "--step", "11"]) == 2
    assert " step 11" in capsys.readouterr().err
    (folder / "mp_rank_00_model_states.pt").unlink()
    assert ckpt_command.main(["ls", str(tmp_path)]) == 0
    assert ": mp_rank_00_model_states.pt " in capsys.readouterr().out
    assert ckpt_command.main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{folder}: broken, by DeepSpeed\n  mp_rank_00_model_states.pt is missing\n"


def test_checkpoints_of_trainers_are_exported(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = tmp_path / "trained"
    folder = write_zero(trained, 2, Zero())
    (write_zero(trained / "newer", 2, Zero()) / "mp_rank_00_model_states.pt").unlink()
    (trained / "newer" / folder.name).rename(trained / "global_step9")
    for form, files in ((["--ranks", "3"], [folder.name]), (["--dcp"], ["__0_0.distcp", ".metadata"])):
        to = tmp_path / form[0]
        assert ckpt_command.main(["export", str(trained), str(to), *form]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == f"{folder} -> {', '.join(str(to / name) for name in files)}"
        assert said[1:] == ([] if form[0] == "--ranks" else ["left out: 1 object, such as model.extra"])
    assert ckpt_command.main(["export", str(folder), str(tmp_path / "weights")]) == 0
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
    for words in (["--ranks", "0"], ["--ranks", "3", "--dcp"], ["--step", "8"], ["--step", "9"], ["--prefix", "no."]):
        with contextlib.suppress(SystemExit):  # of the parser
            assert ckpt_command.main(["export", str(trained), str(tmp_path / "refused"), *words]) == 2
        assert capsys.readouterr().err.count("\n") >= 1
    assert ckpt_command.main(["export", str(base), str(tmp_path / "refused"), "--ranks", "3"]) == 2, (
        "ours needs no other ranks"
    )
    assert not [*(tmp_path / "refused").glob("*")]


HOSTILE = os.fsdecode(b"x\xff\x1b]0;title\x07\nholdfast: all is well-7")


def test_names_and_authors_of_strangers_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained, ours = tmp_path / HOSTILE, tmp_path / "step-00000003"
    write_deepspeed(trained)
    ours.mkdir()
    author = Author(1, "run\x1b[2J\nholdfast: all is well")
    (ours / "holdfast.json").write_bytes(encode_manifest(Manifest(step=3, world=1, author=author, at=1.7e9)))
    for words, code in (("ls", 0), ("verify", 0)):
        assert ckpt_command.main([words, str(tmp_path)]) == code
        said = capsys.readouterr().out
        assert not any(line.startswith("holdfast") for line in said.splitlines())
        assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\ud800-\udfff]+", said), ascii(said)
        assert said.count(f"{tmp_path}/x\ufffd holdfast: all is well-7") == 1
    assert ckpt_command.main(["ls", str(tmp_path), "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["trainers"]
    assert one["url"] == str(trained)


@pytest.mark.parametrize(
    ("field", "told"), [("at", 1e300), ("at", -1e17), ("bytes", 10**400), ("world", 10**30)], ids=range(4)
)
def test_a_manifest_with_numbers_that_nobody_has_written(
    field: str, told: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "step-00000003").mkdir()
    content = encode_manifest(Manifest(**{"step": 3, "world": 1, "author": Author(1), "at": 1.7e9, field: told}))  # type: ignore[arg-type]
    (folder / "holdfast.json").write_bytes(content)
    assert ckpt_command.main(["ls", str(tmp_path)]) == 0
    assert f"{folder}  broken: " in capsys.readouterr().out


def test_checkpoints_of_ours_and_of_a_trainer_in_one_folder(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_deepspeed(base / "global_step10")
    assert ckpt_command.main(["verify", str(base)]) == 0
    said = capsys.readouterr().out
    assert said.count(": sound") == 4 and "sound, by DeepSpeed" in said
    spoil(base, 2)
    assert ckpt_command.main(["verify", str(base)]) == 1
    assert ckpt_command.main(["rm", str(base), "10"]) == 2, "only what is ours is removed"
