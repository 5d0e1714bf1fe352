"""How names stand in the keys of Redis: in braces, where a cluster looks for what decides on the slot of a key."""

from __future__ import annotations


def tagged(name: str) -> str:
    """The name as it stands in braces, where the first } ends it."""
    if "%" in name or "}" in name:
        return name.replace("%", "%25").replace("}", "%7D")
    return name


def name_in(key: bytes, start: str) -> str | None:
    """The name in braces after this start of a key; None for a key that begins otherwise, or goes on after them."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return None
    start += "{"
    if not text.startswith(start) or not text.endswith("}"):
        return None
    tag = text[len(start) : -1]
    return None if "}" in tag else tag.replace("%7D", "}").replace("%25", "%")


def beginning(first: str, before: str) -> str:
    """What all names from the one to the other begin with."""
    length = 0
    while first[:length] == before[:length] and length < min(len(first), len(before)):
        length += 1
    return first[: length - (first[:length] != before[:length])]
