"""`holdfast completion`: prints a completion script for a shell. To get suggestions, the script calls this command."""

from typing import Any

from holdfast.cli.run_dirs.local_run_list import holdfast_home, known_runs
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.prepared_help import CommandLine, load_command_lines

_WORDS = "words"  # the shell's question, in place of its name: `holdfast completion words -- report --j`
_SHELLS = {
    "bash": r"""_holdfast() {
    local IFS=$'\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _holdfast holdfast""",
    "zsh": r"""#compdef holdfast
_holdfast() {
    local line
    local -a found
    for line in "${(@f)$("$words[1]" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    if (( $#found )); then _describe holdfast found; else _files; fi
}
compdef _holdfast holdfast""",
    "fish": r"""function __holdfast_words
    set -l words (commandline -opc)
    set -l found ($words[1] completion words -- $words[2..] (commandline -ct) 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c holdfast -f -k -a '(__holdfast_words)'""",
}
Suggestions = dict[str, str]  # word -> what it means


def main(argv: list[str]) -> int:
    if argv[:2] == [_WORDS, "--"]:
        for word, meaning in suggest_words(argv[2:]).items():
            print(f"{word}\t{meaning}")
        return 0
    parser = CommandParser(
        prog="holdfast completion",
        description="Print what makes your shell complete commands, flags, settings and runs; docs/USE.md says where "
        "to write it.",
    )
    parser.add_argument("shell", choices=tuple(_SHELLS), help="whose language to print")
    args = parser.parse_args(argv)
    print(_SHELLS[args.shell])
    return 0


def suggest_words(words: list[str]) -> Suggestions:
    """Return suggestions for the last word, which may be empty; none where a file name is expected."""
    from holdfast.cli.command_dispatch import COMMANDS

    *before, begun = words or [""]
    if not before:
        return _beginning(begun, COMMANDS)
    lines = load_command_lines()
    line = _line_of(lines, before[0])
    if line is None:
        return {}
    flags, wanted = _walk(line, before[1:])
    if wanted is None:
        return {}
    if begun.startswith("-"):
        return _beginning(begun, flags)
    return _beginning(begun, _values(wanted, lines[""]["settings"])) if wanted else {}


def _line_of(lines: dict[str, CommandLine], command: str) -> CommandLine | None:
    return lines["run"] if command == "sbatch" else lines.get(command)


def _walk(line: CommandLine, words: list[str]) -> tuple[Suggestions, dict[str, Any] | None]:
    """Return two things: the flags that may follow the typed words, and the flag or argument whose value comes next.
    The latter is empty if only flags may follow. It is None if holdfast can suggest nothing, as after a script's
    name."""
    rows = _rows_by_name(line)
    places = [row for row in line["rows"] if "verbs" in row or not row["names"][0].startswith("-")]
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if word == "--":
            return {}, None
        if row := rows.get(word):
            if row.get("takes") != 0 and at == len(words):
                return {}, row
            at += row.get("takes") != 0
        elif word.startswith("-"):
            continue
        elif places and "verbs" in places[0]:
            below = places[0]["verbs"].get(word)
            return _walk(below, words[at:]) if below else ({}, None)
        elif places and "help" not in places[0]:  # a script: what follows is its own
            return {}, None
        elif places and places[0].get("takes") not in ("*", "+"):
            places.pop(0)
    return _shown_flags(line), places[0] if places else {}


def _rows_by_name(line: CommandLine) -> dict[str, dict[str, Any]]:
    return {name: row for row in line["rows"] for name in row.get("names", ())}


def _shown_flags(line: CommandLine) -> Suggestions:
    shown = {name: row for name, row in _rows_by_name(line).items() if name.startswith("--") and row.get("help")}
    return {name: row["help"].replace("%%", "%") for name, row in shown.items()} | {"--help": "explain this"}


def _values(row: dict[str, Any], settings: list[str]) -> Suggestions:
    if "verbs" in row:
        return {verb: below.get("help", "") for verb, below in row["verbs"].items()}
    if row.get("value") == "KEY=VALUE":
        return {f"{name}=": "setting" for name in settings}
    if row.get("value") == "RUN":
        own = holdfast_home() / "runs"
        return {run_dir.name if run_dir.parent == own else str(run_dir): "run" for run_dir in known_runs()}
    return dict.fromkeys(row.get("choices", ()), "")


def _beginning(begun: str, words: Suggestions) -> Suggestions:
    return {word: meaning for word, meaning in words.items() if word.startswith(begun)}
