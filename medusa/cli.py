"""What the subcommands share: a parser, and errors that are one line with the value, the rule and the way out."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from medusa.errors import UserError, nearest, reason

if TYPE_CHECKING:
    import jsonargparse

SPELLING = "The words of an option's name may be joined by - or by _."

# How jsonargparse words an unknown key: on the command line, in a group, at the top of a file or of an optional group.
UNKNOWN = (
    re.compile(r"unrecognized arguments: (?P<key>\S+)"),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),
)
# What is wrong with a value: which key it was for, and what it may be, of several types or of one.
OWNER_MARK = 'Parser key "'
OWNER = re.compile(OWNER_MARK + r'([^"]+)"')
SEVERAL = re.compile(r"Subtypes: \[([^\n]*)\]$.*?^\s*Given value: ([^\n]*)$", re.MULTILINE | re.DOTALL)
ONE = re.compile(r"Expected an? (.+?)\. Got value: (.*)$", re.MULTILINE)
NESTED = re.compile(r"NestedArg\(key='(.*?)', val=(.*)\)")  # of a key with a part that it does not have
# What is wrong with the words themselves, or with a file.
MISSING = re.compile(r"the following arguments are required: (.*)")
WORDS = re.compile(r"argument (?P<option>--[^\s:]+): (?P<wrong>.*)")
NO_FILE = re.compile(r"File does not exist: '(.*)'")
NO_GROUP = re.compile(r"Unable to load config '(.*)'")
NO_YAML = re.compile(r"Problems? parsing config: (.*)", re.DOTALL)
NO_OPTIONS = "Unexpected config: "
# The types of options that do not go by their own name.
LIST = re.compile(r"(?:<class ')?(?:collections\.abc\.)?(?:Sequence|list|tuple)(?:\[(?P<of>.*?)(?:, \.\.\.)?\]|'>)")
PLAIN = {"bool": ["true", "false"], "NoneType": ["null"], "dict": ["a mapping ('{name: value}')"]}


def new_parser(command: str, description: str) -> jsonargparse.ArgumentParser:
    """A parser for ``medusa COMMAND`` that takes no abbreviations and leaves errors to :func:`parse`."""
    from jsonargparse import ArgumentParser

    description = f"{description} {SPELLING}"
    return ArgumentParser(prog=f"medusa {command}", description=description, exit_on_error=False, allow_abbrev=False)


def parse(parser: jsonargparse.ArgumentParser, argv: list[str], keys: Iterable[str] = ()) -> jsonargparse.Namespace:
    """Parse ``argv``; the words of an option's name may be joined by ``-`` or by ``_``.

    ``keys`` are names that the parser takes without listing them as options, such as those of an optional group.

    Raises:
        UserError: an unknown key (with the nearest known one), a value of the wrong type, a missing or broken file.
    """
    options = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    known = dict.fromkeys([*options, *keys])
    try:
        return parser.parse_args([underscored(word, known) for word in argv])
    except argparse.ArgumentError as error:
        said = _missing(str(error), parser) or _unreadable(str(error), argv) or explain(str(error), known)
        raise UserError(f"{parser.prog}: {said}; see {parser.prog} --help") from error
    except (OSError, UnicodeError) as error:  # of a configuration file: jsonargparse lets these through
        files = ", ".join(_files(argv)) or "a configuration file"
        raise UserError(f"{parser.prog}: {files} can't be read ({reason(error)}): give YAML in UTF-8") from error


def _files(argv: Sequence[str]) -> list[str]:
    """What ``argv`` names that is a file."""
    values = [word.partition("=")[2] if word.startswith("--") else word for word in argv]
    return [value for value in values if os.path.isfile(value)]


def underscored(word: str, known: Container[str]) -> str:
    """``--max-new-tokens=5`` -> ``--max_new_tokens=5``, where that is an option; any other word is a value, or wrong.

    Options are named as in the Python API.
    """
    name, equals, value = word.removeprefix("--").partition("=")
    spelt = name.replace("-", "_")
    return f"--{spelt}{equals}{value}" if word.startswith("--") and spelt in known else word


def explain(message: str, keys: Iterable[str]) -> str:
    """Reword what jsonargparse says about a wrong input to one line; anything unforeseen only loses its line breaks."""
    known = list(keys)
    for reword in (_unknown, _wrong_words, _wrong_value, _wrong_file):
        if said := reword(message, known):
            return said
    return " ".join(message.split())


def _unknown(message: str, keys: list[str]) -> str | None:
    """A key that is none, or a word that belongs to none."""
    found = next((found for pattern in UNKNOWN if (found := pattern.search(message))), None)
    if found is None:
        return None
    word, group = found["key"], found.groupdict().get("group") or ".".join(OWNER.findall(message))
    if found.re is UNKNOWN[0] and not word.startswith("-"):
        return f"unexpected {word!r}: options are given as --NAME VALUE"
    name = word.removeprefix("--").partition("=")[0]
    return _no_option(f"{group}.{name}" if group else name, keys)


def _no_option(key: str, keys: list[str]) -> str:
    """Compare whole keys; failing that, the last part alone, which is what one remembers of a nested key."""
    last = {known.rpartition(".")[2]: known for known in keys}
    spelt = key.replace("-", "_")
    hint = nearest(spelt, keys)
    if spelt.rpartition(".")[2] in last:
        hint = f" (did you mean {last[spelt.rpartition('.')[2]]}?)"
    return f"unknown option {key!r}{hint}"


def _wrong_words(message: str, keys: list[str]) -> str | None:
    """An option without its value, with one that it doesn't take, or with none of its choices."""
    if (found := WORDS.match(message)) is None:
        return None
    option, wrong = found["option"], found["wrong"]
    if given := re.match(r"ignored explicit argument '(.*)'", wrong):
        return f"{option} takes no value: leave {given[1]!r} out"
    if wrong.startswith("expected "):
        return f"{option} is given without a value: add {'one or more' if 'at least' in wrong else 'one'}"
    if given := re.match(r"invalid choice: '(.*?)' \(choose from (.*)\)", wrong):
        choices = [choice.strip(" '") for choice in given[2].split(",")]
        return f"{option} {given[1]}: choose from {', '.join(choices)}{nearest(given[1], choices)}"
    return None


def _wrong_value(message: str, keys: list[str]) -> str | None:
    """A value of a type that its key does not take."""
    owners = OWNER.findall(message)
    if not owners:
        return None
    owner = ".".join(owners)  # an optional group's key, then its own part's
    last = message[message.rindex(OWNER_MARK) :]  # behind it the message is about the group, which may also be null
    if several := SEVERAL.search(last):
        kinds, given = _split(several[1]), several[2]
    elif one := ONE.search(last):
        kinds, given = [one[1]], one[2]
    else:
        return None
    if nested := NESTED.fullmatch(given):
        key = f"{owner}.{nested[1]}"
        return f"{key}={nested[2]} is not valid" if key in keys else _no_option(key, keys)
    own = _first_own(owner, keys)
    wanted = dict.fromkeys(word for kind in kinds for word in _words(kind, own))
    return f"{owner}={given} is not valid: give {_or(list(wanted))}"


def _wrong_file(message: str, keys: list[str]) -> str | None:
    """A configuration file that is not there."""
    if found := NO_FILE.search(message):
        return f"no file {os.path.relpath(found[1])}: give one in YAML"
    if found := NO_GROUP.search(message):
        group = OWNER.findall(message)[0]
        way = f"give a YAML file, or options of its own (such as {_first_own(group, keys)})"
        return f"{group}={found[1]} is not valid: {way}"
    return None


def _first_own(group: str, keys: Iterable[str]) -> str:
    """The first option in ``group``; none where it is an option itself."""
    return next((key for key in keys if key.startswith(f"{group}.") and not key.endswith(".help")), "")


def _missing(message: str, parser: jsonargparse.ArgumentParser) -> str | None:
    """What was left out and may not be: by name, with what it is where it is one thing."""
    if (found := MISSING.search(message)) is None:
        return None
    helps = {action.dest: (max(action.option_strings, default=action.dest), action.help) for action in parser._actions}
    told = [helps.get(name, (name, None)) for name in found[1].split(", ")]
    names = [name for name, _ in told]
    if len(told) == 1:
        return f"{names[0]} is missing" + (f": give {told[0][1]}" if told[0][1] else "")
    return f"{', '.join(names[:-1])} and {names[-1]} are missing"


def _unreadable(message: str, argv: Sequence[str]) -> str | None:
    """Which configuration is no YAML, or holds something else than options: the parser knows the content alone."""
    what = ", ".join(_files(argv)) or "the configuration"
    if found := NO_YAML.match(message):
        where = " ".join(found[1].replace('in "<unicode string>", line', "at line").split())
        return f"{what} can't be read as YAML ({where}): mend it"
    return f"{what} names no options: give lines such as `seed: 1`" if message.startswith(NO_OPTIONS) else None


def _split(kinds: str) -> list[str]:
    """The parts between commas that stand in no bracket: ``int, tuple[int, float]`` are two."""
    parts, depth = [""], 0
    for letter in kinds:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _words(kind: str, own: str) -> list[str]:
    """What to give for a type, as Python writes it; ``own``: an option of the group that the type may stand for."""
    if literal := re.fullmatch(r"typing\.Literal\[(.*)\]", kind):
        return literal[1].split(", ")
    if found := LIST.fullmatch(kind):
        return [_list(_split(found["of"] or ""), own)]
    if dotted := re.fullmatch(r"<class '(.*)'>", kind):
        if own and "." in dotted[1]:
            return [f"options of its own (such as {own})"]
        kind = dotted[1].rpartition(".")[2]
    return PLAIN.get(kind.partition("[")[0], [kind])


def _list(of: Sequence[str], own: str) -> str:
    """A list of so many things of these types, or of any number of the one."""
    inner = [_or(_words(kind, own)) for kind in of if kind]
    if len(inner) > 1:
        return f"[{', '.join(inner)}]"
    return "a list such as [1, 2]" if not inner else f"a list of {re.sub('^a list', 'lists', inner[0])}"


def _or(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
