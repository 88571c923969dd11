"""What ranks are started in: the user's environment, our defaults where it is silent, none of our secrets."""

from holdfast.wire.rank_environment_defaults import make_rank_environment


def test_what_the_user_has_set_stays() -> None:
    env = {"OMP_NUM_THREADS": "4", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_ENABLE_TIMING": "0", "A": "b"}
    assert make_rank_environment(env) == env


def test_defaults() -> None:
    ours = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "64", "TORCH_NCCL_ENABLE_TIMING": "1"}
    assert make_rank_environment({}) == ours


def test_secrets_and_what_is_no_text_are_left_out() -> None:
    env = {"HOLDFAST_TOKEN": "s", "HOLDFAST_TOKEN_FILE": "f", "BYTES": "\udcff", "\udcff": "x"}
    assert make_rank_environment(env) == make_rank_environment({})
