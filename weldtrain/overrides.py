"""Overrides as a command line gives them, `key=value`: quoted for Hydra's grammar, looked up by name, checked by key."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from types import NoneType

from weldtrain.config import GROUPS, PATH_KEYS, TEXT_KEYS, schema_keys, unknown_key
from weldtrain.errors import ConfigError


def named(overrides: Sequence[str]) -> dict[str, str]:
    """The value of each override by its key or group, without quotes; empty for one that is deleted."""
    return {name.lstrip("+~"): value.strip("'\"") for name, _, value in (o.partition("=") for o in overrides)}


def without(overrides: Iterable[str], *names: str) -> list[str]:
    """The overrides of other keys than these."""
    return [o for o in overrides if o.partition("=")[0].lstrip("+~") not in names]


def quoted_text(override: str) -> str:
    """An override of a key that holds text, quoted for Hydra's grammar: there 2024_05 is a number and [0-9] a list.

    What the user has quoted, and a comma, which separates the points of a sweep, are left alone.
    """
    name, equals, value = override.partition("=")
    target = name.lstrip("+")
    if not equals or target not in PATH_KEYS + TEXT_KEYS or value[:1] in ("'", '"') or value in ("", "null") or "," in value:
        return override
    return f"{name}={quoted(os.path.expanduser(value) if target in PATH_KEYS else value)}"


def quoted(value: str) -> str:
    """Text as a value in Hydra's grammar."""
    # A backslash is one, except before a quote.
    value = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
    return f"'{value}'"


def command_line(arguments: Iterable[str]) -> str:
    """What a user types in a shell to give these arguments: without the quotes that are put round text anyway."""
    def plain(argument: str) -> str:
        name, _, value = argument.partition("=")
        bare = f"{name}={value[1:-1]}"
        return bare if quoted_text(bare) == argument else argument

    return shlex.join(["python", "-m", "weldtrain", *map(plain, arguments)])


def check_override_keys(overrides: Sequence[str]) -> None:
    """Refuses an override whose key is not in the schema, with or without `+`, `++` or `~`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    known = schema_keys()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        name = override.key_or_group
        if name not in known and name not in GROUPS and not name.startswith(("hydra.", "hydra/")):
            raise unknown_key(name)
        if override.is_delete() and not name.startswith(("hydra.", "hydra/")):
            raise ConfigError("cannot be deleted", name, "every key has a value: give it another")
        if name in GROUPS and isinstance(override.value(), (NoneType, int, float, dict)):
            raise ConfigError(f"{override.get_value_string()} is no choice", name, f"name one, or leave out {name}=")
