"""What was raised where, and what led to it."""

import pytest

from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.tracebacks import CUT, ExceptionChain, parse_tracebacks
from holdfast.logs import catalog_files
from tests.core.words.knowing import said

LIB = "/opt/conda/lib/python3.11/site-packages/torch"


def traces(text: str) -> list[ExceptionChain]:
    return list(parse_tracebacks(said(text)))


def chain(text: str) -> list[str]:
    (trace,) = traces(text)
    return [raised.name for raised in trace.chain]


def test_frames_of_the_user_and_of_libraries() -> None:
    (trace,) = traces(f"""
Traceback (most recent call last):
  File "/workspace/train.py", line 88, in <module>
    main()
  File "/workspace/model.py", line 12, in forward
    return self.linear(x)
           ^^^^^^^^^^^^^^
  File "{LIB}/nn/modules/linear.py", line 117, in forward
    return F.linear(input, self.weight, self.bias)
  [Previous line repeated 3 more times]
RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x64 and 32x64)
""")
    (raised,) = trace.chain
    assert (raised.type, raised.origin, len(raised.frames)) == ("RuntimeError", "model.py:12", 3)
    assert [frame.is_user_code for frame in raised.frames] == [True, True, False]
    assert raised.message.startswith("mat1 and mat2")


def test_interleaved_ranks() -> None:
    found = traces("""
[rank3]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank3]:   File "/w/a.py", line 3, in f
[rank1]:   File "/w/b.py", line 1, in g
[rank3]:     x()
[rank1]: KeyError: 'b'
[rank3]: ValueError: a
""")
    assert {(t.last.name, t.last.origin, t.last.said.rank) for t in found} == {
        ("KeyError", "b.py:1", 1),
        ("ValueError", "a.py:3", 3),
    }


def test_what_led_to_what() -> None:
    text = """
Traceback (most recent call last):
  File "/w/a.py", line 3, in f
OSError: [Errno 28] No space left on device

{}

Traceback (most recent call last):
  File "/w/a.py", line 9, in g
RuntimeError: saving failed
"""
    during = text.format("During handling of the above exception, another exception occurred:")
    direct = text.format("The above exception was the direct cause of the following exception:")
    assert chain(during) == chain(direct) == ["OSError", "RuntimeError"]
    assert [traces(t)[0].last.link for t in (during, direct)] == ["during", "direct"]
    assert [t.last.name for t in traces(text.format(""))] == ["OSError", "RuntimeError"], "two of them"


def test_what_a_child_raised_comes_first() -> None:
    assert chain("""
Traceback (most recent call last):
  File "/w/train.py", line 3, in <module>
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/w/dataset.py", line 7, in __getitem__
PIL.UnidentifiedImageError: cannot identify image file 'a.jpg'
""") == ["UnidentifiedImageError", "ValueError"]
    assert chain("""
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/w/train.py", line 7, in work
KeyError: 'a'
""") == ["KeyError", "ProcessRaisedException"]
    assert chain("""
Traceback (most recent call last):
  File "/w/main.py", line 3, in <module>
ray.exceptions.RayTaskError(ValueError): ray::train() (pid=12, ip=10.0.0.1)
  File "/w/train.py", line 7, in train
ValueError: bad batch
""") == ["ValueError", "ValueError"]
    assert chain('''
multiprocessing.pool.RemoteTraceback:
"""
Traceback (most recent call last):
  File "/w/train.py", line 7, in work
KeyError: 'a'
"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/w/main.py", line 3, in <module>
KeyError: 'a'
''')[:1] == ["KeyError"]


def test_groups_of_exceptions() -> None:
    names = chain("""
  + Exception Group Traceback (most recent call last):
  |   File "/w/a.py", line 3, in <module>
  |     main()
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/w/a.py", line 9, in one
    | ValueError: one
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/w/a.py", line 12, in two
    | KeyError: 'two'
    +------------------------------------
""")
    assert names[-1] == "ExceptionGroup" and set(names[:-1]) == {"ValueError", "KeyError"}


def test_cut_off_in_front_and_behind() -> None:
    (front,) = traces('    main()\n  File "/w/a.py", line 3, in f\n    x()\nKeyError: 1')
    assert (front.last.name, front.last.origin) == ("KeyError", "a.py:3")
    begun = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    '
    (behind,) = traces(begun + "x()")
    assert (behind.last.type, behind.last.cut, behind.last.origin) == (CUT, True, "a.py:3")
    (raising,) = traces(begun + 'raise ValueError(f"no room for {name}")')
    assert (raising.last.name, raising.last.said.text) == ("ValueError", "ValueError: no room for {name}")
    (asserting,) = traces(begun + "assert x == y")
    assert asserting.last.name == "AssertionError"
    assert traces('Current thread 0x00007f (most recent call first):\n  File "/w/a.py", line 3 in f') == []
    (bare,) = traces("torch.cuda.OutOfMemoryError: CUDA out of memory.")
    assert bare.last.name == "OutOfMemoryError"


def test_others_talk_in_between() -> None:
    (trace,) = traces("""
Traceback (most recent call last):
step 12 loss 2.3
  File "/w/a.py", line 3, in f
step 13 loss 2.2
    x()
ValueError: a
""")
    assert (trace.last.name, trace.last.origin) == ("ValueError", "a.py:3")


def test_boxes_of_rich() -> None:
    (trace,) = traces("""
╭──────── Traceback (most recent call last) ────────╮
│ /w/train.py:88 in <module>                        │
│                                                   │
│ ❱ 88     main()                                   │
│ /w/model.py:12 in forward                         │
╰───────────────────────────────────────────────────╯
KeyError: 'labels'
""")
    assert (trace.last.name, trace.last.origin) == ("KeyError", "model.py:12")


def test_numbers_of_others_are_not_exceptions() -> None:
    (trace,) = traces("""
Traceback (most recent call last):
  File "/w/a.py", line 3, in f
some other line
Loss: 2.3
ValueError: a
""")
    assert trace.last.name == "ValueError"


def test_messages_of_several_lines() -> None:
    (trace,) = traces("""
Traceback (most recent call last):
  File "/w/a.py", line 3, in f
RuntimeError: Error(s) in loading state_dict for Net:
\tsize mismatch for a.weight: copying a param with shape [2] from checkpoint
""")
    assert [one.text.strip()[:13] for one in trace.last.more] == ["size mismatch"]


def test_names_that_are_no_exceptions() -> None:
    assert traces("INFO: all is well\nnote: this is\nhttp://x\nloss: 2.3\nDone") == []


def test_a_statement_of_several_lines_that_raises() -> None:
    (trace,) = traces("""
Traceback (most recent call last):
  File "/v/engine.py", line 699, in check
    raise ValueError("No memory for the engine's cache. "
                     f"Try {more} "
                     "of it.")
""")
    assert (trace.last.type, trace.last.cut) == ("ValueError", True)
    assert trace.last.message == "ValueError: No memory for the engine's cache. Try {more} of it."


def test_a_terminal_broke_the_frames_in_two() -> None:
    (trace,) = traces("""
Traceback (most recent call last):
  File "/opt/elastic/rendezvous/dynamic_rendezvous.py", line 1255, i
n num_nodes_waiting
    self._state_holder.sync()
  File "/opt/elastic/rendezvous/c10d_rendezvous_backend.py", line 11
9, in _call_store
    raise RendezvousConnectionError(
RendezvousConnectionError: The connection to the C10d store has failed.
""")
    assert [frame.function for frame in trace.last.frames] == ["num_nodes_waiting", "_call_store"]


def test_somebody_speaks_before_the_traceback_on_its_line() -> None:
    head = "Scheduler hit an exception: Traceback (most recent call last):"
    (trace,) = traces(f'{head}\n  File "a.py", line 1, in f\n    g()\nOSError: x')
    assert trace.last.before == "Scheduler hit an exception:" and trace.last.stack.startswith("Scheduler hit")


def test_a_stack_without_a_head() -> None:
    (trace,) = traces('  File "/a/queue.py", line 179, in get\n    self.not_empty.wait(remaining)')
    assert (trace.last.type, trace.last.headless) == (CUT, True)
    (trace,) = traces('Traceback (most recent call last):\n  File "/a/queue.py", line 179, in get\n    self.wait()')
    assert not trace.last.headless


def test_the_statement_of_the_innermost_frame_is_kept() -> None:
    (trace,) = traces("""
Traceback (most recent call last):
  File "/workspace/train.py", line 88, in <module>
    resume(args)
  File "/workspace/train.py", line 12, in resume
    optimizer.load_state_dict(
        checkpoint["optimizer"])
KeyError: 'optimizer'
""")
    assert trace.last.statement == 'optimizer.load_state_dict( checkpoint["optimizer"])'
    assert trace.last.stack.splitlines()[1:] == [
        f"> {trace.last.statement}",
        "/workspace/train.py <module>",
        "/workspace/train.py resume",
    ]


def test_a_message_that_begins_below_the_name_is_one_line() -> None:
    ((one,), (other,)) = [
        trace.chain
        for trace in traces("""
RuntimeError:
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.

ValueError: a message of its own
  and more
""")
    ]
    joined = one.joined_message()
    assert joined is not None and joined.raw.strip().startswith("An attempt")
    assert joined.text.startswith("RuntimeError: An attempt has been made to start a new process before the current")
    assert other.joined_message() is None


@pytest.mark.parametrize(("below", "torn"), [("", True), ("    self.reduce(bucket)\n", False)])
def test_a_last_frame_without_its_statement_is_not_who_raised(below: str, torn: bool) -> None:
    text = f"""
Traceback (most recent call last):
  File "/workspace/train.py", line 88, in <module>
    main()
  File "{LIB}/nn/parallel/distributed.py", line 447, in forward
{below}UnboundLocalError: local variable 'total' referenced before assignment
"""
    (trace,) = traces(text)
    assert trace.last.torn is torn and trace.last.stack.endswith("...") is torn
    klass = classify_failure(FailureEvidence(lines=said(text)), catalog_files.load_failures()).klass
    assert klass == ("python_exception" if torn else "framework_runtime_error")


@pytest.mark.parametrize("file", ["pandas/_libs/index.pyx", "<string>"])
def test_frames_that_never_show_a_statement_are_whole(file: str) -> None:
    (trace,) = traces(f"""
Traceback (most recent call last):
  File "/workspace/train.py", line 88, in <module>
    main()
  File "{file}", line 138, in get_loc
KeyError: 'tokens'
""")
    assert not trace.last.torn


def test_a_call_that_does_not_fit_its_function_is_the_callers() -> None:
    text = f"""
Traceback (most recent call last):
  File "/workspace/train.py", line 88, in <module>
    main()
  File "{LIB}/nn/parallel/distributed.py", line 447, in forward
    output = self.module(*inputs, **kwargs)
TypeError: Net.forward() takes from 2 to 3 positional arguments but 5 were given
"""
    found = classify_failure(FailureEvidence(lines=said(text)), catalog_files.load_failures())
    assert found.klass == "python_exception"


def test_a_library_that_stumbles_while_it_is_imported_lacks_another() -> None:
    text = """
Traceback (most recent call last):
  File "/workspace/train.py", line 3, in <module>
    from nemo.core import Loss
  File "/opt/src/nemo/core/__init__.py", line 16, in <module>
    from nemo.core.classes import *
AttributeError: type object 'LightningModule' has no attribute 'trainer'
"""
    found = classify_failure(FailureEvidence(lines=said(text)), catalog_files.load_failures())
    assert found.klass == "import_dependency"
