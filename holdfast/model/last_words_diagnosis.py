"""The diagnosis of what failed ranks printed last: the failure class, the party at fault, and the next action."""

import msgspec


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    klass: str  # of the failure taxonomy
    group: str  # whose fault; what is usual for the class if `fault_known` is false
    action: str  # what to do next
    confidence: float  # 0 to 1
    most_sure: float = 1.0  # the most that it may be, as the lines do not say why something failed
    explanation: str  # one or two sentences in plain words
    evidence: tuple[str, ...] = ()  # the very lines
    root_rank: int | None = None  # the rank that failed first, where that can be told
    title: str = ""  # the class in words
    hint: str = ""  # for a person
    origin: str = ""  # "file.py:12": where the user's code stood, else where it was raised
    echoes: int = 0  # lines that only say that somebody else failed first
    node: str = ""
    fault_known: bool = True  # False: the lines only say that another rank has gone
    peer: str = ""  # which one that is, if they name it
    went_on: bool = False  # the same job made steps after this failure
    verdict: str = ""  # what the run itself found, in its words
