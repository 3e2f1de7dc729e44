"""What a call reports: the message of its error, and the facts that this must name."""

import pytest

from multigpu.errors import UserError


def refusal(function):
    """The message of the UserError that `function` must raise: one line."""
    with pytest.raises(UserError) as caught:
        function()
    reported = str(caught.value)
    assert "\n" not in reported and reported.endswith((".", "?")), reported
    return reported


def names(function, *facts):
    """The UserError that `function` raises names all these facts."""
    text = refusal(function)
    missing = [fact for fact in facts if fact not in text]
    assert not missing, f"{missing} not in: {text}"


def user_error(function):
    """The message of the UserError that `function` raises; "" if it raises none."""
    try:
        function()
    except UserError as error:
        return str(error)
    return ""


def outcome(function):
    """The type and the message of the error that `function` raises; "nothing" if none."""
    try:
        function()
    except (UserError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
