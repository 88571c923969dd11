"""Words of a log and the odds that they give to classes; and the file of weights that the package loads."""

import pytest

from benchmarks._words_corpus import Label
from benchmarks._words_learning import Lesson, fit_trust, learn_words
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.logs import catalog_files
from holdfast.logs.learned_words import (
    NOTHING,
    PATH,
    load_learned,
    read_log_words,
    split_words,
    weigh_rules,
)
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.learned_words import format_learned


def words_of(text: str, code: int | None = None) -> set[str]:
    return read_log_words(parse_lines(list(enumerate(text.split("\n"))), 0), code)


ACTIONS = {"gpu_thermal_power": "evict_and_restart", "data_corrupt": "fix_config"}


def lesson(name: str, text: str, klass: str, said: str = "", sure: float = 0.8) -> Lesson:
    said_first = Diagnosis(klass=said, group="", action="", confidence=sure, explanation="") if said else None
    return Lesson(
        name=name,
        label=Label(klass=klass, group="", action=ACTIONS.get(klass, ""), source="a test"),
        lines=[],
        words=words_of(text),
        calm=words_of("step 1 loss 2.5 time 3 tokens 7 norm 2 rate 9"),
        outside=bool(said),
        first_try=said_first,
    )


LESSONS = [
    *(lesson(f"l{n}", f"the kiln {n} is too hot and glows", "gpu_thermal_power", "python_exception") for n in range(6)),
    *(lesson(f"m{n}", f"a shard of the vase {n} is torn off", "data_corrupt", "data_corrupt") for n in range(6)),
]


def test_numbers_folders_and_code_are_no_words() -> None:
    said = split_words("ncclSystemError at /data/run7/train_loop.py 0xdeadbeef: exit code 137, 4711 left")
    assert {"ncclsystemerror", "system", "error", "train", "loop", "exit=137", "left"} <= said
    assert not {"data", "run0", "run7", "4711", "deadbeef", ""} & said
    trace = (
        'Traceback (most recent call last):\n  File "/w/t.py", line 3, in gather\n    shuffle(x)\nValueError: odd kiln'
    )
    assert {"kiln", "valueerror", "exit 1"} <= words_of(trace, 1) and not {"shuffle", "gather"} & words_of(trace)


def test_learned_words_know_a_log_of_other_numbers() -> None:
    learned = learn_words(LESSONS)
    odds = learned.class_odds(words_of("the kiln 99 on n7 is too hot and glows"))
    assert max(odds, key=lambda klass: odds[klass]) == "gpu_thermal_power" and sum(odds.values()) == pytest.approx(1)
    calm = learned.class_odds(words_of("step 7 loss 1.5 time 2 tokens 8 norm 3 rate 8"))
    assert max(calm, key=lambda klass: calm[klass]) == NOTHING
    assert learned.class_odds({"zorb"}) == {}, "no word is known"
    assert learned.weigh_line("the kiln", "gpu_thermal_power") > 0 > learned.weigh_line("the kiln", "data_corrupt")


def test_learned_words_know_the_action_apart_from_the_class() -> None:
    learned = learn_words(LESSONS)
    assert set(learned.actions) == {NOTHING, *ACTIONS.values()}
    odds = learned.action_odds(words_of("the kiln 99 on n7 is too hot and glows"))
    assert odds["evict_and_restart"] > 0.5 and sum(odds.values()) == pytest.approx(1)
    assert learned.action_odds(words_of("a shard of the vase 99 is torn off"))["evict_and_restart"] < 0.2
    assert learned.action_odds({"zorb"}) == {}, "no word is known"


def test_learning_is_the_same_each_time() -> None:
    assert format_learned(learn_words(LESSONS)) == format_learned(learn_words(list(LESSONS)))


def test_trust_follows_who_was_right() -> None:
    wrong = [
        lesson(f"k{n}", f"the kiln {n} is too hot and glows", "gpu_thermal_power", "data_corrupt") for n in range(9)
    ]
    right = [lesson(f"k{n}", f"the kiln {n} is too hot and glows", "data_corrupt", "data_corrupt") for n in range(9)]
    learned = learn_words(LESSONS)
    doubted, trusted = (fit_trust([(one, learned) for one in cases]) for cases in (wrong, right))
    odds = learned.class_odds(words_of("the kiln is too hot and glows"))
    assert weigh_rules(odds, "data_corrupt", 0.8, doubted)["data_corrupt"] < 0.2
    assert weigh_rules(odds, "data_corrupt", 0.8, trusted)["data_corrupt"] > 0.8


def test_the_file_of_the_package() -> None:
    learned = load_learned()
    assert PATH.stat().st_size < 300_000
    known = {klass.klass for klass in catalog_files.load_classes()}
    assert set(learned.classes) == {NOTHING, *known} - {"states_in_doubt"}, "no log from outside has our own word"
    assert set(learned.actions) == {NOTHING, *(klass.action for klass in catalog_files.load_classes())}
    assert format_learned(learned) == PATH.read_bytes(), "nobody has edited it by hand"
    odds = learned.class_odds(words_of("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert odds["gpu_oom"] > 0.9
