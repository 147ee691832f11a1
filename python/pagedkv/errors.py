"""The errors of the package, and the checks of arguments that all its parts share.

Every error is raised before anything changes.
"""

from __future__ import annotations

import operator
from typing import Any


class PagedKVError(Exception):
    """Base of the errors below."""


class InvalidArgumentError(PagedKVError, ValueError):
    """An argument has a value or a type that is not accepted."""


def refused(name: str, expected: str, value: Any) -> InvalidArgumentError:
    """The one form that errors about an argument have."""
    return InvalidArgumentError(f"{name}: expected {expected}, got {value!r}")


def integer(name: str, value: Any, minimum: int | None = None, note: str = "", *, maximum: int | None = None) -> int:
    """`value` as an int; anything else, and what is out of the range, is an InvalidArgumentError that says so."""
    try:
        number = None if isinstance(value, bool) else int(operator.index(value))
    except TypeError:
        number = None
    if number is None:
        raise refused(name, "an int", value)
    if minimum is not None and number < minimum:
        raise InvalidArgumentError(f"{name}: expected at least {minimum}{note}, got {number}")
    if maximum is not None and number > maximum:
        raise InvalidArgumentError(f"{name}: expected at most {maximum}, got {number}")
    return number


def boolean(name: str, value: Any) -> bool:
    """`value` if it is a bool; anything else, 0 and 1 too, is an InvalidArgumentError that says so."""
    if not isinstance(value, bool):
        raise refused(name, "a bool", value)
    return value


def listed(name: str, value: Any, expected: str) -> list[Any]:
    """`value` as a list; a text, and what can not be iterated, is an InvalidArgumentError that says so."""
    try:
        if not isinstance(value, str | bytes):
            return list(value)
    except TypeError:
        pass
    raise refused(name, expected, value)


class UnknownSequenceError(PagedKVError, LookupError):
    """No sequence of that id: never added, or freed already."""


class DuplicateSequenceError(PagedKVError, ValueError):
    """A sequence of that id exists, or one call names an id twice."""


class UnknownBlockError(PagedKVError, LookupError):
    """A block id outside the pool, or the null block."""


class BlockReferenceError(PagedKVError, ValueError):
    """A block would be freed more often than it is referenced, or published while it is free."""


class OutOfBlocksError(PagedKVError, RuntimeError):
    """The pool has fewer free blocks than were asked for."""


class CommitError(PagedKVError, ValueError):
    """More tokens are committed than exist, or than were granted slots."""


class PendingCopyError(PagedKVError, RuntimeError):
    """A block is used whose content a copy or a swap, not yet taken, still has to bring."""


class TruncationError(PagedKVError, ValueError):
    """The length is past the existing tokens, or negative."""


class ReleasedPositionError(TruncationError):
    """The next token would see positions whose blocks a window has given back."""


class NonCausalError(PagedKVError, ValueError):
    """Prefix caching or chunked prefill was asked for with attention that is not causal."""


class IntegrityError(PagedKVError, AssertionError):
    """`check_integrity` found a broken invariant."""
