"""Learns the weights of words anew from the open labelled logs, and writes them where the package loads them.

python -m tests.learned_words
"""

import msgspec
import torch

from benchmarks._words_learning import learn_all, read_lessons
from holdfast.logs.learned_words import PATH, LearnedWords


def format_learned(learned: LearnedWords) -> bytes:
    """Return the content of the file, with one line for each word."""
    words = b",\n".join(
        b"%s:%s" % (msgspec.json.encode(word), msgspec.json.encode(signs)) for word, signs in learned.words.items()
    )
    head = msgspec.json.encode(msgspec.structs.replace(learned, words={}))
    return head.removesuffix(b"{}}") + b"{\n" + words + b"\n}}\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    PATH.write_bytes(format_learned(learn_all(read_lessons())))
