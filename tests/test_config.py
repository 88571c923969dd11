"""Settings from a file and from --set, and the sentence that a mistake in them gets."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from holdfast.config import ConfigError, Settings, load
from holdfast.logs.regex_safety import BAD_PATTERN


def refused(*overrides: tuple[str, str], text: str | None = None, tmp_path: Path | None = None) -> str:
    path = None
    if text is not None and tmp_path is not None:
        path = str(tmp_path / "holdfast.toml")
        Path(path).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_nothing_given() -> None:
    assert load(None, ()) == Settings()


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text("[recovery]\nattempts = 5\nwait_s = 60\n[silence]\nbeat_s = 0.5\n")
    settings = load(str(path), [("recovery.attempts", "7"), ("node.lost_s", "120")])
    assert (settings.recovery.attempts, settings.recovery.wait_s) == (7, 60.0)
    assert (settings.silence.beat_s, settings.node.lost_s) == (0.5, 120.0)
    assert settings.recovery.stop_grace_s == Settings().recovery.stop_grace_s


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"nowhere\.toml: {os.strerror(errno.ENOENT)}"):
        load(str(tmp_path / "nowhere.toml"), ())
    with pytest.raises(ConfigError, match=os.strerror(errno.EISDIR)):
        load(str(tmp_path), ())


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    assert "TOML" in refused(text="[recovery\n", tmp_path=tmp_path)
    path = tmp_path / "latin.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="TOML"):
        load(str(path), ())


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    assert "'recover'" in refused(("recover.attempts", "1"))
    assert "'recovery.attempt'" in refused(("recovery.attempt", "1"))
    assert "'recovery.a.b'" in refused(("recovery.a.b", "1"))
    assert "'sillence'" in refused(text="[sillence]\nbeat_s = 1\n", tmp_path=tmp_path)


@pytest.mark.parametrize("key", ["attempts", "recovery.", "recovery"])
def test_a_key_without_a_field(key: str) -> None:
    assert "SECTION.FIELD=VALUE" in refused((key, "1"))


def test_a_value_of_the_wrong_type(tmp_path: Path) -> None:
    assert refused(("recovery.attempts", "many")) == "recovery.attempts must be a whole number, not 'many'"
    assert refused(("recovery.attempts", "2.5")) == "recovery.attempts must be a whole number, not '2.5'"
    assert refused(("silence.beat_s", "soon")) == "silence.beat_s must be a number, not 'soon'"
    assert refused(("replay.q", "often")) == "replay.q must be a number, not 'often'"
    assert refused(("probe.allow", "perhaps")) == "probe.allow must be true or false, not 'perhaps'"
    assert refused(("lines.stance", "panic")) == "lines.stance must be one of observe, notify, act, not 'panic'"
    listed = refused(text='[model]\nurl = ["http://a"]\n', tmp_path=tmp_path)
    assert listed == "model.url must be a text, not ['http://a']"
    rule = refused(text="[[rules.rule]]\nname = 1\n", tmp_path=tmp_path)
    assert rule.startswith("rules.rule ") and rule.endswith(".name`")


def test_every_setting_says_in_plain_words_what_it_takes() -> None:
    for section in msgspec.structs.fields(Settings):
        for field in msgspec.structs.fields(section.type):
            if field.type is not str:
                sentence = refused((f"{section.name}.{field.name}", "\udcff?"))
                assert sentence.startswith(f"{section.name}.{field.name} "), sentence
                assert field.name == "rule" or " must be " in sentence, sentence


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("disk.path", "nvme", "disk.path"),
        ("disk.keep", "0", "disk.keep"),
        ("silence.beat_s", "0", "silence.beat_s"),
        ("loss.policy", "act", "loss.policy"),
        ("loss.spikes", "act", "'loss.spikes'"),
        ("loss.skip_batches", "0", "loss.skip_batches"),
        ("loss.lower_to", "1", "loss.lower_to"),
        ("loss.lower_steps", "0", "loss.lower_steps"),
        ("silence.beat_s", "nan", "silence.beat_s"),
        ("silence.beat_s", "2", "silence.silence_s"),
        ("silence.silence_s", "60", "node.lost_s"),
        ("node.lost_s", "3", "node.lost_s"),
        ("recovery.stop_grace_s", "-1", "recovery.stop_grace_s"),
        ("recovery.attempts", "0", "recovery.attempts"),
        ("logs.file_bytes", "10", "65536"),
        ("lines.bytes_s", "10", "4096"),
        ("health.gpu_s", "0", "gpu_s"),
        ("health.deadline_s", "0", "health.deadline_s"),
        ("health.stance", "panic", "health.stance"),
        ("backup.pacing", "fast", "backup.pacing must be one of auto, gaps, duty, not 'fast'"),
    ],
)
def test_limits_that_contradict_each_other(key: str, value: str, words: str) -> None:
    assert words in refused((key, value))


def test_memory_for_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text('[snapshot]\nmemory = "64G"\n')
    assert load(str(path), ()).snapshot.memory == "64G"
    assert load(str(path), [("snapshot.memory", "50%")]).snapshot.memory == "50%"
    assert "snapshot.memory: 'lots'" in refused(("snapshot.memory", "lots"))


def test_a_value_where_a_section_is_due(tmp_path: Path) -> None:
    assert "'recovery' is a section" in refused(text="recovery = 5\n", tmp_path=tmp_path)
    assert "'recovery' is a section" in refused(("recovery.attempts", "1"), text="recovery = 5\n", tmp_path=tmp_path)


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_limits_are_finite_and_not_negative(value: str) -> None:
    assert "recovery.wait_s" in refused(("recovery.wait_s", value))


def test_rules_over_log_lines(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text("[[rules.rule]]\nname = 'nan'\nkind = 'loss'\npattern = 'loss=(.+)'\n")
    [rule] = load(str(path), [("rules.stance", "notify")]).rules.rule
    assert (rule.name, rule.times, rule.above) == ("nan", 1, None)
    bad = "[[rules.rule]]\nname = 'nan'\nkind = '{}'\npattern = '{}'\n"
    assert f"rules.rule 'nan' {BAD_PATTERN}" in refused(text=bad.format("loss", "(("), tmp_path=tmp_path)
    assert "rules.rule" in refused(text=bad.format("mood", "(x)"), tmp_path=tmp_path)
    assert "every" in refused(text=bad.format("loss", "(x)") + "every = 1\n", tmp_path=tmp_path)


def test_with_a_hook_a_person_is_asked_unless_told_otherwise(tmp_path: Path) -> None:
    assert load(None, ()).recovery.ask_s == 0
    assert load(None, [("hook.command", "true")]).recovery.ask_s == 14400
    assert load(None, [("hook.url", "https://h/x"), ("recovery.attempts", "5")]).recovery.ask_s == 14400
    assert load(None, [("hook.command", "true"), ("recovery.ask_s", "0")]).recovery.ask_s == 0
    path = tmp_path / "holdfast.toml"
    path.write_text("[hook]\ncommand = 'true'\n[recovery]\nask_s = 60\n")
    assert load(str(path), ()).recovery.ask_s == 60


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hook.url", "ftp://h", "hook.url"),
        ("hook.url", "https://", "hook.url"),
        ("hook.format", "xml", "json, slack"),
        ("hook.timeout_s", "0", "hook.timeout_s"),
    ],
)
def test_hooks(key: str, value: str, words: str) -> None:
    assert words in refused((key, value))
