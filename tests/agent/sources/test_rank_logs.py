"""What ranks write, followed: whatever they write."""

from pathlib import Path

from holdfast.agent.sources.rank_logs import RankLogSource
from holdfast.model.observation import Line

MIB = 1 << 20


class Logs:
    def __init__(self, folder: Path, limit_bytes: int = 2 * MIB) -> None:
        self.running = [(1, 0)]
        self.path = folder / "gen-1/rank-0/stderr.log"
        self.path.parent.mkdir(parents=True)
        self.needle = b""
        self.source = RankLogSource(
            lambda: 9.0, str(folder), lambda: self.running, limit_bytes, lambda text: self.needle in text
        )

    def write(self, text: bytes) -> list[str]:
        with self.path.open("ab") as file:
            file.write(text)
        return self.read()

    def read(self) -> list[str]:
        return [s.text for s in self.source.read() if isinstance(s, Line) and s.rank == 0 and s.at == 9.0]


def test_lines_as_they_are_written(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    assert logs.read() == []
    assert logs.write(b"one\ntw") == ["one"]
    assert logs.write(b"o\r\x1b[31mthree\x1b[0m\n\n") == ["two", "three"]
    assert logs.read() == []


def test_a_file_that_is_truncated_below_us(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.write(b"a long line before\nand half")
    logs.path.write_bytes(b"anew\n")
    assert logs.read() == ["anew"]


def test_what_was_there_before_us_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "gen-1/rank-0").mkdir(parents=True)
    (tmp_path / "gen-1/rank-0/stdout.log").write_bytes(b"old\n")
    source = RankLogSource(lambda: 0.0, str(tmp_path), lambda: [(1, 0)], MIB, lambda text: True)
    assert source.read() == []
    (tmp_path / "gen-1/rank-0/stdout.log").write_bytes(b"old\nnew\n")
    assert [s.text for s in source.read() if isinstance(s, Line)] == ["new"]


def test_a_line_of_ten_megabytes(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    read = logs.write(b"x" * (10 * MIB))
    assert read == []
    assert logs.source.skipped_bytes == 9 * MIB, "each of two files gets half of what may be read"
    [line, after] = logs.write(b"\nafter\n")
    assert len(line) <= 4096
    assert after == "after"


def test_garbage(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    read = logs.write(bytes(range(256)) * 1000 + b"\nTypeError: x\n")
    assert read[-1] == "TypeError: x"


def test_what_is_of_no_interest_is_not_taken_apart(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.needle = b"needle"
    assert logs.write(b"hay\nhay\nnee") == []
    assert logs.write(b"dle here\n") == ["needle here"], "a line in two pieces is not missed"


def test_ranks_come_and_go(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.write(b"of generation 1\n")
    (tmp_path / "gen-2/rank-3").mkdir(parents=True)
    (tmp_path / "gen-2/rank-3/stdout.log").write_bytes(b"of generation 2\n")
    logs.running = [(2, 3)]
    assert [(s.text, s.rank) for s in logs.source.read() if isinstance(s, Line)] == [("of generation 2", 3)]
    logs.running = []
    assert logs.source.read() == []
