"""The pool of blocks alone, for people with a manager of their own. Imports no torch."""

from pagedkv.manager.pool import BlockPool

__all__ = ["BlockPool"]
