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
OWNER_MARK = 'Parser key "'
OWNER = re.compile(OWNER_MARK + r'([^"]+)"')
EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: .*)?$", re.MULTILINE)
GIVEN = re.compile(r"(?:Given value|Got value): (.*)")


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
    options = {option.removeprefix("--") for action in parser._actions for option in action.option_strings}
    known = {*options, *keys}
    try:
        return parser.parse_args([underscored(word, known) for word in argv])
    except argparse.ArgumentError as error:
        raise UserError(f"{parser.prog}: {explain(str(error), known)}; see {parser.prog} --help") from error
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
    owners = OWNER.findall(message)
    owner = ".".join(owners)  # an optional group's key, then its own part's
    for pattern in UNKNOWN:
        if found := pattern.search(message):
            parts = found.groupdict()
            key = parts["key"].removeprefix("--").partition("=")[0]
            group = parts.get("group") or owner
            return _unknown(f"{group}.{key}" if group else key, list(keys))
    last = message[message.rindex(OWNER_MARK) :] if owners else message
    given, expected = GIVEN.findall(last), [_type_name(kind) for kind in EXPECTED.findall(last)]
    if owners and given and expected:
        # Below an optional group the rest of the message is about the group, which may also be null.
        wanted = expected[:1] if len(owners) > 1 else dict.fromkeys(expected)
        return f"{owner}={given[0 if len(owners) > 1 else -1]} is not valid: give {' or '.join(wanted)}"
    return " ".join(message.split())


def _unknown(key: str, keys: list[str]) -> str:
    """Compare whole keys; failing that, the last part alone, which is what one remembers of a nested key."""
    last = {known.rpartition(".")[2]: known for known in keys}
    spelt = key.replace("-", "_")
    hint = nearest(spelt, keys)
    if spelt.rpartition(".")[2] in last:
        hint = f" (did you mean {last[spelt.rpartition('.')[2]]}?)"
    return f"unknown option {key!r}{hint}"


def _type_name(kind: str) -> str:
    """``<class 'int'>`` -> int, ``typing.Literal['a', 'b']`` -> 'a' or 'b'."""
    if named := re.fullmatch(r"<class '(?:.*\.)?(\w+)'>", kind):
        return "null" if named.group(1) == "NoneType" else named.group(1)
    if literal := re.fullmatch(r"typing\.Literal\[(.*)\]", kind):
        return " or ".join(literal.group(1).split(", "))
    return kind
