"""What only a series of lines shows: ranks in different collectives, scales that fall, losses that jump."""

from holdfast.core.log_analysis.collective_mismatch import find_mismatch
from holdfast.core.log_analysis.loss_divergence import find_divergence
from tests.core.words.knowing import judged, said


def waiting(
    rank: int, kind: str, number: int = 812, size: int = 64, group: str = "[PG ID 0 PG GUID 0(default_pg) "
) -> str:
    work = f"WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    return f"[rank{rank}]:[E ProcessGroupNCCL.cpp:616] {group}Rank {rank}] Watchdog caught collective timeout: {work}"


def mismatch(*lines: str) -> list[int | None]:
    return [hit.rank for hit in find_mismatch(said("\n".join(lines)))]


def test_ranks_in_different_collectives() -> None:
    assert mismatch(waiting(0, "ALLREDUCE"), waiting(1, "ALLREDUCE"), waiting(2, "BROADCAST")) == [2]
    assert mismatch(waiting(0, "ALLREDUCE"), waiting(1, "ALLREDUCE", size=63)) == [1]
    assert mismatch(waiting(0, "ALLREDUCE"), waiting(1, "ALLREDUCE")) == []
    assert mismatch(waiting(0, "ALLREDUCE"), waiting(1, "BROADCAST", number=813)) == []
    assert mismatch(waiting(0, "_ALLGATHER_BASE"), waiting(1, "_ALLGATHER_BASE", size=63)) == [], "uneven shards"
    assert mismatch(waiting(0, "SEND"), waiting(1, "RECV")) == []


def test_groups_are_not_mixed_up() -> None:
    other = "[PG ID 3 PG GUID 7(tp) "
    assert mismatch(waiting(0, "ALLREDUCE"), waiting(1, "BROADCAST", group=other)) == []
    assert mismatch(waiting(0, "ALLREDUCE", 7, group="["), waiting(1, "BROADCAST", 7, group="[")) == []
    assert mismatch(waiting(0, "ALLREDUCE", group="["), waiting(1, "BROADCAST", group="[")) == [1]


def test_they_are_a_fault_of_the_code() -> None:
    one = judged(f"{waiting(0, 'ALLREDUCE')}\n{waiting(1, 'BROADCAST')}")
    assert (one.klass, one.action, one.root_rank) == ("framework_runtime_error", "rollback_or_fix_code", 1)


def scales(*values: float) -> str:
    return "\n".join(f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {one}" for one in values)


def diverged(text: str) -> int:
    return len(list(find_divergence(said(text))))


def test_a_loss_scale_that_only_falls() -> None:
    assert diverged(scales(*(2.0**n for n in range(16, 4, -1)))) == 1
    assert diverged(scales(65536, 32768, 16384)) == 0, "usual at the start"
    assert diverged(scales(*(2.0**n for n in range(16, 8, -1)), 2.0**16, 2.0**8)) == 0, "it recovers"
    (hint,) = find_divergence(said(scales(*(2.0**n for n in range(24, 20, -1)))))
    assert hint.row.role == "hint", "four in a row and no step: something, if nothing else is known"
    assert diverged(scales(2.0**-30, 0.0)) == 1 and diverged("loss scale: 0.0") == 0, "only overflows lead to nothing"
    logged = "\n".join(f"iteration {n} | lm loss: 2.0 | loss scale: {2.0 ** (16 - n)} |" for n in range(12))
    assert diverged(logged) == 1


def steps(*pairs: tuple[float, float]) -> str:
    return "\n".join(f"step {n} loss: {loss:.3f} grad_norm: {norm:.2f}" for n, (loss, norm) in enumerate(pairs))


def test_a_loss_that_jumps_and_stays() -> None:
    calm = [(2.1, 0.9)] * 6
    assert diverged(steps(*calm, (9.3, 210.0), (9.8, 180.0))) == 1
    assert diverged(steps(*calm, (9.3, 210.0), (2.2, 1.0))) == 0, "a spike"
    assert diverged(steps(*calm, (9.3, 1.0), (9.8, 1.1))) == 0, "another loss, at the same norm"
    assert diverged(steps(*calm)) == 0


def test_a_loss_scale_far_below_one() -> None:
    assert diverged(scales(0.00048828125, 0.000244140625)) == 1
    assert diverged(scales(1.0, 0.5)) == 0
    assert diverged("iteration 3 | lm loss: 2.0 | loss scale: 0.0 |") == 0, "switched off"


def losses(*values: float) -> str:
    return "\n".join(f"step {n}: loss={value}" for n, value in enumerate(values))


def test_a_loss_without_a_norm() -> None:
    calm = (2.1, 2.0, 2.05, 1.98, 1.97)
    assert diverged(losses(*calm, 8.9, 9.4, 9.8)) == 1
    assert diverged(losses(*calm, 8.9, 9.4, 2.0)) == 0, "it recovers"
    assert diverged(losses(*calm, 4.0, 4.1, 4.2)) == 0, "not far enough"
    assert diverged(losses(*calm[:4], 8.9, 9.4, 9.8)) == 0, "too few before"
    assert judged(losses(*calm, 8.9, 9.4, 9.8)).confidence == 0.5, "no more than a hint"
