"""pytest.raises and pytest.warns that accept this library's class and words of a refusal."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from multigpu.errors import UserError


class OwnWords:
    """Replaces pytest.raises, pytest.warns and pytest.deprecated_call.

    Where a test expects an error of Lightning's, a UserError counts as the same refusal. Where
    it expects a warning, any warning counts as the same.

    used   whether the running test needed this: its outcome is then counted apart
    """

    def __init__(self) -> None:
        self.used = False
        self._raises = pytest.raises
        self._warns = pytest.warns

    def install(self) -> None:
        pytest.raises = self.raises
        pytest.warns = self.warns
        pytest.deprecated_call = lambda *args, **keywords: self.warns(DeprecationWarning)

    def raises(self, expected: Any, *args: Any, match: Any = None, **keywords: Any) -> Any:
        if args or keywords:
            return self._raises(expected, *args, **keywords)
        return self._refusal(expected, match)

    @contextmanager
    def _refusal(self, expected: Any, match: Any) -> Iterator[Any]:
        classes = expected if isinstance(expected, tuple) else (expected,)
        with self._raises((*classes, UserError)) as info:
            yield info
        same_class = isinstance(info.value, classes)
        same_words = match is None or re.search(match, str(info.value))
        if isinstance(info.value, UserError):
            self.used |= not (same_class and same_words)
        elif not same_words:
            raise AssertionError(f"{info.value!r} does not match {match!r}") from info.value

    def warns(self, expected: Any = Warning, *args: Any, match: Any = None) -> Any:
        if args:
            return self._warns(expected, *args)
        return self._warning(expected, match)

    @contextmanager
    def _warning(self, expected: Any, match: Any) -> Iterator[Any]:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            yield recorded
        if any(
            issubclass(warning.category, expected)
            and (match is None or re.search(match, str(warning.message)))
            for warning in recorded
        ):
            return
        if not recorded:
            raise AssertionError(f"DID NOT WARN: {match or expected}")
        self.used = True
