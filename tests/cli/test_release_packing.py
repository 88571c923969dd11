"""What a job's code is, and how it is brought."""

import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from holdfast import config
from holdfast.cli.launch import release_packing
from holdfast.cli.launch.release_packing import KeptOut
from holdfast.cli.run_dirs import run_dir_secrets
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.config import Settings
from holdfast.controller.access import user_tokens
from holdfast.controller.access.caller_admission import Right
from holdfast.model.code_release import Release
from holdfast.model.job_and_seats import Job
from holdfast.wire import run_and_node_specs
from holdfast.wire.releases import tree_archive
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec
from tests.wire.test_release_file_selection import git, repo
from tests.wire.test_tree_archive import plant


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home" / "holdfast"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def entry_of(folder: Path, script: str = "train.py", **more: object) -> EntryPoint:
    entry = EntryPoint(argv=(script, "--lr=1"), python=sys.executable, cwd=str(folder))
    return msgspec.structs.replace(entry, **more)


def first(entry: EntryPoint, folder: Path, copied: bool = True) -> release_packing.FirstRelease:
    return release_packing.pack_first_release(entry, folder / "run", KeptOut(), copied=copied)


def names(folder: Path, digest: str) -> set[str]:
    return set(tree_archive.archive_contents(folder / "run" / "releases" / f"{digest}.tar"))


def test_the_tree_of_a_script_is_its_repository(tmp_path: Path) -> None:
    root = repo(tmp_path / "proj")
    begun = first(entry_of(root / "lib", "model.py"), tmp_path)
    release = begun.release
    assert (release.number, release.root, release.script) == (1, str(root), "lib/model.py")
    assert release.argv == ("model.py", "--lr=1")
    assert names(tmp_path, release.digest) == {".gitignore", "lib/model.py", "notes.txt", "train.py"}
    assert "(git " in release.source and release.source.endswith(", changed)"), "some files were never committed"
    assert "4 files" in begun.said


def test_or_its_folder(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {"train.py": "", "sub/other.py": "", "run/journal.db": ""})
    entry = entry_of(tmp_path, "proj/train.py")
    begun = release_packing.pack_first_release(entry, root / "run", KeptOut((root / "logs",)), copied=True)
    assert (begun.release.root, begun.release.script) == (str(root), "train.py")
    archive = root / "run" / "releases" / f"{begun.release.digest}.tar"
    assert set(tree_archive.archive_contents(archive)) == {"train.py", "sub/other.py"}, (
        "the run itself is no part of it"
    )


def test_a_module_is_of_the_working_directory(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {"pkg/__init__.py": "", "pkg/train.py": ""})
    begun = first(entry_of(root, "pkg.train", module=True), tmp_path)
    assert begun.release.digest and begun.release.script == ""


def test_what_is_no_tree_of_code_is_run_where_it_stands(tmp_path: Path, home: Path) -> None:
    root = plant(tmp_path / "proj", {"train.py": ""})
    plant(home, {"train.py": ""})
    plant(tmp_path / "bash", {"train": ""})
    ignored = repo(tmp_path / "git")
    (ignored / "out" / "job.py").touch()
    cases = [
        (entry_of(root, python=""), "train.py "),
        (entry_of(root, "torch.distributed.run", module=True), " torch "),
        (entry_of(root, "train", module=True, python="/other/python"), "train "),
        (entry_of(home), str(home)),
        (entry_of(Path("/"), "train.py"), ": / "),
        (entry_of(Path(tempfile.gettempdir())), tempfile.gettempdir()),
        (entry_of(tmp_path / "bash", "train"), str(tmp_path / "bash")),
        (entry_of(ignored, "out/job.py"), "out/job.py "),
    ]
    for entry, words in cases:
        begun = first(entry, tmp_path)
        assert begun.release.digest == "" and begun.release.number == 1
        assert begun.said.startswith("release 1 ") and words in begun.said
    refused = first(entry_of(root), tmp_path, copied=False)
    assert refused.release.digest == "" and "--no-release" in refused.said
    assert refused.release.root == str(root), "an update may bring it later"


def test_a_large_tree_is_run_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = plant(tmp_path / "proj", {"train.py": "", "data.txt": "x" * 5000})
    monkeypatch.setattr(release_packing, "FIRST", tree_archive.ArchiveLimits(bytes=4096, files=9))
    assert "data.txt" in first(entry_of(root), tmp_path).said
    monkeypatch.setattr(release_packing, "FIRST", tree_archive.ArchiveLimits(bytes=1 << 20, files=1))
    assert " 1 files" in first(entry_of(root), tmp_path).said


def test_a_folder_or_a_commit_is_brought(tmp_path: Path) -> None:
    root = repo(tmp_path / "proj")
    begun = first(entry_of(root), tmp_path).release
    own = release_packing.pack_update(None, begun, tmp_path / "run", KeptOut())
    assert (own.digest, own.root) == (begun.digest, str(root)), "nothing has changed"
    (root / "train.py").write_text("print(2)")
    changed = release_packing.pack_update(None, begun, tmp_path / "run", KeptOut())
    assert differs(tmp_path, begun, changed) == "1 file changed"
    git(root, "tag", "v1")
    commit = release_packing.pack_update("v1", begun, tmp_path / "run", KeptOut())
    assert names(tmp_path, commit.digest) == {".gitignore", "train.py"}, "what was committed, not what lies there"
    assert commit.root == str(root) and "(git " in commit.source
    assert differs(tmp_path, begun, commit) == "", "what was never committed lies in the tree, and is linked"
    other = plant(tmp_path / "other", {"train.py": "", "new.py": ""})
    assert release_packing.pack_update(str(other), begun, tmp_path / "run", KeptOut()).root == str(other)


def differs(folder: Path, base: Release, brought: release_packing.PackedUpdate) -> str:
    later = msgspec.structs.replace(base, digest=brought.digest, root=brought.root, home=base.home or base.root)
    return release_packing.describe_difference(folder / "run", base.digest, later)


def test_only_what_differs_between_two_releases_is_told(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {"train.py": "1", "old.py": "", "ds.json": "{}", "notes/a.md": ""})
    begun = first(entry_of(root), tmp_path).release
    fixed = plant(tmp_path / "fixed", {"train.py": "2", "new.py": ""})
    other = release_packing.pack_update(str(fixed), begun, tmp_path / "run", KeptOut())
    assert differs(tmp_path, begun, other) == "1 file changed, 1 file added", "the rest is linked from the job's tree"
    (root / "old.py").unlink()
    (root / "big.bin").write_text("state of the job, and no part of any release")
    own = release_packing.pack_update(None, begun, tmp_path / "run", KeptOut())
    assert differs(tmp_path, begun, own) == "1 file removed"
    (root / "big.bin").unlink()
    assert (
        differs(tmp_path, begun, release_packing.pack_update(None, begun, tmp_path / "run", KeptOut()))
        == "1 file removed"
    )


def test_what_cannot_be_brought(tmp_path: Path) -> None:
    root = repo(tmp_path / "proj")
    plain = plant(tmp_path / "plain", {"train.py": ""})
    cases = [
        (None, "", "holdfast update PATH"),
        (None, str(tmp_path / "gone"), str(tmp_path / "gone")),
        ("/", str(root), "^/ "),
        ("no-such-branch", str(root), f"no-such-branch .*{root}"),
        ("HEAD", str(plain), "^HEAD "),
    ]
    for what, of, words in cases:
        with pytest.raises(UsageError, match=words.replace("(", "\\(")):
            release_packing.pack_update(what, Release(number=1, root=of), tmp_path / "run", KeptOut())


def test_what_a_job_has_written_is_no_part_of_a_release(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {"train.py": "", "ds.json": "{}", "old/step.pt": "", "old/latest": "1"})
    begun = first(entry_of(root), tmp_path).release
    assert names(tmp_path, begun.digest) == {"train.py", "ds.json", "old/latest"}, "nor what an earlier job has left"
    plant(
        root,
        {
            "new.py": "",
            "conf/b.yaml": "",
            "ckpt/1/state": "",
            "ckpt/1/args.yaml": "",
            "metrics.json": "",
            "ds.json": "1",
        },
    )
    with (root / "ckpt" / "all.tar").open("wb") as file:
        file.truncate(10 << 30)
    brought = release_packing.pack_update(None, begun, tmp_path / "run", KeptOut())
    kept = {"train.py", "ds.json", "old/latest", "new.py", "conf/b.yaml"}
    assert names(tmp_path, brought.digest) == kept, "ten GiB neither"
    assert brought.left_out == ("ckpt/1/args.yaml", "ckpt/1/state", "metrics.json"), "and it is said"
    elsewhere = plant(tmp_path / "fixed", {"train.py": "", "ds.json": "", "metrics.json": ""})
    assert release_packing.pack_update(str(elsewhere), begun, tmp_path / "run", KeptOut()).files == 3, (
        "no job writes there"
    )


def test_what_git_was_told_of_is(tmp_path: Path) -> None:
    root = repo(tmp_path / "proj")
    begun = first(entry_of(root), tmp_path).release
    plant(root, {"conf.json": "", "metrics.json": ""})
    with (root / "model.tokens").open("wb") as file:
        file.truncate(10 << 30)
    git(root, "add", "conf.json")
    brought = release_packing.pack_update(None, begun, tmp_path / "run", KeptOut())
    assert names(tmp_path, brought.digest) == {".gitignore", "conf.json", "lib/model.py", "notes.txt", "train.py"}
    assert brought.left_out == ("metrics.json",)


RUN = RunSpec(
    job=Job(run_id="a", min_nodes=1, max_nodes=1),
    entry=EntryPoint(argv=("train.py",)),
    settings=Settings(),
    fleet="local",
    nproc=1,
    log_dir="logs",
)


def plant_run(at: Path) -> None:
    """A run directory as a job leaves it while it runs."""
    plant(
        at, {"token": "a-secret", "env.json": '{"PATH": "/bin", "KEY": "a-secret"}', "door/authority.key": "a-secret"}
    )
    run_and_node_specs.write_json(at / "run.json", RUN)


@pytest.mark.parametrize("with_git", [False, True])
def test_secrets_of_holdfast_are_no_part_of_a_release(with_git: bool, tmp_path: Path) -> None:
    root = repo(tmp_path / "proj") if with_git else plant(tmp_path / "proj", {"train.py": ""})
    plant_run(root / "runs" / "a")
    plant(root / "runs" / "new", {"env.json": '{"PATH": "/bin", "KEY": "a-secret"}'})
    plant_run(root / "homes" / "runs" / "b")
    plant(root / "homes", {"join/29400.token": "a-secret"})
    (root / "homes" / "newest").symlink_to(root / "homes" / "runs" / "b")
    url = "https://hooks.test/services/T0/B0/a-secret"
    plant(
        root, {"job.token": "0123456789abcdef" * 2 + "\n", "start.sh": f"HOLDFAST_TOKEN={'0123456789abcdef' * 2} run"}
    )
    plant(
        root,
        {"own.toml": f'[hook]\nurl = "{url}"', "door.pem": "-----BEGIN PRIVATE KEY----- a-secret", "env.json": "{}"},
    )
    plant(root, {"other.toml": "[recovery]\nattempts = 5\n", "code.json": '{"run": 1}'})
    settings = config.load(None, [("hook.url", url)])
    door = msgspec.structs.replace(settings.door, key=str(root / "door.pem"))
    settings = msgspec.structs.replace(settings, door=door)
    if with_git:
        git(root, "add", "job.token", "own.toml", "runs/a")
        git(root, "commit", "-qm", "too much")
    apart = release_packing.keep_out(tmp_path / "run", settings, str(root / "job.token"), ())
    begun = release_packing.pack_first_release(entry_of(root), tmp_path / "run", apart, copied=True)
    archive = tmp_path / "run" / "releases" / f"{begun.release.digest}.tar"
    assert {"train.py", "env.json", "other.toml", "code.json"} <= names(tmp_path, begun.release.digest)
    assert b"a-secret" not in archive.read_bytes() and b"0123456789abcdef" not in archive.read_bytes()
    assert begun.secret[:3] == ("door.pem", "homes", "job.token") and len(begun.secret) == 7
    assert begun.said.endswith(f": {', '.join(begun.secret[:3])} and 4 more")
    for what in (None, "HEAD") if with_git else (None,):
        brought = release_packing.pack_update(what, begun.release, tmp_path / "run", apart)
        assert {"job.token", "own.toml", "runs/a"} <= set(brought.secret)
        archive = tmp_path / "run" / "releases" / f"{brought.digest}.tar"
        assert b"a-secret" not in archive.read_bytes() and b"0123456789abcdef" not in archive.read_bytes()


def test_tokens_that_were_made_for_people_and_nodes_are_no_part_of_a_release(tmp_path: Path, home: Path) -> None:
    """`holdfast token add bob > notes.txt`, in the folder of the script."""
    token = user_tokens.add_token(run_dir_secrets.people_path(), "bob", Right.ADMIN)
    node = f"hf-node.{'0123456789abcdef'}.{'89' * 16}.host1"
    text = {"train.py": "", "notes.txt": f"bob: {token}\n", "conf.yaml": f"token: {node}\n", "sums.txt": "ab" * 16}
    root = plant(tmp_path / "proj", text | {"docs.md": "prints hf-node.ID.SECRET.host1\n"})
    apart = release_packing.keep_out(tmp_path / "run", Settings(), None, ())
    begun = release_packing.pack_first_release(entry_of(root), tmp_path / "run", apart, copied=True)
    assert names(tmp_path, begun.release.digest) == {"train.py", "sums.txt", "docs.md"}
    assert begun.said.endswith("left out, because secrets of holdfast are in it: conf.yaml, notes.txt")


def test_a_script_with_a_secret_in_it_and_a_run_directory_are_not_copied(tmp_path: Path) -> None:
    root = plant(
        tmp_path / "proj", {"train.py": f"TOKEN = '{'0123456789abcdef' * 2}'", "job.token": "0123456789abcdef" * 2}
    )
    apart = release_packing.keep_out(tmp_path / "run", Settings(), str(root / "job.token"), ())
    begun = release_packing.pack_first_release(entry_of(root), tmp_path / "run", apart, copied=True)
    assert not begun.release.digest and ": train.py " in begun.said
    plant_run(root)
    begun = first(entry_of(root), tmp_path)
    assert not begun.release.digest and f": {root} " in begun.said


@pytest.mark.parametrize("with_git", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_a_home_of_holdfast_in_the_tree_is_known_without_its_newest_run(
    own: bool, with_git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the folder of the script itself, of this job or of another; or a folder in it, with `newest` or without."""
    root = repo(tmp_path / "proj") if with_git else plant(tmp_path / "proj", {"train.py": ""})
    monkeypatch.setenv("HOLDFAST_HOME", str(root if own else tmp_path / "home"))
    token, people = "5ec2e70f" * 4, '[{"name": "ann", "right": "admin", "digest": "5ec2e70f"}]'
    for home in (root, root / "bare", root / "gone"):
        plant(home, {"join/29501.token": token, "people.json": people})
    plant(root, {"runs/job.sbatch": "words" if own else "code", "src/people.json": '["ann"]', "src/join/7.token": "x"})
    plant(root / "few", {"elsewhere/a": "5ec2e70f"})
    for name in ("gone", "few"):
        (root / name / "newest").symlink_to(root / "runs" / "removed")
    if with_git:
        git(root, "add", ".")
        git(root, "commit", "-qm", "too much")
    apart = release_packing.keep_out(tmp_path / "run", Settings(), None, ())
    begun = release_packing.pack_first_release(entry_of(root), tmp_path / "run", apart, copied=True)
    archive = tmp_path / "run" / "releases" / f"{begun.release.digest}.tar"
    packed = names(tmp_path, begun.release.digest)
    assert b"5ec2e70f" not in archive.read_bytes()
    assert {"train.py", "src/people.json", "src/join/7.token"} <= packed
    assert ("runs/job.sbatch" in packed) is not own


def test_the_secret_of_a_job_is_known_before_its_first_release_is_packed(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {"train.py": "", "note.txt": "the token is " + "5ec2e70f" * 4})
    (tmp_path / "run").mkdir()
    run_dir_secrets.write_door_secret(tmp_path / "run", "5ec2e70f" * 4)
    apart = release_packing.keep_out(tmp_path / "run", Settings(), None, ())
    begun = release_packing.pack_first_release(entry_of(root), tmp_path / "run", apart, copied=True)
    assert names(tmp_path, begun.release.digest) == {"train.py"}
