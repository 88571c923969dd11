"""Rules and learned words are weighed against each other; words evict no machine and refute no witness."""

import io

import msgspec
import pytest

from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.logs import catalog_files
from holdfast.logs.learned_words import SIGNS, ZERO, LearnedWords, load_learned, weigh_rules
from holdfast.logs.learned_words_diagnosis import weigh_words
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, diagnose_logs
from holdfast.model.last_words_diagnosis import Diagnosis

CATALOG = catalog_files.load_failures()
CLASSES = ("", "data_corrupt", "gpu_lost_bus", "python_exception")
LEARNED = LearnedWords(
    classes=CLASSES,
    actions=("evict_and_restart", "fix_config"),
    bias=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    scale=1.0,
    rarity_scale=1.0,
    trust=(1.0, 2.0, 0.0),
    least=1,
    words={
        "torn": SIGNS[1] + SIGNS[1] + SIGNS[ZERO + 9],
        "fallen": SIGNS[1] + SIGNS[2] + SIGNS[ZERO + 9],
        "loss": SIGNS[1] + SIGNS[0] + SIGNS[ZERO + 9],
        "odd": SIGNS[1] + SIGNS[1] + SIGNS[ZERO + 1],
        "setting": SIGNS[1] + SIGNS[5] + SIGNS[ZERO + 9],
    },
)
RULES = Diagnosis(
    klass="python_exception", group="script", action="rollback_or_fix_code", confidence=0.6, explanation="By rules."
)
QUIET = msgspec.structs.replace(RULES, klass="unknown_child_failure", confidence=0.0, explanation="Nothing was found.")


def weigh(text: str, rules: Diagnosis = RULES, catalog: FailureCatalog = CATALOG) -> Diagnosis:
    return weigh_words(rules, parse_lines(list(enumerate(text.split("\n"))), 0), None, catalog, LEARNED)


def test_words_that_outweigh_the_rules_name_the_class() -> None:
    found = weigh("[rank3]: the shard is torn\nall else is well")
    assert (found.klass, found.group, found.action) == ("data_corrupt", "data_storage", "fix_config")
    assert found.evidence == ("[rank3]: the shard is torn",) and found.root_rank == 3
    assert 0.9 < found.confidence <= 0.98 and "python_exception" in found.explanation


@pytest.mark.parametrize("text", ["an odd shard", "nothing that is known"])
def test_weak_words_change_no_class(text: str) -> None:
    found = weigh(text)
    assert (found.klass, found.action, found.explanation) == (RULES.klass, RULES.action, RULES.explanation)


def test_words_that_agree_make_the_rules_surer_and_others_less_sure() -> None:
    rules = msgspec.structs.replace(RULES, klass="data_corrupt")
    assert weigh("torn", rules).confidence > 0.9
    assert weigh("an odd shard").confidence < weigh("an odd shard", rules).confidence


def test_a_rule_that_is_nearly_sure_yields_only_to_words_that_are_much_surer() -> None:
    learned = msgspec.structs.replace(LEARNED, trust=(1.0, 4.6, 20.0))
    lines = parse_lines([(0, "the shard is torn")], 0)
    mild = weigh_words(RULES, lines, None, CATALOG, learned)
    assert mild.klass == "data_corrupt"
    sure = msgspec.structs.replace(RULES, confidence=0.91)
    odds = weigh_rules(learned.class_odds({"torn"}), sure.klass, sure.confidence, learned.trust)
    assert 0.5 < odds["data_corrupt"] < 0.7, "the words would win, but not by far"
    assert weigh_words(sure, lines, None, CATALOG, learned).klass == "python_exception"


def test_words_evict_no_machine() -> None:
    assert (weigh("it has fallen").klass, weigh("it has fallen").action) == ("gpu_lost_bus", "run_diagnostics")


def test_what_a_witness_says_stands() -> None:
    rules = msgspec.structs.replace(RULES, klass="gpu_ecc_memory", action="evict_and_restart", confidence=0.98)
    assert weigh("the shard is torn", rules) == rules


@pytest.mark.parametrize(
    ("text", "sure", "action"),
    [
        ("the card has a wrong setting", 0.91, "run_diagnostics"),
        ("the card has a wrong setting", 0.98, "evict_and_restart"),
        ("an odd card", 0.91, "evict_and_restart"),
        ("nothing that is known", 0.91, "evict_and_restart"),
    ],
)
def test_words_ask_for_probes_before_an_eviction_that_is_not_proven(text: str, sure: float, action: str) -> None:
    rules = msgspec.structs.replace(RULES, klass="gpu_lost_bus", action="evict_and_restart", confidence=sure)
    found = weigh(text, rules)
    assert (found.klass, found.confidence, found.action) == ("gpu_lost_bus", sure, action)
    assert (found == rules) == (action == "evict_and_restart")


def test_what_a_row_of_the_user_says_stands() -> None:
    own = CatalogRow(klass="python_exception", source="ours", pattern="zorb", sample="zorb")
    mine = FailureCatalog((), tuple(CATALOG.classes.values()), more=(own,))
    rules = msgspec.structs.replace(RULES, evidence=("zorb is torn",))
    assert weigh("zorb is torn", rules, mine) == rules
    assert weigh("zorb is torn", rules).klass == "data_corrupt", "nobody's row"


def test_where_the_rules_find_nothing_words_may_find_nothing_too() -> None:
    assert weigh("step 3 loss 1", QUIET) == QUIET
    assert weigh("an odd step, loss 1", QUIET) == QUIET
    found = weigh("the shard is torn", QUIET)
    assert found.klass == "data_corrupt"
    assert found.explanation == (
        "Data cannot be read, by the words of the whole log, which are like those of such failures. No rule knows it."
    )


def test_diagnose_weighs_words_only_where_holdfast_itself_has_said_nothing() -> None:
    text = b"the gateway closed our bucket stream while the shard was fetched\nstep 3 of the download was given up\n"
    logs = [RankLog(open=lambda: io.BytesIO(text))]
    alone = diagnose_logs(logs, ProcessEnds(), CATALOG)
    learned = msgspec.structs.replace(LEARNED, words={**LEARNED.words, "gateway": LEARNED.words["torn"]})
    assert diagnose_logs(logs, ProcessEnds(), CATALOG, learned=learned).klass == "data_corrupt" != alone.klass
    told = ProcessEnds(verdict="rank 2 left")
    assert diagnose_logs(logs, told, CATALOG, learned=learned) == diagnose_logs(logs, told, CATALOG)


def test_what_jobs_that_are_well_write_stays_no_failure() -> None:
    text = b"".join(b"[rank%d]: iteration %d loss 2.%d lr 1e-4 grad norm 0.9\n" % (n % 4, n, n) for n in range(60))
    found = diagnose_logs([RankLog(open=lambda: io.BytesIO(text))], ProcessEnds(), CATALOG, learned=load_learned())
    assert found.confidence == 0
