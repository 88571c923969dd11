"""Last words, whatever bytes they are made of."""

import os
from pathlib import Path

from holdfast.agent.rank import last_words


def test_where_a_rank_writes(tmp_path: Path) -> None:
    assert last_words.rank_folder(str(tmp_path), 3, 7) == tmp_path / "gen-3" / "rank-7"


def test_the_last_lines_of_both(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_text("out\n")
    (tmp_path / "stderr.log").write_text("".join(f"line {n}  \n\n" for n in range(100)))
    found = last_words.last_words(tmp_path)
    assert len(found) == 101
    assert (found[0], found[1], found[-1]) == ("out", "line 0", "line 99")


def test_where_one_is_empty_or_missing(tmp_path: Path) -> None:
    assert last_words.last_words(tmp_path) == ()
    (tmp_path / "stdout.log").write_text("out\n")
    assert last_words.last_words(tmp_path) == ("out",)
    (tmp_path / "stderr.log").write_text("\n\n")
    assert last_words.last_words(tmp_path) == ("out",)


def test_the_line_that_was_printed_last_to_whichever_stream(tmp_path: Path) -> None:
    assert last_words.last_line(tmp_path) == ""
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    out.write_text("training failed: \x1b[31mmy batch is broken\x1b[0m\n")
    err.write_text("UserWarning: old\n")
    os.utime(err, (1.0, 1.0))
    assert last_words.last_line(tmp_path) == "training failed: my batch is broken"
    err.write_text("last\nholdfast: step 3 was restored from memory\n")
    os.utime(out, (1.0, 1.0))
    assert last_words.last_line(tmp_path) == "last"


def test_bytes_colours_and_progress_bars(tmp_path: Path) -> None:
    text = b"\xff\xfe\x80\n\x1b[31mred\x1b[0m\x1b[2K\n0 %\r1 %\r2 %\n"
    (tmp_path / "stderr.log").write_bytes(text + b"z" * 5000)
    assert last_words.last_words(tmp_path) == ("\ufffd\ufffd\ufffd", "red", "0 %", "1 %", "2 %", "z" * 2000)


def test_no_tail_of_a_word_stays_where_a_file_is_cut(tmp_path: Path) -> None:
    """It may be a token's, which nobody would know."""
    (tmp_path / "stderr.log").write_text("hf_aB3dE5fG7hJ9kL1m rest" + "\nx" * ((512 << 10) // 2 - 5))
    assert last_words._read_tail(tmp_path / "stderr.log")[0] in ("x", "rest")


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "stderr.log").open("wb") as file:
        file.truncate(1 << 34)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    assert last_words.last_words(tmp_path)[-1] == "the end"


def test_of_many_short_lines_the_last_ones_count(tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_text("".join(f"{n}\n" for n in range(50_000)))
    found = last_words.last_words(tmp_path)
    assert (len(found), found[-1]) == (10_000, "49999")
